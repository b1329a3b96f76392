"""The last plans of an agent's ranks, and what follows from them for this node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_detector.words import plural
from unicron_transition.snapshot.image_format import SHARD, Key

PLANS_HELD = 4  # the ranks are in one of the last
AT_WORK = frozenset({"entering", "running"})  # states of ranks
RESTING = frozenset({"starting", "waiting"})  # states of ranks that begin anew
LONG_WAIT_SECONDS = 60.0  # without a world, before the job's log says where to ask why


def wait_long(statuses: Sequence[structs.RankStatus], now: float) -> bool:
    """Say whether all ranks have long been ready for a world, and there is none. now: seconds since the epoch."""
    latest = max((status.changed for status in statuses), default=now)
    return all(status.state == "waiting" for status in statuses) and now - latest >= LONG_WAIT_SECONDS


class Saving(NamedTuple):
    """A way in which a node saves its part of a job."""

    before: Callable[[Key], tuple[int, ...] | None]
    """Returns the nodes that write an image before this one; None: it is not this node's."""
    rests: bool
    """Nobody trains, as far as this node knows."""
    prunes: bool
    """Older checkpoints are removed."""


class Plans:
    """The last plans of this node's ranks."""

    def __init__(self, slots: Collection[int]) -> None:
        self._slots, self._here = slots, min(slots) // len(slots)  # each node has as many slots
        self._held: dict[int, wire.PlanShare] = {}  # by generation
        self._broken_by = ""  # why the last generation broke, until the next one
        self._entered, self._world = 0, ""  # the last generation that was entered here, and its size

    def add_plan(self, share: wire.PlanShare, generation: int) -> None:
        """Keep a plan that the ranks got, or have agreed on."""
        self._held[generation] = share
        while len(self._held) > PLANS_HELD:
            del self._held[min(self._held)]

    def share(self, generation: int) -> wire.PlanShare | None:
        """Return that plan, for a controller that has lost its log."""
        return self._held.get(generation)

    def on_break(self, reason: str) -> None:
        """Note why the generation is over."""
        self._broken_by = reason

    def on_entered(self, generation: int) -> str:
        """Note that this node's ranks are in a generation. Return the job's log line about it: one line, from the
        node of its first member, and none for the first world."""
        if generation <= self._entered:
            return ""
        why, before, self._entered = self._broken_by, self._world, generation
        self._broken_by = self._world = ""
        if generation not in self._held:
            return ""  # the agents agreed on it, and have logged it
        plan = shared_plans.whole(self._held[generation])
        nodes = len({slot // len(self._slots) for slot in plan.members})
        self._world = f"{plural(len(plan.members), 'rank')} on {plural(nodes, 'node')}"
        if generation == 1 or plan.members[0] not in self._slots:
            return ""
        if plan.source is not None and not plan.boundary:
            why = ""  # this plan knows more than the first Break
        changed = f" (before: {before})" if before not in ("", self._world) else ""
        return f"generation {generation}: {self._world}{changed}: {'; '.join(filter(None, (why, plan.reason)))}"

    @property
    def _members(self) -> Sequence[int]:
        return shared_plans.whole(self._held[max(self._held)]).members if self._held else ()

    def saving(self, states: Collection[str], ended: bool) -> Saving | None:
        """Return how this node saves its part of a job that ends during its training; None if it saves nothing. states:
        of its ranks. ended: the whole job, by an error, so the training state itself may be the cause.

        Ranks that begin anew may belong to a job that waits. Or the others train without them and this node does not
        know: then it comes after them, and writes only what they have not written as late.
        """
        member = any(slot in self._slots for slot in self._members)
        if not AT_WORK.isdisjoint(states):
            return Saving(self.writers_before_at_work, False, not ended)
        if "stopped" in states or (ended and member):
            return Saving(self.writers_before_at_rest, True, not ended)
        return Saving(self.all_other_writers, True, False) if member and RESTING.issuperset(states) else None

    def writers_before(self, key: Key, members: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """Return the nodes that train a place of the layout and come before this node; None if this node does not
        train it. A shard belongs to its rank. members: by default those of the newest plan."""
        nodes = self._nodes(key, members)
        if not nodes:
            return None if key.kind == SHARD else ()
        return tuple(nodes[: nodes.index(self._here)]) if self._here in nodes else None

    def writers_before_at_work(self, key: Key) -> tuple[int, ...] | None:
        """Return the nodes that write before this one while its ranks train.

        All nodes train in the same plan until the boundary at which they take an offer. When Slurm ends all of them, a
        first notice can bring an offer without that node. If the nodes that go on went by it, and the one that leaves
        by the old plan, two of them would both be first and write the same files.
        """
        held = {generation: shared_plans.whole(share) for generation, share in self._held.items()}
        mine = [
            (generation <= self._entered or not plan.boundary, generation)
            for generation, plan in held.items()
            if generation >= self._entered and any(slot in self._slots for slot in plan.members)
        ]
        return self.writers_before(key, held[max(mine)[1]].members if mine else None)

    def writers_before_at_rest(self, key: Key) -> tuple[int, ...] | None:
        """Return the nodes that write before this one while nobody trains. A node with a copy of what others train
        comes after all of them."""
        nodes, mine = self._nodes(key), self.writers_before(key)
        return tuple(nodes) if mine is None and nodes else mine

    def all_other_writers(self, key: Key) -> tuple[int, ...] | None:
        """Return all nodes but this one, which comes last in everything; None if it writes nothing."""
        if self.writers_before_at_rest(key) is None:
            return None
        return tuple(node for node in self._nodes(key) if node != self._here)

    def _nodes(self, key: Key, members: Sequence[int] | None = None) -> list[int]:
        members = self._members if members is None else members
        if key.kind == SHARD:
            slots = [key.slot] if not members or key.slot in members else []
        else:
            slots = [slot for slot in members if slot % key.size == key.place]
        return sorted({slot // len(self._slots) for slot in slots})
