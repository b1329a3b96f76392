"""The time to wait between two checkpoints, from what a save costs and how often one would be needed.

Young's interval, with Daly's higher-order term: J. W. Young, "A first order approximation to the optimum checkpoint
interval", CACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22(3), 2006, equation 37.

A file is needed only where the copies in memory are lost, too. That follows a share of all node losses: those with a
common cause (the beta-factor model: K. N. Fleming, 1975; NUREG/CR-4780), and a second loss before the copies of the
first are complete again. Where there are no copies it is every loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NODE_HOURS = 1000.0  # between two losses of one node, before any was seen (as the controller's own prior)
COMMON = 0.05  # of node losses take the copies with them: the usual beta of the model above
RENEWAL = 60.0  # seconds until the copies of what a lost node had are complete again
LOAD = 0.02  # of the time in which a file is written counts as lost: it loads the file system and the network
BUSY = 0.5  # of the time, at most, files are written
LEAST, MOST = 60.0, 4 * 3600.0  # seconds
FIRST = 300.0  # seconds before the first one, which shows what a save costs
HOUR = 3600.0


@dataclass(frozen=True)
class Risk:
    """The losses that a job has to expect. nodes: those that it has. copies: each part of its state is on several of
    them. seconds, losses: how long it has run, and how many losses it has seen meanwhile."""

    nodes: int
    copies: bool
    seconds: float = 0.0
    losses: int = 0

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
    """The interval with the least overhead, in seconds of training. cost: seconds that one save costs the training.
    between: mean seconds between two losses."""
    if cost >= 2.0 * between:
        return between
    ratio = cost / (2.0 * between)
    return math.sqrt(2.0 * cost * between) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost


def interval(blocked: float, written: float, risk: Risk) -> float:
    """Seconds from one checkpoint to the next. blocked: seconds for which a save stops the training. written: seconds
    until its files are on disk."""
    best = optimum(max(blocked + LOAD * written, 1e-3), 1.0 / risk.uncovered)
    return min(max(best, LEAST, written / BUSY), MOST)


class SaveClock:
    """When the next checkpoint of one rank is due, by the clock. Ranks that write no file measure nothing: after the
    first one they wait for those that do."""

    def __init__(self) -> None:
        self._saves = 0
        self._blocked = self._written = 0.0  # of the last save of which it is known

    def note_saved(self) -> None:
        """A checkpoint is written, by whomever."""
        self._saves += 1

    def note_blocked(self, seconds: float) -> None:
        """So long this rank's part has stopped the training."""
        self._blocked = seconds

    def note_written(self, seconds: float) -> None:
        """So long it took until that part was on disk."""
        self._written = max(seconds, 1e-3)

    def seconds(self, risk: Risk) -> float:
        """From the last checkpoint to the next one."""
        if not self._saves:
            return FIRST
        return interval(self._blocked, self._written, risk) if self._written else MOST
