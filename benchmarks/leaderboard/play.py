"""One run of a system: it trains, failures strike, and it is watched until it is whole again or time is up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from benchmarks.leaderboard import notes
from benchmarks.leaderboard.failures import FAILURES, NODE, Missed, Repair, rounds, schedule
from benchmarks.leaderboard.notes import Figures
from benchmarks.leaderboard.ranks.core import MICRO_BATCHES
from benchmarks.leaderboard.systems.base import NODES, RANKS, System
from tests.support.processes import of_a_world, wait_for
from unicron_ctl.shared.system.errors import UserError

START_LIMIT = 120.0  # seconds for all ranks to train
WARM = 25  # iterations of the whole job before the first failure
LOOK = 0.2  # seconds between two reads of the notes, which have the times
CLOSE = 0.02  # the most seconds from the note of a micro-batch to the failure
MORE = 5  # iterations after the job is whole again, for the loss curve
SETTLED = 4.0  # seconds of watching after the last repair, and the longest pause of a job that trains
REFERENCE_LIMIT = 600.0  # seconds for the undisturbed run
OPERATOR = 45.0  # seconds without a step of the stream after which an operator starts the job again
# Errors that end one row of hours of others: a wait in vain, a command or a process that did not end.
BROKE_OFF = (AssertionError, OSError, subprocess.SubprocessError, UserError)


class Limits(msgspec.Struct, frozen=True):
    """Limits in seconds from the failure."""

    next_step: float
    full_strength: float
    look: float = LOOK
    """Seconds between two reads of the notes."""


class Outcome(msgspec.Struct):
    """The outcome of one failure."""

    survived: bool
    figures: Figures
    losses: dict[int, list[float]]
    """Losses of the whole run by iteration."""
    why: str = ""


class Stream(msgspec.Struct):
    """A job under a stream of failures."""

    micro_batches: int = 0
    """Useful micro-batches of the rounds, and of undisturbed spells in which not all ranks trained."""
    seconds: float = 0.0
    """The time of those."""
    undisturbed: list[float] = []
    """Micro-batches a second in each other spell, in their order."""
    operator: int = 0
    """Times that an operator had to start the job again."""
    struck: int = 0
    missed: int = 0
    """Failures that found no rank to strike."""
    losses: dict[int, list[float]] = {}
    """Losses of the whole run by iteration."""
    why: str = ""

    def share(self, undisturbed: float) -> float:
        """Return the useful rate over the undisturbed one."""
        return self.micro_batches / self.seconds / undisturbed


class Due(NamedTuple):
    """A failure of a node, or a repair."""

    at: float
    """Seconds from the beginning of its round."""
    failure: str = ""
    node: int = NODE
    repair: Callable[[], None] | None = None


Result = TypeVar("Result", Outcome, Stream)
Observe = Callable[[str, System], None]
"""observe(moment, system) is called at the moments "before" the failure, "struck" and "stepped"."""


def with_job(kind: Callable[[Path], System], folder: Path, watch: Callable[[System], Result]) -> Result:
    """Return the result of `watch` on a job that has trained some iterations with all its ranks.

    If the job's end fails, `why` of the result says so. Raises AssertionError if the job does not train.
    """
    system = kind(folder)
    try:
        system.start()
        wait_for(lambda: _trains(system), lambda: f"{system.name} trains\n{system.logs()}", START_LIMIT)
        found = watch(system)
    except BaseException as error:
        if ended := _end(system):
            error.add_note(ended)
        raise
    found.why = "; ".join(filter(None, (found.why, _end(system))))
    return found


def _end(system: System) -> str:
    """End its job. Return the error of that, or an empty text."""
    try:
        system.close()
    except BROKE_OFF as error:
        return f"its end failed: {describe(error)}"
    return ""


def describe(error: BaseException) -> str:
    """Return an error's text, with a command's standard error and the errors that followed."""
    words = [str(error) or type(error).__name__, getattr(error, "stderr", None), *getattr(error, "__notes__", ())]
    return " ".join(str(word).strip()[-2000:] for word in words if word)


def _trains(system: System) -> bool:
    system.read()
    return len({note.iteration for note in notes.steps(system.notes) if note.world == system.size}) >= WARM


def _watch(system: System, seconds: float, done: Callable[[], bool] = lambda: False, look: float = LOOK) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        system.read()
        if done():
            return True
        time.sleep(look)
    return done()


def _in_an_iteration(system: System) -> None:
    """Wait until an iteration has just begun, so that a failure hits the computing and not the reduce."""
    system.read()
    last, deadline = notes.newest(system.notes), time.monotonic() + SETTLED
    while time.monotonic() < deadline:
        for note in system.read():
            if note.what == "step":
                last = max(last, note.iteration)
            elif note.what == "micro" and note.iteration > last and time.time() - note.time < CLOSE:
                return
        time.sleep(CLOSE / 4)


def fail(
    kind: Callable[[Path], System], failure: str, folder: Path, limits: Limits, observe: Observe = lambda _, __: None
) -> Outcome:
    """Strike a new job once. Raises AssertionError if it does not train before, or Missed."""
    return with_job(kind, folder, lambda system: _one_failure(system, failure, limits, observe))


def _one_failure(system: System, failure: str, limits: Limits, observe: Observe) -> Outcome:
    observe("before", system)
    _in_an_iteration(system)
    struck = time.time()
    repair = FAILURES[failure](system, min(NODE, system.size - 1))
    observe("struck", system)
    recovered = _recover(system, struck, repair, limits, observe)
    micro_batches = int(system.variables.get("LEADERBOARD_MICRO_BATCHES", MICRO_BATCHES))
    figures = notes.figures(system.notes, struck, system.size, micro_batches)
    losses = notes.losses(system.notes)
    if recovered:
        return Outcome(True, figures, losses)
    why = "trained on, and stopped later" if figures.next_step_seconds is not None else "no further step"
    kept = figures.micro_batches_again, figures.micro_batches_dropped
    return Outcome(False, Figures(None, None, None, *kept), losses, f"{why} within {limits.next_step:g} s")


def _recover(system: System, struck: float, repair: Repair | None, limits: Limits, observe: Observe) -> bool:
    """Watch the job to the end. Return whether it trains then."""
    if repair is not None:
        _watch(system, struck + repair.after - time.time())
        repair.action()
    since = time.monotonic()

    def whole() -> bool:
        steps = [note for note in notes.steps_after(system.notes, struck) if note.world == system.size]
        return len({note.iteration for note in steps}) > MORE and time.monotonic() > since + SETTLED

    def stepped() -> bool:
        return bool(notes.steps_after(system.notes, struck))

    if not _watch(system, limits.next_step - (time.time() - struck), stepped, limits.look):
        return False
    observe("stepped", system)
    _watch(system, limits.full_strength - (time.time() - struck), whole)
    ended = time.time()
    return _watch(system, limits.next_step, lambda: any(note.time > ended for note in notes.steps(system.notes)))


def stream(kind: type[System], seconds: float, undisturbed: float, seed: int, folder: Path) -> Stream:
    """Strike a job by the failures of :func:`schedule`, with `undisturbed` seconds before them and after each ROUND.

    Raises AssertionError if it does not train before.
    """
    return with_job(kind, folder, lambda system: _all_pieces(system, seconds, undisturbed, seed))


def _all_pieces(system: System, seconds: float, undisturbed: float, seed: int) -> Stream:
    streamed = _Streamed(system)
    streamed.quiet(undisturbed)
    assert streamed.found.undisturbed, f"all ranks train, undisturbed\n{system.logs()}"
    for begin, length, planned in rounds(seconds, schedule(seconds, seed, NODES)):
        streamed.disturbed(length, [Due(at - begin, failure, node) for at, failure, node in planned])
        streamed.quiet(undisturbed)
    streamed.found.losses = notes.losses(system.notes)
    return streamed.found


class _Streamed:
    """A job under the stream, with its figures so far."""

    def __init__(self, system: System) -> None:
        self._system, self._stepped = system, time.time()
        self.found = Stream()

    def quiet(self, seconds: float) -> None:
        """Let the job train without failures.

        If all ranks train all the time, this gives the undisturbed rate; else the time counts as part of the stream.
        """
        began = time.time()
        _watch(self._system, seconds)
        ended = time.time()
        self._system.read()
        self._stepped = max([self._stepped, *(note.time for note in notes.steps(self._system.notes))])
        useful = notes.useful(self._system.notes, began, ended, MICRO_BATCHES)
        if notes.steady(self._system.notes, began, ended, NODES, SETTLED):
            self.found.undisturbed.append(useful / (ended - began))
        else:
            self.found.micro_batches += useful
            self.found.seconds += ended - began

    def disturbed(self, seconds: float, due: list[Due]) -> None:
        """Strike the job by failures at their times, and repair. An operator or a repair may prolong it."""
        began = time.time()
        while (now := time.time()) < began + seconds:
            for each in [each for each in due if began + each.at <= now]:
                due.remove(each)
                if (repair := self._do(each)) is not None:
                    due.append(Due(time.time() - began + repair.after, repair=repair.action))
            steps = (note.time for note in self._system.read() if note.what == "step")
            self._stepped = max([self._stepped, *steps])
            if time.time() - self._stepped > OPERATOR:  # the operator also does the repairs
                self._system.begin_again()
                self.found.operator += 1
                self._stepped, due = time.time(), [each for each in due if each.failure]
            time.sleep(LOOK)
        for each in due:
            if each.repair:
                each.repair()
            else:
                self.found.missed += 1  # the operator was at work all the time
        ended = time.time()
        self._system.read()
        self.found.micro_batches += notes.useful(self._system.notes, began, ended, MICRO_BATCHES)
        self.found.seconds += ended - began

    def _do(self, due: Due) -> Repair | None:
        if due.repair:
            due.repair()
            return None
        try:
            repair = FAILURES[due.failure](self._system, due.node)
        except Missed:
            self.found.missed += 1
            return None
        self.found.struck += 1
        return repair


def reference(folder: Path, iterations: int) -> dict[int, float]:
    """Return the losses of an undisturbed run of the same ranks, without a device's time. Raises RuntimeError."""
    folder.mkdir(parents=True)
    ours = {"LEADERBOARD_OUT": str(folder), "LEADERBOARD_CHECKPOINT": str(folder / "checkpoint.pt")}
    ours |= {"LEADERBOARD_ITERATIONS": str(iterations), "LEADERBOARD_DEVICE_SECONDS": "0", "OMP_NUM_THREADS": "1"}
    ours["LEADERBOARD_COLLECTIVE_SECONDS"] = str(REFERENCE_LIMIT)  # nobody fails, so a late one is waited for
    command = [sys.executable, str(RANKS / "elastic.py")]
    with (folder / "log").open("wb") as log:
        ranks = [
            subprocess.Popen(command, env=world | ours | {"LEADERBOARD_NODE": world["RANK"]}, stdout=log, stderr=log)
            for world in of_a_world(NODES)
        ]
    try:
        failed = any(rank.wait(REFERENCE_LIMIT) for rank in ranks)
    except subprocess.TimeoutExpired:
        failed = True
    finally:
        for rank in ranks:
            rank.kill()
    if failed:
        raise RuntimeError(f"the undisturbed run failed:\n{(folder / 'log').read_text()[-3000:]}")
    found = [note for path in folder.glob("notes.*") for note in notes.parse(path.read_text(), path.name)]
    return {iteration: each[0] for iteration, each in notes.losses(found).items()}
