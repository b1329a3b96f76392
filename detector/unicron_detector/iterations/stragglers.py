"""Finds ranks that are always slower than their peers, without a history of the job. Pure, standard library only.

`IterationMonitor` sees a job that becomes slow, but a straggler that was slow from the start is part of its baseline.
Here each rank's own phases are compared with those of its peers over the last blocks of iterations. A rank is reported
if the difference matters (THRESHOLD), exceeds the peers' own differences and the noise of the measurement, and was
there in every block.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

from unicron_detector.iterations.culprit import OWN_PHASES, Culprit

OWN_TIMES = (*OWN_PHASES, "outside")  # in these a rank works by itself
BLOCK, BLOCKS = 8, 6  # iterations of a block; blocks in a row
THRESHOLD = 0.1  # of the iteration's own work
PEER_SPREADS = 4.0  # robust standard deviations among the peers
ERRORS = 6.0  # standard errors of the rank's own difference
Row = Mapping[int, Mapping[str, float]]


@dataclass
class Block:
    """Sums over some iterations: slot -> one number for each phase."""

    iterations: int = 0
    seconds: dict[int, list[float]] = field(default_factory=dict)
    apart: dict[int, list[float]] = field(default_factory=dict)
    """Differences from the mean of all ranks, so that common noise does not count."""
    squared: dict[int, list[float]] = field(default_factory=dict)
    """Their squares."""

    def add(self, row: Row) -> None:
        table = {slot: [times.get(name, 0.0) for name in OWN_TIMES] for slot, times in row.items()}
        middle = [fmean(column) for column in zip(*table.values(), strict=True)]
        self.iterations += 1
        for slot, values in table.items():
            seconds = self.seconds.setdefault(slot, [0.0] * len(OWN_TIMES))
            apart = self.apart.setdefault(slot, [0.0] * len(OWN_TIMES))
            squared = self.squared.setdefault(slot, [0.0] * len(OWN_TIMES))
            for index, value in enumerate(values):
                difference = value - middle[index]
                seconds[index] += value
                apart[index] += difference
                squared[index] += difference * difference


class Stragglers:
    """Feed it `observe` once for each iteration; `current` is the straggler, if there is one."""

    def __init__(self) -> None:
        self.current: Culprit | None = None
        self.clear()

    def clear(self) -> None:
        """Start again: the ranks or their work have changed. `current` stays until the next comparison."""
        self._past: deque[Block] = deque(maxlen=BLOCKS)
        self._open = Block()

    def observe(self, row: Row, groups: Mapping[int, Hashable] | None = None) -> Culprit | None:
        """Add one iteration, slot -> phase -> seconds for equal work, and return ``current``. groups: slot -> ranks
        with the same value are comparable.

        It compares once for each block; an iteration with other slots starts again.
        """
        before = self._open.seconds or (self._past[-1].seconds if self._past else row)
        if set(row) != set(before):
            self.clear()
        self._open.add(row)
        if self._open.iterations < BLOCK:
            return self.current
        self._past.append(self._open)
        self._open = Block()
        if self.current is not None and not self._still(self.current, groups or {}):
            self.current = None
        if self.current is None and len(self._past) == BLOCKS:
            self.current = self._find(groups or {})
        return self.current

    def _means(self, last: int) -> dict[int, list[float]]:
        """Return the seconds of an iteration over the last blocks. Means are compared, not single iterations, because
        with two speeds the mean is above the median for all ranks."""
        blocks = list(self._past)[-last:]
        count = sum(block.iterations for block in blocks)
        return {
            slot: [sum(block.seconds[slot][index] for block in blocks) / count for index in range(len(OWN_TIMES))]
            for slot in blocks[-1].seconds
            if all(slot in block.seconds for block in blocks)
        }

    def _still(self, culprit: Culprit, groups: Mapping[int, Hashable]) -> bool:
        """Whether the last two blocks still show half of the threshold; one lucky block is no cure."""
        means, slot = self._means(2), culprit.slot
        if slot is None or slot not in means:
            return False
        peers = _peers(means, slot, groups)
        if not peers:
            return False
        excess = _excess(means, slot, peers, OWN_TIMES.index(culprit.phase))
        return excess > 0.5 * THRESHOLD * (sum(means[slot]) - excess)

    def _find(self, groups: Mapping[int, Hashable]) -> Culprit | None:
        means = self._means(BLOCKS)
        candidates = []
        for group in {groups.get(slot) for slot in means}:
            slots = [slot for slot in means if groups.get(slot) == group]
            for index in range(len(OWN_TIMES)) if len(slots) > 1 else ():
                middle = median(means[slot][index] for slot in slots)
                candidates.append(max((means[slot][index] - middle, -slot, index) for slot in slots))
        looks = (self._examine(means, -slot, index, groups) for _, slot, index in sorted(candidates, reverse=True)[:3])
        return next((culprit for culprit in looks if culprit is not None), None)

    def _examine(
        self, means: Mapping[int, list[float]], slot: int, index: int, groups: Mapping[int, Hashable]
    ) -> Culprit | None:
        peers = _peers(means, slot, groups)
        excess = _excess(means, slot, peers, index)
        work = sum(means[slot]) - excess
        least = THRESHOLD * work
        if not excess > least > 0.0:
            return None
        parts = []
        for block in self._past:
            sums = {other: [block.seconds[other][index] / block.iterations] for other in (slot, *peers)}
            parts.append(_excess(sums, slot, peers, 0))
        error = max(self._noise(slot, index), pstdev(parts) / math.sqrt(len(parts)))  # noise also comes in runs
        middle = means[slot][index] - excess
        spread = 1.4826 * median(abs(means[other][index] - middle) for other in peers)
        if min(parts) <= 0.5 * least or excess <= ERRORS * error or excess <= PEER_SPREADS * spread:
            return None
        slowdown = (work + excess) / work
        reason = (
            f"slot {slot} takes {middle + excess:.3f} s in {OWN_TIMES[index]}, its {len(peers)} "
            f"peer{'s' * (len(peers) > 1)} {middle:.3f} s, in all of the last {BLOCK * BLOCKS} iterations: "
            f"its own work takes {slowdown:.2f}x as long"
        )
        return Culprit(slot, OWN_TIMES[index], slowdown, reason)

    def _noise(self, slot: int, index: int) -> float:
        """Return the standard error of the slot's difference from the others, from single iterations."""
        count = sum(block.iterations for block in self._past)
        ranks = len(self._past[-1].seconds)
        mean = sum(block.apart[slot][index] for block in self._past) / count
        variance = sum(block.squared[slot][index] for block in self._past) / count - mean * mean
        return math.sqrt(max(0.0, variance) / count) * ranks / max(1, ranks - 1)


def _peers(slots: Iterable[int], slot: int, groups: Mapping[int, Hashable]) -> list[int]:
    return [other for other in slots if other != slot and groups.get(other) == groups.get(slot)]


def _excess(means: Mapping[int, list[float]], slot: int, peers: list[int], index: int) -> float:
    return means[slot][index] - median(means[other][index] for other in peers)
