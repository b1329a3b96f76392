"""Replication of a distributed optimizer's shards (docs/design/sharded-optimizer.md). Pure.

Ranks copy their shards to partners in other nodes of their place. With one replica, or with all replicas of a place in
one node, there are none. A job goes on from one state of all its shards, so if one shard lacks a copy, every node gives
its part of a cut to the next ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View
from unicron_ctl.controller.replication import nearest
from unicron_ctl.controller.replication.receivers import Away, targets_by_element
from unicron_ctl.controller.replication.strategy import (
    State,
    StoredState,
    domains_of,
    images_of,
    kinds_of,
    with_memory,
)
from unicron_ctl.controller.replication.whole_states import SessionStates
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_transition.generations import layout
from unicron_transition.generations.sharding import MARK_BITS, partner_shifts, state_base
from unicron_transition.snapshot.image_format import SHARD, UNTRAINED_KIND

Part = tuple[int, int]  # (place, shard)
Where = dict[str, tuple[AgentView, structs.Image]]  # node -> its agent and image


class ShardedState(NamedTuple):
    """A state of all shards."""

    version: int  # steps
    base: int  # names the generation from which they count
    ways: int  # shards a place


class Shards(SessionStates):
    """The strategy for optimizer states in shards."""

    def targets(
        self, view: View, job: JobView, waiting: Collection[int], away: Away
    ) -> dict[int, list[structs.Holder]]:
        if not missing_copies(job):
            return {}
        state = job.state
        domains = domains_of(view, state)
        return targets_by_element(with_memory(job), state.inside, state.settings.copies, domains, away=away)

    def without_memory(self, job: JobView) -> dict[int, list[str]]:
        """Return place -> nodes without a memory: each rank alone keeps its shard of a cut."""
        if not missing_copies(job):
            return {}
        able = {agent.element for agent in with_memory(job)}
        bare: dict[int, set[str]] = defaultdict(set)
        for slot in job.state.members:
            agent = job.agent(slot)
            if agent is not None and agent.element not in able:
                bare[slot % job.replica].add(agent.node)
        return {place: sorted(nodes) for place, nodes in sorted(bare.items())}

    def stored_states(self, job: JobView) -> list[StoredState]:
        whole = []
        for state, parts in images(job).items():
            if len(parts) != job.replica * state.ways:
                continue
            tensors, without = untrained_tensors(job, state.version)
            if not without:
                whole.append(StoredState(state.version, min(map(len, (*parts.values(), *tensors.values())))))
        return whole

    def parts(self, job: JobView, agent: AgentView) -> int:
        return len([slot for slot in agent.slots if slot in job.state.members])

    def sources(
        self, view: View, job: JobView, reports: Mapping[int, RankStatus]
    ) -> Iterator[tuple[State, Sequence[nearest.Way] | None]]:
        there = images(job)
        for state in sorted(there, reverse=True):
            yield (state.version, f"{state.base:x}"), _ways(view, job, reports, state, there[state])


# ---------------------------------------------------------------- where shards are
def missing_copies(job: JobView) -> list[Part]:
    """Return (place, shard) of those that fewer nodes, or blocks, hold than should and could, as this generation's
    ranks keep them."""
    plan, copies = job.state.plan, job.state.settings.copies
    if plan is None:
        return []
    kinds = [(kind, {kind(agent) for agent in with_memory(job)}) for kind in kinds_of(job.state)]
    missing = []
    for place, slots in enumerate(zip(*layout.replicas(plan.members, job.replica), strict=True)):
        elements = [job.state.element(slot) for slot in slots]  # as the ranks choose their partners
        agents = [job.agents.get(element) for element in elements]
        blocks = [str(job.state.block_of(element)) for element in elements]
        shifts = partner_shifts([str(element) for element in elements], copies, blocks)
        for shard in range(len(slots)):
            mine = [agents[(shard + shift) % len(slots)] for shift in (0, *shifts)]
            for kind, able in kinds:
                holding = {kind(agent) if agent is not None else "" for agent in mine}
                if len(holding) <= copies and able - holding:
                    missing.append((place, shard))
                    break
    return missing


def images(job: JobView) -> dict[ShardedState, dict[Part, Where]]:
    """Return state -> shard -> where it is."""
    states: dict[ShardedState, dict[Part, Where]] = defaultdict(lambda: defaultdict(dict))
    for agent, image in images_of(job, SHARD):
        if (mark := _number(image.mark)) is not None:
            state = ShardedState(image.iteration, state_base(image.base, mark), image.count)
            states[state][image.place, image.shard][agent.node] = agent, image
    return states


def untrained_tensors(job: JobView, version: int) -> tuple[dict[int, Where], set[int]]:
    """Return place -> where the untrained tensors are that belong to the shards of this version, and the places that
    have untrained tensors, but none of this version."""
    tensors: dict[int, Where] = defaultdict(dict)
    places = set()
    for agent, image in images_of(job, UNTRAINED_KIND):
        places.add(image.place)
        if image.iteration == version:
            tensors[image.place][agent.node] = agent, image
    return tensors, places - tensors.keys()


def _number(mark: str) -> int | None:
    try:
        return int(mark, 16) if len(mark) == MARK_BITS // 4 else None
    except ValueError:
        return None


def _ways(
    view: View, job: JobView, reports: Mapping[int, RankStatus], state: ShardedState, there: Mapping[Part, Where]
) -> list[nearest.Way] | None:
    """Return the ways of all shards of this state that ranks lack; None if one has no way.

    Untrained tensors come before the shards: a rank that has its shards begins.
    """
    besides, without = untrained_tensors(job, state.version)
    load, ways, domains = nearest.Load(), [], domains_of(view, job.state)
    for place in range(job.replica):
        able = [slot for slot in sorted(reports) if slot % job.replica == place]
        have = {shard for slot in able for shard in _held_shards(reports[slot], state)}
        agents = [agent for slot in able if (agent := job.agent(slot)) is not None and agent.images_at]
        for shard in (shard for shard in range(state.ways) if shard not in have):
            where = there.get((place, shard), {})
            if not where or not agents or place in without:
                return None
            receiver = next((agent for agent in agents if agent.node in where), agents[shard % len(agents)])
            first = besides.get(place, {})
            source = first if first and receiver.node not in first else where
            way = nearest.nearest([receiver], source, load, nearest.usual(job.alive()), domains)
            assert way is not None  # there is a receiver, and a source
            ways.append(way)
    return ways


def _held_shards(status: RankStatus, state: ShardedState) -> list[int]:
    return [shard for its in status.shards if (its.version, its.base, its.count) == tuple(state) for shard in its.held]
