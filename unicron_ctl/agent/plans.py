"""The plans that an agent's ranks were given last, and what follows from them for this node."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transition.memory.images import SHARD, Key
from unicron_ctl.protocol import sharing, wire

PLANS_HELD = 4  # the ranks are in one of the last
AT_WORK = ("entering", "running")  # states of ranks
TRAINING = (*AT_WORK, "stopped")  # of those whose job has a plan with them
RESTING = ("starting", "waiting")  # of those that begin anew


class Plans:
    """slots: of this node's ranks; each node has as many."""

    def __init__(self, slots: Collection[int]) -> None:
        self._slots = slots
        self._held: dict[int, wire.PlanShare] = {}  # by generation

    def hold(self, share: wire.PlanShare, generation: int) -> None:
        """The ranks are given it, or agreed on it already."""
        self._held[generation] = share
        while len(self._held) > PLANS_HELD:
            del self._held[min(self._held)]

    def share(self, generation: int) -> wire.PlanShare | None:
        """That plan, for a controller that has lost its log."""
        return self._held.get(generation)

    @property
    def _members(self) -> Sequence[int]:
        return sharing.whole(self._held[max(self._held)]).members if self._held else ()

    def concern(self, states: Collection[str], resting: Collection[str]) -> bool:
        """The job is in the middle of its training, and no plan goes on without this node. states: of its ranks; with
        `resting` ones alone they had a part in the newest plan, and wait for another one."""
        if any(state in TRAINING for state in states):
            return True
        member = any(slot in self._slots for slot in self._members)
        return member and all(state in resting for state in states)

    def turn(self, key: Key) -> tuple[int, ...] | None:
        """Those of the nodes that train a place of the layout that come before this one; None where it does not train
        it. A shard is its rank's."""
        nodes, here = self._nodes(key), min(self._slots) // len(self._slots)
        if not nodes:
            return None if key.kind == SHARD else ()
        return tuple(nodes[: nodes.index(here)]) if here in nodes else None

    def keeps(self, key: Key) -> tuple[int, ...] | None:
        """The same where nobody trains: who has a copy of what others train comes after all of these."""
        nodes, mine = self._nodes(key), self.turn(key)
        return tuple(nodes) if mine is None and nodes else mine

    def _nodes(self, key: Key) -> list[int]:
        members = self._members
        if key.kind == SHARD:
            slots = [key.slot] if not members or key.slot in members else []
        else:
            slots = [slot for slot in members if slot % key.size == key.place]
        return sorted({slot // len(self._slots) for slot in slots})
