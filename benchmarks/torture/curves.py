"""Compare a training with the undisturbed one, by the ranks' own notes of losses and micro-batches. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import relative_difference

NAMED = 5  # iterations in one line
Step = Mapping[str, Any]


def not_once(steps: Iterable[Step], reduced: Iterable[Step], first: int, last: int, micro_batches: int) -> list[str]:
    """Return a line for each error in iterations `first` to `last`; none if each micro-batch is in one gradient.

    `reduced` has what each rank noted when it began to reduce. A rank that died after that has its part in the sum if
    it was in the generation that reduced last, in which the others have stepped.
    """
    by_iteration, brought = _by_iteration(steps), _by_iteration(reduced)
    found = []
    for iteration in range(first, last + 1):
        noted = by_iteration.get(iteration, [])
        slots = [step["slot"] for step in noted]
        if not slots:
            found.append(f"iteration {iteration}: no rank noted it")
            continue
        if len(slots) > len(set(slots)):
            found.append(f"iteration {iteration}: stepped twice by one of slots {sorted(slots)}")
            continue
        parts = {slot: part for slot, part in _last_sum(brought.get(iteration, [])).items() if slot not in slots}
        parts |= {step["slot"]: step["micro_batches"] for step in noted}
        counts = Counter(index for part in parts.values() for index in part)
        twice = sorted(index for index, count in counts.items() if count > 1)
        if twice:
            found.append(f"iteration {iteration}: micro-batches {twice} in two gradients")
        missing = sorted(set(range(micro_batches)) - counts.keys())
        if missing:
            found.append(f"iteration {iteration}: micro-batches {missing} in no gradient")
    return found


def _by_iteration(steps: Iterable[Step]) -> dict[int, list[Step]]:
    found: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        found[step["iteration"]].append(step)
    return found


def _last_sum(notes: Sequence[Step]) -> dict[int, list[int]]:
    """Return the micro-batches of each slot in the latest generation that reduced."""
    latest = max((note["generation"] for note in notes), default=0)
    return {note["slot"]: note["micro_batches"] for note in notes if note["generation"] == latest}


def curve(steps: Iterable[Step], first: int, last: int) -> tuple[dict[int, float], list[int]]:
    """Return (losses by iteration, iterations of which two ranks of one generation report different losses).

    If an iteration was stepped in two generations, the later one counts.
    """
    of: dict[int, tuple[int, float]] = {}
    split = []
    for step in steps:
        iteration, generation, loss = step["iteration"], step["generation"], step["loss"]
        if not first <= iteration <= last:
            continue
        known = of.get(iteration)
        if known is not None and known[0] == generation and known[1] != loss:
            split.append(iteration)
        if known is None or known[0] < generation:
            of[iteration] = generation, loss
    return {iteration: loss for iteration, (_, loss) in sorted(of.items())}, split


def spans(began: Sequence[int], last: int) -> list[tuple[int, int]]:
    """Return the first and last iteration of each leg, without those that the next leg trains again."""
    ends = [*(first - 1 for first in began[1:]), last]
    return [(first, end) for first, end in zip(began, ends, strict=True)]


@dataclass(frozen=True)
class Apart:
    """The distance of two curves."""

    iterations: int
    largest: float
    """The largest relative difference; infinite if a loss is no number."""
    where: int
    """Its iteration."""
    missing: tuple[int, ...]
    """Iterations of only one curve."""
    over: int
    """Iterations that differ by more than the tolerance."""


def apart(losses: Mapping[int, float], reference: Mapping[int, float], tolerance: float) -> Apart:
    """Compare two curves."""
    last = max(losses, default=-1)
    wanted = set(range(last + 1))
    missing = tuple(sorted(wanted - (losses.keys() & reference.keys())))
    differences = {i: relative_difference(losses[i], reference[i]) for i in sorted(wanted - set(missing))}
    where = max(differences, key=lambda i: differences[i], default=-1)
    over = sum(not each <= tolerance for each in differences.values())
    return Apart(len(differences), differences.get(where, 0.0), where, missing, over)


def named(iterations: Sequence[object]) -> str:
    """Return the number of iterations, and the first of them."""
    return f"{len(iterations)}: {', '.join(map(str, iterations[:NAMED]))}{', ...' if len(iterations) > NAMED else ''}"
