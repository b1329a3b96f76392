"""Limits how long the processes of a plain world live on a node that is cut off, and how long the controller waits
before it forms a world without them (docs/design/consensus.md, *A lease for plain programs*). Pure.

The agent counts from its last status that the controller has answered: the controller heard it later than it was sent.
The controller counts from that agent's last message, so it needs no margin for the network, only for clocks that run
apart and for processes that are slow to end.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def tried_by(element: int, elements: Sequence[int]) -> list[int]:
    """Return the elements of a world whose doors this one tries: all others, or in a large world a part."""
    if element not in elements:
        return []
    at = elements.index(element)
    others = [*elements[at + 1 :], *elements[:at]]
    return others[:: max(1, -(-len(others) // MOST_DOORS))]


def gone_at(heard: float, lease: float, shut: Sequence[float]) -> float:
    """Return when the processes of an agent are gone at the latest; infinity while nothing limits their lease.

    heard: its last message. lease: as it named it. shut: for each door that it tries, when that was shut for good at
    the latest; infinity for one that may be open.
    """
    if not shut:
        return float("inf")
    times = sorted(shut)
    few, first = times[len(times) // 2], times[0]  # from then on not more than half is open, and not all
    renewed = max(heard + on_another_clock(lease), few + on_another_clock(lease * DOORS_SHARE))
    return min(renewed, max(heard, first) + on_another_clock(max(PART_SECONDS, lease)))


def old_gone_at(heard: float, silent: int, others: int) -> float:
    """Return the same for an agent of release 0.2, which names no lease: silent ones are the lesser part, or not."""
    return heard + (OLD_SECONDS if silent <= others and silent + others <= MOST_DOORS else OLD_PART_SECONDS)


def on_another_clock(seconds: float) -> float:
    """Return after how long on one clock processes are gone that end `seconds` later on another."""
    return seconds * (1.0 + DRIFT) + END_SECONDS
