"""One system in one run: it trains, a failure strikes it, and it is watched until it is whole again or time is up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.leaderboard import notes
from benchmarks.leaderboard.failures import FAILURES, NODE, Repair, schedule
from benchmarks.leaderboard.notes import Figures
from benchmarks.leaderboard.ranks.core import MICRO_BATCHES
from benchmarks.leaderboard.systems.base import NODES, RANKS, System
from tests.support.processes import of_a_world, wait_for

START_LIMIT = 120.0  # seconds for all ranks to train
WARM = 25  # iterations of the whole job before anything happens
LOOK = 0.02  # seconds between two looks at the notes
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
    """Micro-batches a second that were of use, before the failures and under them."""

    undisturbed: float
    disturbed: float
    operator: int


@contextmanager
def training(kind: type[System], folder: Path) -> Iterator[System]:
    """A job of this system that has trained some iterations with all its ranks. Raises AssertionError."""
    system = kind(folder)
    try:
        system.start()
        wait_for(lambda: _whole_steps(system) >= WARM, lambda: f"{kind.name} trains\n{system.logs()}", START_LIMIT)
        yield system
    finally:
        system.close()


def _whole_steps(system: System) -> int:
    return len({note.iteration for note in notes.steps(system.notes()) if note.world == NODES})


def _watch(system: System, seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if done():
            return True
        time.sleep(LOOK)
    return done()


def _in_an_iteration(system: System) -> None:
    """Returns when all ranks have just begun an iteration, so that a failure hits the computing and not the reduce."""
    last = notes.newest(system.notes())

    def begun() -> bool:
        micro = [note for note in system.notes() if note.what == "micro" and note.iteration > last]
        return bool(micro) and time.time() - max(note.time for note in micro) < 2 * LOOK

    _watch(system, SETTLED, begun)


def fail(kind: type[System], failure: str, folder: Path, limits: Limits) -> Outcome:
    """One failure of a job of its own. Raises AssertionError when it does not train before."""
    with training(kind, folder) as system:
        _in_an_iteration(system)
        struck = time.time()
        repair = FAILURES[failure].strike(system, NODE)
        recovered = _recover(system, struck, repair, limits)
        figures = notes.figures(system.notes(), struck, NODES, MICRO_BATCHES)
        losses = notes.losses(system.notes())
        if recovered:
            return Outcome(True, figures, losses)
        why = "trained on, and stopped later" if figures.next_step_seconds is not None else "no further step"
        nothing = msgspec.structs.replace(
            figures, next_step_seconds=None, full_strength_seconds=None, iterations_lost=None
        )
        return Outcome(False, nothing, losses, f"{why} within {limits.next_step:g} s")


def _recover(system: System, struck: float, repair: Repair | None, limits: Limits) -> bool:
    """Watch it to the end; whether it trains then."""
    if repair is not None:
        _watch(system, struck + repair.after - time.time())
        repair.action()
    since = time.monotonic()

    def whole() -> bool:
        steps = [note for note in notes.steps_after(system.notes(), struck) if note.world == NODES]
        return len({note.iteration for note in steps}) > MORE and time.monotonic() > since + SETTLED

    def stepped() -> bool:
        return bool(notes.steps_after(system.notes(), struck))

    if not _watch(system, limits.next_step - (time.time() - struck), stepped):
        return False
    _watch(system, limits.full_strength - (time.time() - struck), whole)
    ended = time.time()
    return _watch(system, limits.next_step, lambda: notes.steps(system.notes())[-1].time > ended)


def stream(kind: type[System], seconds: float, undisturbed: float, seed: int, folder: Path) -> Stream:
    """The failures of :func:`schedule`, after so many seconds without any. Raises AssertionError when it does not train
    before."""
    with training(kind, folder) as system:
        began = time.time()
        _watch(system, undisturbed)
        usual = notes.useful(system.notes(), began, time.time(), MICRO_BATCHES) / (time.time() - began)
        began, due, operator = time.time(), [], 0
        due = [(at, _striking(system, failure, node)) for at, failure, node in schedule(seconds, seed, NODES)]
        touched = began
        while (now := time.time()) < began + seconds:
            for action in [action for at, action in due if began + at <= now]:
                due = [each for each in due if each[1] is not action]
                repair = action()
                if repair is not None:
                    due.append((time.time() - began + repair.after, repair.action))
            last = max(notes.steps(system.notes())[-1].time, touched)
            if time.time() - last > OPERATOR:
                system.begin_again()
                operator, touched, due = operator + 1, time.time(), [each for each in due if _strikes(each[1])]
            time.sleep(LOOK)
        disturbed = notes.useful(system.notes(), began, began + seconds, MICRO_BATCHES) / seconds
        return Stream(usual, disturbed, operator)


class _striking:
    """A failure that waits for its time."""

    def __init__(self, system: System, failure: str, node: int) -> None:
        self._system, self._failure, self._node = system, failure, node

    def __call__(self) -> Repair | None:
        return FAILURES[self._failure].strike(self._system, self._node)


def _strikes(action: Callable[[], Repair | None]) -> bool:
    """Not a repair, which an operator's fresh start makes needless."""
    return isinstance(action, _striking)


def reference(folder: Path, iterations: int) -> dict[int, float]:
    """The losses of as many ranks, undisturbed, and with no time of a device's. Raises RuntimeError."""
    folder.mkdir()
    ours = {"LEADERBOARD_OUT": str(folder), "LEADERBOARD_CHECKPOINT": str(folder / "checkpoint.pt")}
    ours |= {"LEADERBOARD_ITERATIONS": str(iterations), "LEADERBOARD_DEVICE_SECONDS": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RANKS / "elastic.py")]
    with (folder / "log").open("wb") as log:
        ranks = [
            subprocess.Popen(command, env=world | ours | {"LEADERBOARD_NODE": world["RANK"]}, stdout=log, stderr=log)
            for world in of_a_world(NODES)
        ]
    if any(rank.wait() for rank in ranks):
        raise RuntimeError(f"the undisturbed run failed:\n{(folder / 'log').read_text()[-3000:]}")
    found = [note for path in folder.glob("notes.*") for note in notes.parse(path.read_text(), path.name)]
    return {iteration: each[0] for iteration, each in notes.losses(found).items()}
