"""The lease of a plain world: how long its processes may live on a node that is cut off, and how long the controller
waits before it forms a world without them (docs/design/consensus.md, *A lease for plain programs*). Pure.

Each side uses a clock of its own that does not jump. The agent counts from the last moment at which it reached the
controller or enough of its world; the controller counts from the agent's last message. MARGIN_SECONDS lies between the
two, because a broken connection is noticed late.
"""

from __future__ import annotations

from unicron_ctl.shared.protocol.ranges import MOST_DOORS

MINORITY_SECONDS = 20.0  # without the controller and without more than half of the world's agents
PART_SECONDS = 120.0  # without the controller, and not all of the world's agents answer
# A missing heartbeat shows a dead connection within 7 s; one that loses half its packets takes longer.
MARGIN_SECONDS = 20.0


class Lease:
    """One agent's lease for the world that its processes are in.

    A world in which most others were never reached has no lease: where something on the way rejects connections to
    agents, the controller's absence alone would end the job.
    """

    def __init__(self) -> None:
        self._others = 0
        self._majority_at = self._all_at = 0.0  # when more than half, and all, of the world answered last
        self.armed = False

    def start_world(self, others: int, now: float) -> None:
        """A new world starts; `others` is the number of its other agents."""
        self._others, self.armed = others, False
        self._majority_at = self._all_at = now

    def on_controller(self, now: float) -> None:
        """The connection to the controller is alive."""
        self._majority_at = self._all_at = max(self._majority_at, now)

    def on_answers(self, count: int, asked_at: float) -> None:
        """`count` of the other agents answered; the first was asked at `asked_at`."""
        if 2 * (count + 1) > self._others + 1:
            self._majority_at = max(self._majority_at, asked_at)
            self.armed = bool(self._others)
        if count >= self._others:
            self._all_at = max(self._all_at, asked_at)

    @property
    def expires_at(self) -> float:
        """When the processes have to be gone; infinity without a lease."""
        if not self.armed:
            return float("inf")
        return min(self._majority_at + MINORITY_SECONDS, self._all_at + PART_SECONDS)


def seconds_to_expiry(silent: int, others: int) -> float:
    """Seconds after their last message for which the processes of `silent` agents may live, in a world with `others`
    more agents."""
    minority = silent <= others and silent + others <= MOST_DOORS
    return (MINORITY_SECONDS if minority else PART_SECONDS) + MARGIN_SECONDS
