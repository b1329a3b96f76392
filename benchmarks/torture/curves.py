"""Was the training the undisturbed one? By what the ranks noted themselves: losses, and the micro-batches that each had
in its gradient and had fetched. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMED = 5  # iterations in one line
Step = Mapping[str, Any]
Fetched = Mapping[int, Mapping[int, set[int]]]
"""iteration -> slot -> micro-batches."""


def fetched(lines: Mapping[int, Iterable[str]]) -> Fetched:
    """From the lines "INCARNATION ITERATION INDEX" of each slot. A line that a kill has torn counts for nothing."""
    found: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for slot, written in lines.items():
        for line in written:
            words = line.split()
            if len(words) == 3 and all(word.isdecimal() for word in words):
                found[int(words[1])][slot].add(int(words[2]))
    return found


def not_once(steps: Iterable[Step], work: Fetched, first: int, last: int, micro_batches: int) -> list[str]:
    """What is not exactly once in iterations `first` to `last`; empty when each micro-batch is in one gradient.

    Whoever is gone without a word after the reduce has its part in the sum all the same; then what the others lack is
    among what it had fetched.
    """
    by_iteration: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_iteration[step["iteration"]].append(step)
    found = []
    for iteration in range(first, last + 1):
        told = by_iteration.get(iteration, [])
        slots = [step["slot"] for step in told]
        if not slots:
            found.append(f"iteration {iteration}: nobody noted it")
            continue
        if len(slots) > len(set(slots)):
            found.append(f"iteration {iteration}: stepped twice by one of slots {sorted(slots)}")
            continue
        counts = Counter(index for step in told for index in step["micro_batches"])
        twice = sorted(index for index, count in counts.items() if count > 1)
        if twice:
            found.append(f"iteration {iteration}: micro-batches {twice} in two gradients")
        silent = {index for slot, has in work.get(iteration, {}).items() if slot not in slots for index in has}
        missing = set(range(micro_batches)) - counts.keys() - silent
        if missing:
            found.append(f"iteration {iteration}: micro-batches {sorted(missing)} in nobody's gradient")
    return found


def curve(steps: Iterable[Step], first: int, last: int) -> tuple[dict[int, float], list[int]]:
    """(iteration -> loss, iterations of which two ranks of one generation tell different losses). Of an iteration that
    was stepped in two generations the later one's counts."""
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
    """Of each leg the first and the last iteration that counts: what the next leg trains again does not."""
    ends = [*(first - 1 for first in began[1:]), last]
    return [(first, end) for first, end in zip(began, ends, strict=True)]


@dataclass(frozen=True)
class Apart:
    """How far a curve is from another. largest: relative, at iteration `where`. missing: iterations of only one."""

    iterations: int
    largest: float
    where: int
    missing: tuple[int, ...]
    over: int


def apart(losses: Mapping[int, float], reference: Mapping[int, float], tolerance: float) -> Apart:
    """`over`: how many iterations differ by more than the tolerance, relative."""
    last = max(losses, default=-1)
    wanted = set(range(last + 1))
    missing = tuple(sorted(wanted - (losses.keys() & reference.keys())))
    differences = {i: abs(losses[i] - reference[i]) / abs(reference[i]) for i in sorted(wanted - set(missing))}
    where = max(differences, key=lambda i: differences[i], default=-1)
    over = sum(difference > tolerance for difference in differences.values())
    return Apart(len(differences), differences.get(where, 0.0), where, missing, over)


def named(iterations: Sequence[object]) -> str:
    """The first of them, and how many there are."""
    return f"{len(iterations)}: {', '.join(map(str, iterations[:NAMED]))}{', ...' if len(iterations) > NAMED else ''}"
