"""Online statistics of iteration times: degraded, failed, and how long the present iteration may take. Pure, standard
library only.

An iteration over 3x the running average has failed; over 1.1x it is degraded, which is only reported
(docs/design/paper.md, section 3). A comparison with the mean alone is not enough: the first iterations are slow
(allocator, compilation, data), checkpoints and evaluations are not iterations, times drift with the sequence length,
and some jobs alternate between two speeds. So the monitor learns a centre and a spread from the job's own iterations,
and calls a job degraded only if the whole recent window has moved, beyond the job's own noise.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


class Health(enum.Enum):
    """The monitor's verdict after an iteration."""

    LEARNING = "learning"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    FAILED = "failed"


WARM_UP = "warm-up"  # the reason for iterations right after a (re)start, which are not learned
BLOCKS = 64  # blocks whose means measure how much the job's speed varies by itself
FEW_BLOCKS = 16  # with fewer, the measured noise is doubled
OWN_MARGIN = 1.25  # the longest successful iteration may come again, and take this much longer
KEPT_OF_HIGHEST = 1.0 - 3.5e-5  # per iteration, of the longest one: a half-life of about 20,000
RECOVERY_SHARE = 0.6  # of the way from the baseline to the limit; below it a degraded job is healthy again
STEADY_MOVE = 0.5  # of that way; a degraded block exceeds it even without its OUTLIERS slowest iterations
OUTLIERS = 2
FASTER, SLOWER = 0.02, 0.002  # shares of the way to the average that the baseline moves in an iteration


@dataclass(frozen=True)
class Limits:
    """When an iteration counts as slow."""

    skip: int = 3
    """Iterations after a (re)start that are never learned from."""
    learn: int = 8
    """Iterations until the first verdict."""
    window: int = 64
    """Iterations of the running average."""
    recent: int = 16
    """Iterations of a block. A whole block must be slow before a job is degraded."""
    failed: float = 3.0
    """Ratio to the running average above which an iteration has failed."""
    degraded: float = 1.1
    """Ratio to the baseline above which a block is degraded."""
    spreads: float = 6.0
    """A degraded block is also slower by this many standard deviations of the job's own blocks."""
    patience: float = 6.0
    """Maximum to which a job's own slow iterations can raise ``failed``."""
    floor: float = 0.25
    """Seconds that any iteration may take, so that a short stall of the machine is not a failure."""


@dataclass(frozen=True)
class Observation:
    """The verdict on one iteration."""

    health: Health
    ratio: float  # its time over the running average; 1.0 while learning
    average: float
    reason: str


class IterationMonitor:
    """Learns one job's iteration time, and judges finished iterations and the present one. Times in seconds."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._window: deque[float] = deque(maxlen=self.limits.window)
        self._recent: deque[float] = deque(maxlen=self.limits.recent)
        self._to_skip = self.limits.skip
        self._baseline: float | None = None
        self._block: list[float] = []
        self._block_means: deque[float] = deque(maxlen=BLOCKS)
        self._pending: float | None = None
        self._degraded = False
        self._high = 0.0

    def begin_again(self) -> None:
        """Skip the next iterations as warm-up, after a restart or a regrouping; what was learned is kept."""
        self._to_skip = self.limits.skip
        self._recent.clear()

    def learn_anew(self) -> None:
        """Forget everything: the job's size, and so its speed, has changed."""
        self._window.clear()
        self._block.clear()
        self._block_means.clear()
        self._pending = None
        self._baseline = None
        self._degraded = False
        self._high = 0.0
        self.begin_again()

    def observe(self, seconds: float, recovery: bool = False) -> Observation:
        """Judge one finished iteration, and learn from it unless it is warm-up or has failed. recovery: a failure was
        handled in it, so it says nothing about the job's speed."""
        average = self.average
        if recovery:
            return Observation(self._health(), 1.0, average, "a recovery iteration is not judged")
        if self._to_skip > 0:
            self._to_skip -= 1
            return Observation(Health.LEARNING, 1.0, average, WARM_UP)
        if not self.learned:
            self._learn(seconds)
            reason = f"learning, {len(self._window)} of {self.limits.learn} iterations"
            return Observation(Health.LEARNING, 1.0, self.average, reason)
        ratio = seconds / average if average > 0 else 1.0
        if seconds > self._failure_time():
            # The average does not follow failures, which would excuse the next one. But an iteration that ended by
            # itself (an epoch's first batch) can take as long again, and is no failure then.
            self._high = max(self._high, seconds)
            reason = f"{seconds:.3f} s is {ratio:.1f}x the running average of {average:.3f} s"
            return Observation(Health.FAILED, ratio, average, reason)
        self._learn(seconds)
        return self._judge(ratio, average)

    def limit(self) -> float | None:
        """Return the seconds after which the present iteration has failed; None while learning. In warm-up it may take
        longer, which the caller must allow for (:attr:`warming`)."""
        return self._failure_time() if self.learned else None

    @property
    def warming(self) -> bool:
        """Whether the next iteration is one of the first after a (re)start."""
        return self._to_skip > 0

    @property
    def average(self) -> float:
        """The running average, seconds per iteration; 0 while nothing is learned."""
        return sum(self._window) / len(self._window) if self._window else 0.0

    @property
    def usual(self) -> float:
        """The average from before the job became slow, if it is; seconds per iteration."""
        return self._baseline if self._baseline is not None else self.average

    @property
    def learned(self) -> bool:
        return len(self._window) >= self.limits.learn

    def _failure_time(self) -> float:
        """Return 3x the running average; more only if the job's own iterations have come close to that and ended by
        themselves: a job that alternates between 1 s and 3 s is healthy."""
        limits, average = self.limits, self.average
        return max(limits.failed * average, limits.floor, min(OWN_MARGIN * self._high, limits.patience * average))

    def _learn(self, seconds: float) -> None:
        self._window.append(seconds)
        self._recent.append(seconds)
        self._high = max(seconds, self._high * KEPT_OF_HIGHEST)  # remembers what comes once per epoch

    def _judge(self, ratio: float, average: float) -> Observation:
        """Judge the recent iterations: degraded if they took over 1.1x the baseline, and more than chance explains.

        The baseline falls quickly if the job gets faster, and rises only slowly. So a job that has become slow stays
        degraded until it is fast again or resized.
        """
        if self._baseline is None or len(self._recent) < self.limits.recent:
            if self._baseline is None and len(self._window) == self._window.maxlen:
                self._baseline = average
            return Observation(self._health(), ratio, average, "")
        recent = sum(self._recent) / len(self._recent)
        limit = max(self.limits.degraded * self._baseline, self._baseline + self.limits.spreads * self._block_error())
        recovery_limit = self._baseline + (limit - self._baseline) * RECOVERY_SHARE
        # A few slow iterations can raise the mean of a block; a slow job is slow even without them.
        most = sorted(self._recent)[:-OUTLIERS]
        moved = sum(most) / len(most) > self._baseline + (limit - self._baseline) * STEADY_MOVE
        self._degraded = (recent > limit and moved) or (self._degraded and recent > recovery_limit)
        self._follow(ratio * average)
        reason = ""
        if self._degraded:
            share = recent / self._baseline
            reason = f"the last {len(self._recent)} iterations took {share:.2f}x the usual {self._baseline:.3f} s"
        return Observation(self._health(), ratio, average, reason)

    def _block_error(self) -> float:
        """Return the standard deviation of the mean of a block. It is measured on blocks, not derived from single
        iterations, since noise comes in runs; and doubled while few blocks are known."""
        before = list(self._window)[: -self.limits.recent] or self._window  # a fault must not widen its own limit
        single = _standard_deviation(before) / math.sqrt(self.limits.recent)
        if len(self._block_means) < FEW_BLOCKS:
            return 2.0 * max(single, _standard_deviation(self._block_means) if self._block_means else 0.0)
        return max(single, _standard_deviation(self._block_means))

    def _follow(self, seconds: float) -> None:
        """Learn the noise of whole blocks and let the baseline drift, both only while the job is not degraded."""
        if self._degraded:
            self._block.clear()
            self._pending = None
            return
        self._block.append(seconds)
        if len(self._block) == self.limits.recent:
            if self._pending is not None:  # one block late, when no fault has begun in it
                self._block_means.append(self._pending)
            self._pending = sum(self._block) / len(self._block)
            self._block.clear()
        # Schedules drift over thousands of iterations; a fault does not take that long.
        assert self._baseline is not None  # learned before
        change = self.average - self._baseline
        self._baseline += (FASTER if change < 0 else SLOWER) * change

    def _health(self) -> Health:
        if not self.learned:
            return Health.LEARNING
        return Health.DEGRADED if self._degraded else Health.HEALTHY


def _standard_deviation(values: Iterable[float]) -> float:
    values = list(values)
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
