"""The plans that an agent's ranks were given last, and what follows from them for this node."""

from __future__ import annotations

from collections.abc import Collection

from transition.memory.images import SHARD, Key
from unicron_ctl.protocol import sharing, wire

PLANS_HELD = 4  # the ranks are in one of the last


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

    def turn(self, key: Key) -> tuple[int, ...] | None:
        """Those of the nodes that train a place of the layout that come before this one; None where it does not train
        it. A shard is its rank's."""
        members = sharing.whole(self._held[max(self._held)]).members if self._held else []
        if key.kind == SHARD:
            return () if key.slot in self._slots and (not members or key.slot in members) else None
        nodes = sorted({slot // len(self._slots) for slot in members if slot % key.size == key.place})
        here = min(self._slots) // len(self._slots)
        if not nodes:
            return ()
        return tuple(nodes[: nodes.index(here)]) if here in nodes else None
