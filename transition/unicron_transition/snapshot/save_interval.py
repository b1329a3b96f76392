"""The best time between two checkpoints, given the cost of a save and the risk of a loss.

Young's interval, with Daly's higher-order term: J. W. Young, "A first order approximation to the optimum checkpoint
interval", CACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22(3), 2006, equation 37.

A file is needed only if the copies in memory are lost too. That happens after a share of node losses: those with a
common cause (the beta-factor model: K. N. Fleming, 1975; NUREG/CR-4780), and a second loss before the copies of the
first node's state are complete again. Without copies it happens after every loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NODE_HOURS = 1000.0  # between two losses of one node, before any was seen (the default of `mtbf_node_hours`)
COMMON = 0.05  # the share of node losses that take the copies with them: the usual beta of the model above
RENEWAL = 60.0  # seconds until the copies of a lost node's state are complete again
LOAD = 0.02  # the share of writing time that counts as lost, because it loads the file system and the network
BUSY = 0.5  # the largest share of the time in which files are written
LEAST, MOST = 60.0, 4 * 3600.0  # seconds
FIRST = 300.0  # seconds before the first checkpoint, which measures the cost of a save
HOUR = 3600.0


@dataclass(frozen=True)
class Risk:
    """The risk of a job's node losses."""

    nodes: int
    copies: bool
    """Each part of its state is on several nodes."""
    seconds: float = 0.0
    """The time it has run."""
    losses: int = 0
    """The losses in that time."""

    @property
    def rate(self) -> float:
        """Node losses of the job, per second: the prior counts as one loss in NODE_HOURS (a gamma prior of shape 1)."""
        hours = NODE_HOURS + self.nodes * self.seconds / HOUR
        return self.nodes * (1 + self.losses) / hours / HOUR

    @property
    def uncovered(self) -> float:
        """Losses after which a file is needed, per second."""
        if not self.copies:
            return self.rate
        second = 1.0 - math.exp(-self.rate / max(1, self.nodes) * RENEWAL)
        return self.rate * min(1.0, COMMON + second)


def optimum(cost: float, between: float) -> float:
    """Return the interval with the least overhead, in seconds of training. cost: of a save, in seconds of training.
    between: mean seconds between two losses."""
    if cost >= 2.0 * between:
        return between
    ratio = cost / (2.0 * between)
    return math.sqrt(2.0 * cost * between) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost


def interval(blocked: float, written: float, risk: Risk) -> float:
    """Return the seconds from one checkpoint to the next. blocked: seconds for which a save stops the training.
    written: seconds until its files are on disk."""
    best = optimum(max(blocked + LOAD * written, 1e-3), 1.0 / risk.uncovered)
    return min(max(best, LEAST, written / BUSY), MOST)


class SaveClock:
    """Times the checkpoints of one rank. Ranks that write no file measure nothing, and leave the choice of time to
    those that do after the first checkpoint."""

    def __init__(self) -> None:
        self._saves = 0
        self._blocked = self._written = 0.0  # seconds of the last save that was measured

    def note_saved(self) -> None:
        """Note that a checkpoint is written, by this rank or another."""
        self._saves += 1

    def note_blocked(self, seconds: float) -> None:
        """Note how long this rank's save has stopped the training."""
        self._blocked = seconds

    def note_written(self, seconds: float) -> None:
        """Note how long it took until this rank's part was on disk."""
        self._written = max(seconds, 1e-3)

    def seconds(self, risk: Risk) -> float:
        """Return the seconds from the last checkpoint to the next one."""
        if not self._saves:
            return FIRST
        return interval(self._blocked, self._written, risk) if self._written else MOST
