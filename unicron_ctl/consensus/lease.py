"""How long the processes of a plain world may live on a node that is cut off, and how long the controller waits before
it forms a world without them (docs/design/agreement.md, *A lease for plain programs*). Pure.

Each side measures by a clock of its own that does not jump: the agent from the last moment at which it had the
controller, or enough of its world; the controller from the agent's last word. The margins between the two are for
connections that are found broken late.
"""

from __future__ import annotations

from unicron.ctl.protocol.ranges import MOST_DOORS

MINORITY_SECONDS = 20.0  # without the controller and without more than half of the world's agents
PART_SECONDS = 120.0  # without the controller, and not all of the world's agents answer
MARGIN_SECONDS = (
    20.0  # a dead connection is found by a missing heartbeat within 7 s; one that loses half its packets later
)


class Lease:
    """One agent's, for the world that its processes are in. A world that was never seen to be reachable has none: where
    something on the way rejects what comes for the agents' doors, the controller's absence would end it."""

    def __init__(self) -> None:
        self._others = 0
        self._most = self._all = 0.0  # when more than half, and all, of the world were there
        self.armed = False

    def begin(self, others: int, now: float) -> None:
        """A new world, with so many other agents."""
        self._others, self.armed = others, False
        self._most = self._all = now

    def connected(self, now: float) -> None:
        """The controller is there."""
        self._most = self._all = max(self._most, now)

    def answered(self, count: int, began: float) -> None:
        """So many of the others answered, asked from `began` on."""
        if 2 * (count + 1) > self._others + 1:
            self._most = max(self._most, began)
            self.armed = bool(self._others)
        if count >= self._others:
            self._all = max(self._all, began)

    @property
    def until(self) -> float:
        """When the processes have to be gone; infinity while nothing limits them."""
        if not self.armed:
            return float("inf")
        return min(self._most + MINORITY_SECONDS, self._all + PART_SECONDS)


def wait_seconds(silent: int, others: int) -> float:
    """How long after their last word the processes of so many agents may still live, of a world of `others` more."""
    few = silent <= others and silent + others <= MOST_DOORS
    return (MINORITY_SECONDS if few else PART_SECONDS) + MARGIN_SECONDS
