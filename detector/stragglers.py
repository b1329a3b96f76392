"""Ranks that are slower than their peers all the time, from the very start even: no history of the job is needed.

Pure, standard library only. `IterationMonitor` sees a job that becomes slow; a straggler that was slow when the
baseline was learned is part of it. Here each rank's own phases are compared with its peers' over the last `blocks`
blocks of iterations, and a rank is named when the difference matters (threshold), stands out from the peers' own
differences, is beyond the noise of the measurement, and was there in every block.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from statistics import fmean, median, pstdev

from detector.culprit import OWN_PHASES, Culprit

PEER_SPREADS = 4.0  # robust standard deviations of the peers among themselves
ERRORS = 6.0  # standard errors of the rank's own difference
Row = Mapping[int, Mapping[str, float]]


class Stragglers:
    """Feed it `observe` once per iteration; `current` is the straggler, if there is one.

    block: iterations; blocks: so many in a row. threshold: share of the iteration's own work that counts. phases: those
    in which a rank works by itself.
    """

    def __init__(
        self,
        block: int = 8,
        blocks: int = 6,
        threshold: float = 0.1,
        phases: tuple[str, ...] = (*OWN_PHASES, "outside"),
    ) -> None:
        self.block, self.blocks, self.threshold, self.phases = block, blocks, threshold, phases
        self.current: Culprit | None = None
        self.clear()

    def clear(self) -> None:
        """The ranks or their work changed: begin anew. `current` stays until the next comparison."""
        self._rows: deque[Row] = deque(maxlen=self.block * self.blocks)
        self._seen = 0

    def observe(self, row: Row, groups: Mapping[int, Hashable] | None = None) -> Culprit | None:
        """One iteration: slot -> phase -> seconds, for equal work. ``groups``: slot -> what makes ranks comparable.

        Returns ``current``. Compares once per block; an iteration with other slots than before begins anew.
        """
        if self._rows and set(row) != set(self._rows[-1]):
            self.clear()
        self._rows.append(row)
        self._seen += 1
        if self._seen % self.block:
            return self.current
        if self.current is not None and not self._still(self.current, groups or {}):
            self.current = None
        if self.current is None and len(self._rows) == self._rows.maxlen:
            self.current = self._find(groups or {})
        return self.current

    def _still(self, culprit: Culprit, groups: Mapping[int, Hashable]) -> bool:
        """Whether the last two blocks still show half of what counts; one lucky block is no cure."""
        rows = list(self._rows)[-2 * self.block :]
        peers = _peers(rows[0], culprit.slot, groups)
        if culprit.slot not in rows[0] or not peers:
            return False
        excess = _excess(rows, culprit.slot, peers, culprit.phase)
        return excess > 0.5 * self.threshold * (self._work(rows, culprit.slot) - excess)

    def _find(self, groups: Mapping[int, Hashable]) -> Culprit | None:
        rows = list(self._rows)
        means = {
            slot: {name: fmean(row[slot].get(name, 0.0) for row in rows) for name in self.phases} for slot in rows[0]
        }
        candidates = []
        for group in {groups.get(slot) for slot in means}:
            slots = [slot for slot in means if groups.get(slot) == group]
            for name in self.phases if len(slots) > 1 else ():
                middle = median(means[slot][name] for slot in slots)
                candidates.append(max((means[slot][name] - middle, -slot, name) for slot in slots))
        for _, negative, name in sorted(candidates, reverse=True)[:3]:
            found = self._examine(rows, means, -negative, name, groups)
            if found is not None:
                return found
        return None

    def _examine(
        self,
        rows: list[Row],
        means: Mapping[int, Mapping[str, float]],
        slot: int,
        name: str,
        groups: Mapping[int, Hashable],
    ) -> Culprit | None:
        peers = _peers(means, slot, groups)
        middle = median(means[other][name] for other in peers)
        excess = means[slot][name] - middle
        work = self._work(rows, slot) - excess
        least = self.threshold * work
        if excess <= least or work <= 0.0:
            return None
        parts = [
            _excess(rows[first : first + self.block], slot, peers, name) for first in range(0, len(rows), self.block)
        ]
        noise = pstdev(_against_mean(rows, slot, peers, name))  # what all ranks have in common is none
        # Noise that comes in runs shows between blocks, other noise within them.
        error = max(noise / math.sqrt(len(rows)), pstdev(parts) / math.sqrt(len(parts)))
        spread = 1.4826 * median(abs(means[other][name] - middle) for other in peers)
        if min(parts) <= 0.5 * least or excess <= ERRORS * error or excess <= PEER_SPREADS * spread:
            return None
        slowdown = (work + excess) / work
        reason = (
            f"slot {slot} takes {middle + excess:.3f} s in {name}, its {len(peers)} peer{'s' * (len(peers) > 1)} "
            f"{middle:.3f} s, in all of the last {len(rows)} iterations: its own work takes {slowdown:.2f}x as long"
        )
        return Culprit(slot, name, slowdown, reason)

    def _work(self, rows: list[Row], slot: int) -> float:
        """The rank's own work per iteration."""
        return fmean(sum(row[slot].get(name, 0.0) for name in self.phases) for row in rows)


def _peers(slots: Iterable[int], slot: int, groups: Mapping[int, Hashable]) -> list[int]:
    return [other for other in slots if other != slot and groups.get(other) == groups.get(slot)]


def _excess(rows: list[Row], slot: int, peers: list[int], name: str) -> float:
    """How much longer the slot takes than its peers, in the mean of these iterations. Means are compared, not single
    iterations: where these have two speeds, the mean is above the median for everybody."""
    means = [fmean(row[other].get(name, 0.0) for row in rows) for other in peers]
    return fmean(row[slot].get(name, 0.0) for row in rows) - median(means)


def _against_mean(rows: list[Row], slot: int, peers: list[int], name: str) -> list[float]:
    return [row[slot].get(name, 0.0) - fmean(row[other].get(name, 0.0) for other in peers) for row in rows]
