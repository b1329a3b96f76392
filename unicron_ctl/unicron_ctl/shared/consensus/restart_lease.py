"""Limits how long the processes of a plain world live on a node that is cut off, and how long the controller waits
before it forms a world without them (docs/design/consensus.md, *A lease for plain programs*). Pure.

Each side uses a clock that does not jump. The agent counts from the last time that it reached the controller or enough
of its world; the controller counts from the agent's last message, and waits MARGIN_SECONDS longer, because a broken
connection is noticed late.
"""

from __future__ import annotations

from unicron_ctl.shared.protocol.ranges import MOST_DOORS

MINORITY_SECONDS = 20.0  # without the controller, while at most half of the world's agents answer
PART_SECONDS = 120.0  # without the controller, while not all of the world's agents answer
# A missing heartbeat shows a dead connection within 7 s; a loss of half the packets takes longer.
MARGIN_SECONDS = 20.0


class Lease:
    """One agent's lease for the world of its processes.

    There is no lease before most other agents were reached once: if a firewall rejects connections to agents, the
    controller's absence alone would end the job.
    """

    def __init__(self) -> None:
        self._others = 0
        self._majority_at = self._all_at = 0.0  # when more than half, and all, of the world answered last
        self.armed = False

    def start_world(self, others: int, now: float) -> None:
        """Begin a new world with so many other agents."""
        self._others, self.armed = others, False
        self._majority_at = self._all_at = now

    def on_controller(self, now: float) -> None:
        """Note that the connection to the controller is alive."""
        self._majority_at = self._all_at = max(self._majority_at, now)

    def on_answers(self, count: int, asked_at: float) -> None:
        """Note that `count` of the other agents answered; the first was asked at `asked_at`."""
        if 2 * (count + 1) > self._others + 1:
            self._majority_at = max(self._majority_at, asked_at)
            self.armed = bool(self._others)
        if count >= self._others:
            self._all_at = max(self._all_at, asked_at)

    @property
    def expires_at(self) -> float:
        """The time by which the processes have to be gone; infinity without a lease."""
        if not self.armed:
            return float("inf")
        return min(self._majority_at + MINORITY_SECONDS, self._all_at + PART_SECONDS)


def seconds_to_expiry(silent: int, others: int) -> float:
    """Return for how long after their last message the processes of `silent` agents may live, in a world with `others`
    more agents."""
    minority = silent <= others and silent + others <= MOST_DOORS
    return (MINORITY_SECONDS if minority else PART_SECONDS) + MARGIN_SECONDS
