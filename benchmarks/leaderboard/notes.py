"""Notes of the training processes (`ranks/core.Notes`), and the figures computed from them. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from benchmarks.report import relative_difference

AGREES = 1e-12  # a smaller relative difference is rounding


class Note(msgspec.Struct, frozen=True):
    """One line of a process's notes."""

    what: str
    time: float
    """Seconds since the epoch."""
    process: str = ""
    """The process's file."""
    iteration: int = -1
    index: int = -1
    loss: float = float("nan")
    world: int = 0
    rank: int = -1
    node: int = -1
    pid: int = -1
    micro: tuple[int, ...] = ()


class Figures(msgspec.Struct, frozen=True):
    """The cost of one failure until the end of the watch; None for what did not happen."""

    next_step_seconds: float | None
    """From the failure to the first step after it."""
    full_strength_seconds: float | None
    """From the failure to the first step of all ranks."""
    iterations_lost: int | None
    """Optimizer steps that were repeated, by every rollback."""
    micro_batches_again: int
    """Micro-batches that were computed again."""
    micro_batches_dropped: int
    """Micro-batches in no rank's step of an iteration."""
    ranks_at_end: int | None = None
    """Ranks of the last step."""
    longest_pause_seconds: float | None = None
    """Between two steps of any ranks, or from the failure to the first."""


def parse(text: str, process: str) -> list[Note]:
    """Return the notes of one process, without a last line that is half written. A loss that is no number is text."""
    whole = text[: text.rfind("\n") + 1]
    found = (msgspec.json.decode(line, type=Note, strict=False) for line in whole.splitlines())
    return [msgspec.structs.replace(note, process=process) for note in found]


def steps(notes: Iterable[Note]) -> list[Note]:
    """Return the optimizer steps of all ranks by time."""
    return sorted((note for note in notes if note.what == "step"), key=lambda note: note.time)


def newest(notes: Iterable[Note]) -> int:
    """Return the last iteration that any rank has stepped; -1 before the first."""
    return max((note.iteration for note in notes if note.what == "step"), default=-1)


def steps_after(notes: Sequence[Note], struck: float) -> list[Note]:
    """Return the steps after a failure by time.

    A step of the iteration that was the newest at the failure is a peer's late note, unless the training goes back.
    """
    ordered = steps(notes)
    back = list(rollbacks(ordered, _began(notes)))
    since = max((note.time for note, _ in back if note.time <= struck), default=0.0)
    last = max((note.iteration for note in ordered if since <= note.time <= struck), default=-1)
    anew = min((note.time for note, undone in back if note.time > struck and last in undone), default=math.inf)
    return [note for note in ordered if note.time > struck and (note.iteration != last or note.time >= anew)]


def _began(notes: Iterable[Note]) -> dict[str, float]:
    """Return when each process began."""
    return {note.process: note.time for note in notes if note.what == "start"}


def figures(notes: Sequence[Note], struck: float, ranks: int, micro_batches: int) -> Figures:
    """Return the cost of the failure at `struck` for a job of `ranks` ranks."""
    after = steps_after(notes, struck)
    whole = next((note for note in after if note.world == ranks), None)
    lost = sum(len(undone) for note, undone in rollbacks(steps(notes), _began(notes)) if note.time > struck)
    return Figures(
        after[0].time - struck if after else None,
        whole.time - struck if whole else None,
        lost if after else None,
        again(notes, struck),
        dropped(after, micro_batches),
        after[-1].world if after else None,
        max(b - a for a, b in pairwise([struck, *(note.time for note in after)])) if after else None,
    )


def rollbacks(stepped: Iterable[Note], began: Mapping[str, float]) -> Iterator[tuple[Note, range]]:
    """Yield (the first step after a rollback, the iterations that it undoes) of steps that are sorted by time.

    `began` has when each process began; a process that it lacks is new if its step is behind the newest one.
    A step of an iteration that was stepped before is a peer's note of the same step, unless its process had already
    stepped that iteration or began later. If the first process to repeat it had not noted it, the next step decides:
    the first one is nearer to that than to the step that is undone.
    """
    reached, taken, newest_of = -1, dict[int, float](), dict[str, int]()
    run = list[Note]()  # the last steps, as far as they are of one iteration
    for note in stepped:
        run = run if run and run[-1].iteration == note.iteration else []
        first = taken.get(note.iteration, 0.0)
        if note.process in newest_of:
            anew = newest_of[note.process] >= note.iteration
        else:
            unknown = math.inf if note.iteration < reached else 0.0
            anew = began.get(note.process, unknown) > first
        if note.iteration <= reached and anew:
            run = [each for each in run if note.time - each.time < each.time - first]
            yield [*run, note][0], range(note.iteration, reached + 1)
            reached = note.iteration - 1
            taken = {iteration: time for iteration, time in taken.items() if iteration <= reached}
            newest_of = {process: min(newest, reached) for process, newest in newest_of.items()}
        run.append(note)
        reached = max(reached, note.iteration)
        taken.setdefault(note.iteration, run[0].time)
        newest_of |= {each.process: each.iteration for each in run}


def again(notes: Iterable[Note], since: float) -> int:
    """Count the micro-batches that were computed after `since` and also before."""
    seen, count = set(), 0
    for note in sorted((note for note in notes if note.what == "micro"), key=lambda note: note.time):
        which = (note.iteration, note.index)
        count += which in seen and note.time > since
        seen.add(which)
    return count


def dropped(stepped: Iterable[Note], micro_batches: int) -> int:
    """Count the micro-batches that no rank had in its last step of an iteration.

    The last iteration does not count: some ranks may not have noted it yet.
    """
    held: dict[int, set[int]] = defaultdict(set)
    for note in _final(stepped).values():
        held[note.iteration].update(note.micro)
    last = max(held, default=-1)
    return sum(micro_batches - len(each) for iteration, each in held.items() if iteration != last)


def losses(notes: Iterable[Note]) -> dict[int, list[float]]:
    """Return the losses of each iteration, one for each process; the last of several counts."""
    found: dict[int, list[float]] = defaultdict(list)
    for note in _final(steps(notes)).values():
        found[note.iteration].append(note.loss)
    return dict(found)


def _final(stepped: Iterable[Note]) -> dict[tuple[int, str], Note]:
    """Return the last step of each process and iteration, without those that a rollback has undone."""
    ordered = sorted(stepped, key=lambda note: note.time)
    redone: dict[int, float] = {}  # iteration -> when it was undone last
    for note, undone in rollbacks(ordered, {}):
        redone.update(dict.fromkeys(undone, note.time))
    return {(n.iteration, n.process): n for n in ordered if n.time >= redone.get(n.iteration, 0.0)}


def difference(found: Mapping[int, Sequence[float]], reference: Mapping[int, float]) -> float | None:
    """Return the largest relative difference of a loss from the undisturbed run's; None without a common iteration."""
    apart = [
        relative_difference(loss, reference[iteration])
        for iteration, each in found.items()
        if iteration in reference
        for loss in each
    ]
    return (max(apart) if max(apart) > AGREES else 0.0) if apart else None


def compared(found: Iterable[int], reference: Iterable[int]) -> int:
    """Count the common iterations."""
    return len(set(found) & set(reference))


def useful(notes: Sequence[Note], begin: float, end: float, micro_batches: int) -> int:
    """Count the micro-batches by which the training advanced between two times, without those lost or dropped."""
    ordered = steps(notes)
    before = [note for note in ordered if note.time <= begin]
    within = [note for note in ordered if begin < note.time <= end]
    if not within:
        return 0
    first = before[-1].iteration if before else -1
    missing = dropped([note for note in steps_after(notes, begin) if note.time <= end], micro_batches)
    return (within[-1].iteration - first) * micro_batches - missing


def steady(notes: Iterable[Note], begin: float, end: float, ranks: int, pause: float) -> bool:
    """Return whether all ranks took every step between two times, without a longer pause than `pause` seconds."""
    within = [note for note in steps(notes) if begin < note.time <= end]
    times = [begin, *(note.time for note in within), end]
    return {note.world for note in within} == {ranks} and max(b - a for a, b in pairwise(times)) <= pause
