"""Finds ranks that are slower than their peers, within a few iterations and without a history of the job. Pure.

`IterationMonitor` sees a job that becomes slow, but a straggler that was slow from the start is part of its baseline.
Here each rank's own work is compared with that of its peers, as the logarithm of the ratio. A rank is named if nearly
all of its last iterations were slower by more than THRESHOLD, and by more than this job's healthy ranks have ever been
for as long: the test learns the highest level that each length of run has reached (docs/design/slow-ranks.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unicron_detector.iterations.culprit import OWN_PHASES, Culprit

OWN_TIMES = (*OWN_PHASES, "outside")  # in these a rank works by itself
THRESHOLD = 0.1  # of the iteration's own work
LEAST = math.log(1.0 + THRESHOLD)
QUICK = ((4, 0), (5, 0), (6, 0), (8, 1))
"""Runs that are tested at each iteration: iterations, and how many of them may have been quick."""
LONG = ((12, 2), (16, 4), (24, 8), (32, 12), (48, 18), (64, 24), (128, 48))
RUNS = (*QUICK, *LONG)
LONG_EVERY = 4  # iterations between two tests of the long ones
WARM_UP = 8  # iterations after a start, in which newcomers compile and fill their caches
SETTLING = 32  # iterations after them, in which only runs of FIRST and more count
SURVIVORS_SKIP = 1  # iterations after a start that are passed over for ranks that had trained before it
FIRST = 16
DELAY = 64  # iterations until a run is learned from: a fault must not raise its own limit
BATCH = 16  # iterations that are learned from at once
MEMORY = 512  # iterations in memory
ERRORS = 5.0  # standard errors of a run's mean
UNSURE = 8.0
"""Independent iterations of one rank or another for which twice the standard error counts."""
MARGIN = 3.0  # of them beyond the threshold
BEYOND = 1.25  # times the highest run of a healthy rank so far
NEARLY = 0.8  # of a run's height, which is compared with single iterations of healthy ranks
CHANCE = 1e-10  # that a healthy rank has such a run, if its iterations do not depend on each other
DECAY = 0.5 ** (BATCH / 20_000)  # of the highest run and of the noise, per batch: a half-life of 20,000 iterations
SMALLEST, LARGEST = 1e-9, 1e9  # seconds of an iteration
OVER = 16  # iterations whose median must be below half of the threshold before a straggler is none any more
Row = Mapping[int, Mapping[str, float]]
Floats = npt.NDArray[np.float64]


class _Noise(NamedTuple):
    """The differences of healthy ranks from their own usual level."""

    around: Floats
    """[rank, iteration], the iterations that were learned from."""
    error: Floats
    """The standard deviation of each rank."""
    again: float
    """The correlation of an iteration with the one before."""

    def of(self, source: list[int]) -> _Noise:
        """Return the noise of these ranks."""
        return self._replace(around=self.around[source], error=self.error[source])

    def errors(self, run: int) -> Floats:
        """Return for each rank the standard error of the mean of a run. Noise also comes in runs."""
        longer = (1.0 + self.again) / (1.0 - self.again)
        unsure = 1.0 + UNSURE * longer / self.around.size  # few iterations that do not depend on each other
        return unsure * self.error * math.sqrt(min(1.0, longer / run))

    def chance(self, place: int, height: float, run: int, quick: int) -> float:
        """Return about how likely it is that all but `quick` iterations of a run exceed the height."""
        own, every = self.around[place] > height, self.around > height
        share = max(float(own.mean()), (int(every.sum()) + 1) / (every.size + 2))
        return math.comb(run, quick) * share ** (run - quick)


class _Candidate(NamedTuple):
    place: int
    run: int
    above: float


class Stragglers:
    """Feed it `observe` once for each iteration; `current` is the straggler, if there is one."""

    def __init__(self) -> None:
        self.current: Culprit | None = None
        self._named_for = 0
        self._highest = np.zeros(len(RUNS))
        """The most by which a healthy rank exceeded its usual level, for each length of run."""
        self._noisiest, self._most_again = 0.0, 0.0
        """The noise of all ranks together, at its highest."""
        self._slots: tuple[int, ...] = ()
        self._known: _Noise | None = None
        self._before: tuple[tuple[int, ...], _Noise | None] = self._slots, None
        """The slots of the last generation that was compared, and their noise."""
        self._survivors = frozenset[int]()
        self.clear()

    def clear(self, survivors: Collection[int] = ()) -> None:
        """Start again: the ranks or their work have changed. `current` stays until the next comparison, and so does
        what is known of the job's noise. survivors: slots whose processes had trained before, with no more
        micro-batches than now, and beside no newcomer: they need no time to compile, and their noise is known."""
        self._before = (self._slots, self._known) if self._slots else self._before
        self._survivors = frozenset(survivors) & self._veterans()
        self._slots = ()
        self._groups: list[list[int]] = []
        self._entered: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """The iteration in memory with which each rank's own ones begin."""
        self._settled: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """The iteration in memory from which on each rank is judged by short runs, too."""
        self._sound = 0
        """The iteration in memory from which on nobody compiles: earlier ones teach nothing."""
        self._to_skip, self._count = WARM_UP, 0
        self._apart: Floats = np.zeros((0, MEMORY))
        self._seconds: Floats = np.zeros((0, MEMORY, len(OWN_TIMES)))
        self._known = None
        self._unlearned = 0

    def _veterans(self) -> frozenset[int]:
        """Return the slots whose ranks have had their time to compile: a newcomer of the last generation may not."""
        if not self._slots or self._to_skip:
            return self._survivors
        return frozenset(slot for slot, end in zip(self._slots, self._settled, strict=True) if self._count > end)

    def observe(self, row: Row, groups: Mapping[int, Hashable] | None = None) -> Culprit | None:
        """Add one iteration, slot -> phase -> seconds for equal work, and return ``current``. groups: slot -> ranks
        with the same value are comparable. An iteration with other slots starts again, unless most of them stay:
        of many ranks only some are compared at a time."""
        slots = tuple(sorted(row))
        if slots != self._slots and (groups or not self._go_on_with(slots)):
            if self._slots:
                self.clear()
            self._begin_with(slots, groups or {})
        if self._to_skip:
            self._to_skip -= 1
            return self.current
        table = np.array([[row[slot].get(name, 0.0) for name in OWN_TIMES] for slot in slots])
        self._add(table)
        if self.current is not None:
            self._check_over()
        elif (found := self._find()) is not None:
            self.current, self._named_for = self._culprit(found), 0
        if self.current is None:
            self._learn()
        return self.current

    def _go_on_with(self, slots: tuple[int, ...]) -> bool:
        """Compare other ranks of the same job from now on. A newcomer borrows the noise of another rank, not its level,
        and is judged by its own iterations only. Returns whether enough ranks stay for that."""
        places = {slot: place for place, slot in enumerate(self._slots)}
        new = [number for number, slot in enumerate(slots) if slot not in places]
        if 2 * len(new) > len(slots) or len(slots) < 2:
            return False
        source = _sources(self._slots, slots)
        self._apart, self._seconds, self._entered = self._apart[source], self._seconds[source], self._entered[source]
        if new and self._count:
            self._apart[new] -= np.median(self._apart[new, : self._count], axis=1, keepdims=True)
        self._entered[new] = np.maximum(self._count, self._sound)
        self._settled = np.where(np.isin(np.arange(len(slots)), new), self._settled.max(), self._settled[source])
        if self._known is not None:
            self._known = self._known.of(source)
        self._slots, self._groups = slots, [[*range(len(slots))]]
        return True

    def _begin_with(self, slots: tuple[int, ...], groups: Mapping[int, Hashable]) -> None:
        self._slots = slots
        by_group = sorted(range(len(slots)), key=lambda place: str(groups.get(slots[place])))
        alike = groupby(by_group, key=lambda place: groups.get(slots[place]))
        self._groups = [places for _, each in alike if len(places := list(each)) > 1]
        self._apart = np.zeros((len(slots), MEMORY))
        self._seconds = np.zeros((len(slots), MEMORY, len(OWN_TIMES)))
        self._entered = np.zeros(len(slots), dtype=np.int64)
        self._settled = np.full(len(slots), SETTLING)
        before, known = self._before
        if self._survivors and known is not None:
            self._known = known.of(_sources(before, slots))
            self._to_skip, self._sound = SURVIVORS_SKIP, WARM_UP - SURVIVORS_SKIP
            survived = np.isin(slots, [*self._survivors])
            self._entered = np.where(survived, 0, self._sound)
            self._settled = np.where(survived, 0, self._sound + SETTLING)

    def _add(self, table: Floats) -> None:
        if self._count == MEMORY:  # forget the older half
            kept = MEMORY // 2
            self._apart[:, :kept] = self._apart[:, kept:]
            self._seconds[:, :kept] = self._seconds[:, kept:]
            self._count = kept
            self._entered = np.maximum(0, self._entered - kept)
            self._settled = np.maximum(0, self._settled - kept)
            self._sound = max(0, self._sound - kept)
        work = np.log(np.clip(table.sum(axis=1), SMALLEST, LARGEST))
        for places in self._groups:
            self._apart[places, self._count] = work[places] - _median_of_others(work[places])
        self._seconds[:, self._count] = table
        self._count += 1

    # ------------------------------------------------------------ the test
    def _find(self) -> _Candidate | None:
        """Return the rank with the run that exceeds its limit most."""
        now = self._count
        runs = [number for number, (run, _) in enumerate(RUNS) if run <= now and self._is_due(run)]
        if not runs or not self._groups:
            return None
        noise, best = self._noise(), None
        for number in runs:
            run, quick = RUNS[number]
            heights = _heights(self._apart[:, now - run : now], quick)
            heights[self._entered > now - run] = -np.inf
            if run < FIRST:
                heights[now <= self._settled] = -np.inf
            if heights.max() <= LEAST:
                continue
            errors = noise.errors(run)
            limits = np.maximum(np.maximum(LEAST + MARGIN * errors, ERRORS * errors), BEYOND * self._highest[number])
            place = int((heights - limits).argmax())
            above = float(heights[place] - limits[place])
            if above <= 0.0 or (best is not None and above <= best.above):
                continue
            if noise.chance(place, NEARLY * float(heights[place]), run, quick) < CHANCE:
                best = _Candidate(place, run, above)
        return best

    def _is_due(self, run: int) -> bool:
        if run < FIRST and self._count <= self._settled.min():
            return False
        return run <= QUICK[-1][0] or self._count % LONG_EVERY == 0

    def _noise(self) -> _Noise:
        """Return the noise of iterations that ended a while ago; of all so far, while the job is young."""
        return self._known or self._measure(self._count)

    def _measure(self, upto: int) -> _Noise:
        """Measure the noise around each rank's own level: one that is slow from the start differs by the same in each
        iteration."""
        apart = self._apart[:, self._sound : upto]
        around = apart - np.median(apart, axis=1, keepdims=True)
        power = (around**2).sum(axis=1) + 1e-18
        again = float(np.clip(((around[:, 1:] * around[:, :-1]).sum(axis=1) / power).mean(), 0.0, 0.98))
        error = np.sqrt(power / apart.shape[1])
        least = max(math.sqrt(float((error**2).mean())), self._noisiest)
        return _Noise(around, np.maximum(error, least), max(again, self._most_again))

    def _check_over(self) -> None:
        assert self.current is not None
        self._named_for += 1
        if self.current.slot not in self._slots:
            self.current = None
        elif self._count >= OVER <= self._named_for:
            place = self._slots.index(self.current.slot)
            if np.median(self._apart[place, self._count - OVER : self._count]) < LEAST / 2.0:
                self.current = None
                self.clear()  # what it took to name it is no evidence any more, and nothing to learn from

    # ------------------------------------------------------------ what is learned
    def _learn(self) -> None:
        """Learn from iterations that ended a while ago, a batch at once."""
        self._unlearned += 1
        last = self._count - DELAY
        known = last - self._sound
        if self._unlearned < BATCH or known < DELAY + BATCH or not self._groups:
            return
        self._unlearned = 0
        self._known = self._measure(last)
        self._noisiest = max(self._noisiest * DECAY, float(self._known.error.min()))
        self._most_again = max(self._most_again * DECAY, self._known.again)
        self._highest *= DECAY
        for number, (run, quick) in enumerate(RUNS):
            if known < run + BATCH:
                continue
            ended = self._known.around[:, -BATCH - run + 1 :]
            windows = np.lib.stride_tricks.sliding_window_view(ended, run, axis=1)
            self._highest[number] = max(self._highest[number], float(_heights(windows, quick).max()))

    # ------------------------------------------------------------ in words
    def _culprit(self, found: _Candidate) -> Culprit:
        slot, peers = self._slots[found.place], self._peers(found.place)
        means = self._seconds[:, self._count - found.run : self._count].mean(axis=1)
        middle = np.median(means[peers], axis=0)
        excess = means[found.place] - middle
        index = int(excess.argmax())
        slowdown = math.exp(float(np.median(self._apart[found.place, self._count - found.run : self._count])))
        reason = (
            f"slot {slot} takes {means[found.place][index]:.3f} s in {OWN_TIMES[index]}, its {len(peers)} "
            f"peer{'s' * (len(peers) > 1)} {middle[index]:.3f} s, in the last {found.run} iterations: "
            f"its own work takes {slowdown:.2f}x as long"
        )
        return Culprit(slot, OWN_TIMES[index], slowdown, reason)

    def _peers(self, place: int) -> list[int]:
        group = next(places for places in self._groups if place in places)
        return [other for other in group if other != place]


def _sources(before: tuple[int, ...], slots: tuple[int, ...]) -> list[int]:
    """Return for each slot its place before, or the place of a rank whose noise it borrows."""
    places = {slot: place for place, slot in enumerate(before)}
    return [places.get(slot, number % len(places)) for number, slot in enumerate(slots)]


def _heights(runs: Floats, quick: int) -> Floats:
    """Return the level that all iterations of each run exceeded, but for its `quick` lowest ones."""
    heights: Floats = np.partition(runs, quick, axis=-1)[..., quick]
    return heights


def _median_of_others(values: Floats) -> Floats:
    """Return for each value the median of all others."""
    order = np.argsort(values, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(values))
    ascending, left = values[order], len(values) - 1
    low, high = (left - 1) // 2, left // 2  # the middle ones once a value is taken out
    middle: Floats = 0.5 * (ascending[low + (low >= ranks)] + ascending[high + (high >= ranks)])
    return middle
