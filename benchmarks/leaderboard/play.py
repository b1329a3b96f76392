"""One system in one run: it trains, a failure strikes it, and it is watched until it is whole again or time is up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.leaderboard import notes
from benchmarks.leaderboard.failures import FAILURES, NODE, Missed, Repair, schedule
from benchmarks.leaderboard.notes import Figures
from benchmarks.leaderboard.ranks.core import MICRO_BATCHES
from benchmarks.leaderboard.systems.base import NODES, RANKS, System
from tests.support.processes import of_a_world, wait_for

START_LIMIT = 120.0  # seconds for all ranks to train
WARM = 25  # iterations of the whole job before anything happens
LOOK = 0.2  # seconds between two looks at the notes; all times are the notes' own
CLOSE = 0.02  # seconds: so fresh is the note of a micro-batch upon which a failure strikes
MORE = 5  # iterations after the job is whole again, for the loss curve
SETTLED = 4.0  # seconds that are watched after the last repair, and within which a job that trains takes a step
OPERATOR = 45.0  # seconds without a step, in the stream, after which an operator starts the job again


class Limits(msgspec.Struct, frozen=True):
    """Seconds from the failure."""

    next_step: float
    full_strength: float


class Outcome(msgspec.Struct):
    """Of one failure. losses: of the whole run, by iteration."""

    survived: bool
    figures: Figures
    losses: dict[int, list[float]]
    why: str = ""


class Stream(msgspec.Struct):
    """Micro-batches a second that were of use, before the failures and under them. struck: failures that found whom to
    strike; missed: those that did not."""

    undisturbed: float
    disturbed: float
    operator: int
    struck: int
    missed: int


class Due(NamedTuple):
    """A failure of a node at its time, or a repair; seconds from the beginning of the stream."""

    at: float
    failure: str = ""
    node: int = NODE
    repair: Callable[[], None] | None = None


@contextmanager
def training(kind: type[System], folder: Path) -> Iterator[System]:
    """A job of this system that has trained some iterations with all its ranks. Raises AssertionError."""
    system = kind(folder)
    try:
        system.start()
        wait_for(lambda: _trains(system), lambda: f"{kind.name} trains\n{system.logs()}", START_LIMIT)
        yield system
    finally:
        system.close()


def _trains(system: System) -> bool:
    system.read()
    return len({note.iteration for note in notes.steps(system.notes) if note.world == NODES}) >= WARM


def _watch(system: System, seconds: float, done: Callable[[], bool] = lambda: False, look: float = LOOK) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        system.read()
        if done():
            return True
        time.sleep(look)
    return done()


def _in_an_iteration(system: System) -> None:
    """Returns when an iteration has just begun, so that a failure hits the computing and not the reduce."""
    system.read()
    last, deadline = notes.newest(system.notes), time.monotonic() + SETTLED
    while time.monotonic() < deadline:
        for note in system.read():
            if note.what == "step":
                last = max(last, note.iteration)
            elif note.what == "micro" and note.iteration > last and time.time() - note.time < CLOSE:
                return
        time.sleep(CLOSE / 4)


def fail(kind: type[System], failure: str, folder: Path, limits: Limits) -> Outcome:
    """One failure of a job of its own. Raises AssertionError when it does not train before, or Missed."""
    with training(kind, folder) as system:
        _in_an_iteration(system)
        struck = time.time()
        repair = FAILURES[failure].strike(system, NODE)
        recovered = _recover(system, struck, repair, limits)
        figures = notes.figures(system.notes, struck, NODES, MICRO_BATCHES)
        losses = notes.losses(system.notes)
        if recovered:
            return Outcome(True, figures, losses)
        why = "trained on, and stopped later" if figures.next_step_seconds is not None else "no further step"
        nothing = msgspec.structs.replace(
            figures, next_step_seconds=None, full_strength_seconds=None, iterations_lost=None, ranks_at_end=None
        )
        return Outcome(False, nothing, losses, f"{why} within {limits.next_step:g} s")


def _recover(system: System, struck: float, repair: Repair | None, limits: Limits) -> bool:
    """Watch it to the end; whether it trains then."""
    if repair is not None:
        _watch(system, struck + repair.after - time.time())
        repair.action()
    since = time.monotonic()

    def whole() -> bool:
        steps = [note for note in notes.steps_after(system.notes, struck) if note.world == NODES]
        return len({note.iteration for note in steps}) > MORE and time.monotonic() > since + SETTLED

    def stepped() -> bool:
        return bool(notes.steps_after(system.notes, struck))

    if not _watch(system, limits.next_step - (time.time() - struck), stepped):
        return False
    _watch(system, limits.full_strength - (time.time() - struck), whole)
    ended = time.time()
    return _watch(system, limits.next_step, lambda: any(note.time > ended for note in notes.steps(system.notes)))


def stream(kind: type[System], seconds: float, undisturbed: float, seed: int, folder: Path) -> Stream:
    """The failures of :func:`schedule`, after so many seconds without any. Raises AssertionError when it does not train
    before."""
    with training(kind, folder) as system:
        began = time.time()
        _watch(system, undisturbed)
        usual = notes.useful(system.notes, began, time.time(), MICRO_BATCHES) / (time.time() - began)
        began, last = time.time(), time.time()
        operator = struck = missed = 0
        due = [Due(at, failure, node) for at, failure, node in schedule(seconds, seed, NODES)]
        while (now := time.time()) < began + seconds:
            for each in [each for each in due if began + each.at <= now]:
                due.remove(each)
                if each.repair:
                    each.repair()
                    continue
                try:
                    repair = FAILURES[each.failure].strike(system, each.node)
                    struck += 1
                except Missed:
                    missed += 1
                    continue
                if repair is not None:
                    due.append(Due(time.time() - began + repair.after, repair=repair.action))
            last = max([last, *(note.time for note in system.read() if note.what == "step")])
            if time.time() - last > OPERATOR:  # what waits to be repaired is repaired by it, too
                system.begin_again()
                operator, last, due = operator + 1, time.time(), [each for each in due if each.failure]
            time.sleep(LOOK)
        disturbed = notes.useful(system.notes, began, began + seconds, MICRO_BATCHES) / seconds
        return Stream(usual, disturbed, operator, struck, missed)


def reference(folder: Path, iterations: int) -> dict[int, float]:
    """The losses of as many ranks, undisturbed, and with no time of a device's. Raises RuntimeError."""
    folder.mkdir(parents=True)
    ours = {"LEADERBOARD_OUT": str(folder), "LEADERBOARD_CHECKPOINT": str(folder / "checkpoint.pt")}
    ours |= {"LEADERBOARD_ITERATIONS": str(iterations), "LEADERBOARD_DEVICE_SECONDS": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RANKS / "elastic.py")]
    with (folder / "log").open("wb") as log:
        ranks = [
            subprocess.Popen(command, env=world | ours | {"LEADERBOARD_NODE": world["RANK"]}, stdout=log, stderr=log)
            for world in of_a_world(NODES)
        ]
    try:
        failed = any(rank.wait() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    if failed:
        raise RuntimeError(f"the undisturbed run failed:\n{(folder / 'log').read_text()[-3000:]}")
    found = [note for path in folder.glob("notes.*") for note in notes.parse(path.read_text(), path.name)]
    return {iteration: each[0] for iteration, each in notes.losses(found).items()}
