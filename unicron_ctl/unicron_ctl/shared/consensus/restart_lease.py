"""Limits how long the processes of a plain world live on a node that is cut off, and how long the controller waits
before it forms a world without them (docs/design/consensus.md, *A lease for plain programs*). Pure.

The agent counts from its last status that the controller has answered: the controller heard it later than it was sent.
The controller counts from that agent's last message, so it needs no margin for the network, only for clocks that run
apart and for processes that are slow to end.
"""

from __future__ import annotations

from unicron_ctl.shared.protocol.ranges import MOST_DOORS
from unicron_ctl.shared.settings.limits import FENCES

FENCE_SECONDS = 5.0
"""The lease where the controller names none: `fence_seconds` by default."""
DOORS_SHARE = 0.5
"""The share of the lease for which the doors of more than half of the world renew it."""
LEAST_DOORS_SECONDS = FENCES.low * DOORS_SHARE
PART_SECONDS = 120.0
"""Without the controller, while more than half of the world's doors answer, but not all."""
DRIFT = 0.1
"""The most by which two clocks run apart: chrony may slew one by 8 %."""
END_SECONDS = 1.0
"""For processes that were killed to be gone, on a busy node."""
OLD_SECONDS, OLD_PART_SECONDS = 40.0, 140.0
"""The waits for agents of release 0.2, which name no lease: they counted from a broken connection, 20 or 120 s."""


class Lease:
    """One agent's lease for the world of its processes.

    There is no lease before most other agents were reached once: if a firewall rejects connections to agents, the
    controller's absence alone would end the job.
    """

    def __init__(self, seconds: float = FENCE_SECONDS) -> None:
        self.seconds = seconds
        """The seconds that the controller wants."""
        self._others = 0
        self._until = self._all_at = float("-inf")  # all_at: when the controller, or all doors, answered last
        self.armed = False

    def start_world(self, others: int) -> None:
        """Begin a new world with so many other agents. What the controller has answered still counts, and nothing else:
        the order to begin may have been on its way for long."""
        self._others, self.armed = others, False

    def on_controller(self, sent_at: float) -> None:
        """Note that the controller has answered a message which was sent at that time."""
        self._until = max(self._until, sent_at + self.seconds)
        self._all_at = max(self._all_at, sent_at)

    def on_doors(self, count: int, asked_at: float) -> None:
        """Note that the doors of `count` other agents were open for this world; the first was tried at `asked_at`."""
        if 2 * (count + 1) > self._others + 1:
            self._until = max(self._until, asked_at + self.seconds * DOORS_SHARE)
            self.armed = bool(self._others)
        if count >= self._others:
            self._all_at = max(self._all_at, asked_at)

    @property
    def renewed_until(self) -> float:
        """The end of what the last answer is good for, also while there is no lease: later no world may begin."""
        return self._until

    @property
    def expires_at(self) -> float:
        """The time by which the processes have to be gone; infinity without a lease."""
        if not self.armed:
            return float("inf")
        return min(self._until, self._all_at + max(PART_SECONDS, self.seconds))


def gone_at(heard: float, broken: float, lease: float, silent: int, others: int) -> float:
    """Return when the processes of `silent` agents are gone, in a world with `others` more agents.

    heard: the last message of one of them. broken: when the others had left the world, and with it closed their doors.
    lease: as these agents named it; 0.0 for those of release 0.2, which named none.
    """
    minority = silent <= others and silent + others <= MOST_DOORS
    if not lease:
        return heard + (OLD_SECONDS if minority else OLD_PART_SECONDS)
    if not minority:
        return max(heard, broken) + on_another_clock(max(PART_SECONDS, lease))
    return max(heard + on_another_clock(lease), broken + on_another_clock(lease * DOORS_SHARE))


def on_another_clock(seconds: float) -> float:
    """Return after how long on one clock processes are gone that end `seconds` later on another."""
    return seconds * (1.0 + DRIFT) + END_SECONDS
