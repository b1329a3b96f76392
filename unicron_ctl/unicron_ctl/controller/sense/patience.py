"""Time limits of an iteration before it counts as hanging, and of a rank outside iterations.

Once the job's iteration time is learned, :class:`iteration_monitor.IterationMonitor` sets the limit. This module covers
the first iterations, those after a recovery or at a new size, and the script's own code between two iterations.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_ctl.shared.settings.config import ControllerConfig

Limit = tuple[float, str]  # seconds that a rank may keep the others waiting, and why not longer
WARM_UP = 10.0  # times the iterations so far, while the usual time is not known
AGAIN = 3.0  # times the usual, or the longest of its kind that ended by itself
OUTSIDE_LEARNED = 16  # times that a rank was outside before its own habits count
HEARTBEATS = 3.0  # idle times are as old as the last look at the process
IDLE_SECONDS = 3.0  # a program that has been idle for less does not count as stuck
STOPPED_BY_SIGNAL = "T"


def outside(status: RankStatus) -> bool:
    """The rank is in the script's own code between two iterations."""
    return status.state == "running" and status.phase == "stepped"


@dataclass
class Patience:
    """The habits that a job has shown. Times in seconds."""

    early: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Its iterations before its monitor had learned."""
    longest_warm_up: float = 0.0
    """The longest iteration after a (re)start, no recovery, in which newcomers took part: they compile."""
    longest_regrouped: float = 0.0
    """The longest such iteration without newcomers."""
    longest_outside: float = 0.0
    """The longest time between two iterations, of any rank, since another rank may write the next checkpoint."""
    longest_idle: float = 0.0
    """The longest time that a process of a plain program was idle there."""
    outside: Counter[int] = field(default_factory=Counter)
    """slot -> how often it was seen outside."""

    def on_iteration(self, seconds: float, learned: bool, warm_up: bool, newcomers: bool = True) -> None:
        """Take in an iteration that was no recovery."""
        if not learned:
            self.early.append(seconds)
        if warm_up and newcomers:
            self.longest_warm_up = max(self.longest_warm_up, seconds)
        elif warm_up:
            self.longest_regrouped = max(self.longest_regrouped, seconds)

    def on_outside(self, slots: Iterable[int], longest: float) -> None:
        """Take in that ranks were outside before their iteration, and for how long at most."""
        if 0.0 <= longest < math.inf:
            self.outside.update(slots)
            self.longest_outside = max(self.longest_outside, longest)

    def warm_up(self, usual: float, config: ControllerConfig) -> float:
        """Return the limit of the first iterations after a (re)start or at a new size.

        usual: the job's iteration time, 0 while it is not known. Once it is, a hang is found as soon as in any other
        iteration; a rank that has just started may take longer (:meth:`newcomer`).
        """
        if usual:
            return max(AGAIN * max(usual, config.hang_floor_seconds), AGAIN * self.longest_regrouped)
        if not self.early:
            return config.first_iteration_seconds
        longest = AGAIN * max(self.early)
        generous = max(WARM_UP * max(median(self.early), config.hang_floor_seconds), longest)
        return min(generous, max(config.first_iteration_seconds, longest))

    def newcomer(self, inside: float, config: ControllerConfig) -> float:
        """Return the limit of a rank in its first iterations, in which it compiles. inside: the limit of all others."""
        if not self.longest_warm_up:  # a restarted controller has seen no such iteration
            return max(inside, config.first_iteration_seconds)
        return max(inside, AGAIN * self.longest_warm_up)

    def between(self, slot: int, status: RankStatus, waited: float, inside: float, config: ControllerConfig) -> Limit:
        """Return how long the others wait for a rank in the script's own code, and why not longer: in the next
        iteration, after a Break, or at the boundary at which newcomers join.

        inside: the limit for all others. waited: how long it has lasted. A first checkpoint has no history, so a
        process that computes, reads or writes has the script's full time.
        """
        full = max(inside, config.hang_outside_seconds)
        if status.process == STOPPED_BY_SIGNAL:
            return inside, "its process is stopped by a signal"
        moved = status.idle < waited - HEARTBEATS * config.heartbeat_period
        if moved or self.outside[slot] < OUTSIDE_LEARNED:
            return full, ""
        short = max(inside, AGAIN * self.longest_outside, config.hang_idle_seconds)
        why = f"it does nothing there, and no rank was outside for more than {self.longest_outside:.2f} s so far"
        return (short, why) if short < full else (full, "")

    def own_code(
        self, status: RankStatus, waited: float, inside: float, learned: bool, starts: bool, config: ControllerConfig
    ) -> Limit:
        """Return how long the others wait for a plain program, and why not longer.

        It does not tell whether it makes the next batch or a checkpoint, so it has the script's full time while it
        computes, reads, writes or saves. inside: the limit for an iteration, for an idle process if no rank was ever
        idle for longer. learned: the job has shown its habits. starts: it is new, and may wait for distant data.
        """
        full = max(inside, config.hang_outside_seconds)
        if status.process == STOPPED_BY_SIGNAL:
            return inside, "its process is stopped by a signal"
        idle = status.idle >= max(IDLE_SECONDS / 2, waited - HEARTBEATS * config.heartbeat_period)
        if not idle or status.phase == "stepped" or not (learned or starts):
            return full, ""
        asks = status.waits or starts  # it waits for another program, which may answer yet
        longest, least = (self.longest_outside, config.hang_idle_seconds) if asks else (self.longest_idle, IDLE_SECONDS)
        short = max(inside, AGAIN * longest, least)
        why = f"it does nothing there, and no rank did that for more than {longest:.2f} s so far"
        return (short, why) if short < full else (full, "")
