"""Copies of a distributed optimizer's shards in other nodes, where the ranks' own copies all lie in one: which are
made, and how they come to ranks that need them. Pure (docs/design/sharded-optimizer.md).

Ranks give their shards to heirs in other nodes of their place; with one replica, or with all replicas of a place in one
node, there are none. A job goes on from one state of all its shards, so where one shard lacks a copy the controller
names cuts, and every node gives what it has of them to the next ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.job_state import Phase
from unicron.ctl.controller.model.job_view import JobView
from unicron.ctl.controller.model.view import View
from unicron.ctl.controller.replication import nearest
from unicron.ctl.controller.replication.copies import (
    LOOK_SECONDS,
    Cuts,
    Wanted,
    ask,
    changed,
    end,
    note_change,
    order,
    redirect,
    with_memory,
)
from unicron.ctl.controller.replication.forming import Formed
from unicron.ctl.controller.replication.user_copies import targets
from unicron.ctl.protocol import wire
from unicron.ctl.protocol.wire import RankStatus
from unicron.transition.generations import layout
from unicron.transition.generations.sharding import MARK_BITS, heirs, named
from unicron.transition.snapshot.images import SHARD, UNTRAINED

Part = tuple[int, int]  # (place, shard)
Where = dict[str, tuple[AgentView, wire.Image]]  # node -> who has it


class State(NamedTuple):
    """Of all shards: `version` steps, made in the generation that is named by `base`, `ways` shards of each place."""

    version: int
    base: int
    ways: int


# ---------------------------------------------------------------- who has what
def lacking(job: JobView) -> list[Part]:
    """Shards that fewer nodes hold than are wanted and could, as the ranks of this generation keep them."""
    plan, able = job.state.plan, {agent.node for agent in with_memory(job)}
    if plan is None or not job.live.sharded:
        return []
    found = []
    for place, slots in enumerate(zip(*layout.replicas(plan.members, job.replica), strict=True)):
        elements = [str(job.state.element(slot)) for slot in slots]  # as the ranks choose their heirs
        nodes = [agent.node if (agent := job.agent(slot)) is not None else "" for slot in slots]
        shifts = heirs(elements, job.state.settings.copies)
        for shard, node in enumerate(nodes):
            holding = {node, *(nodes[(shard + shift) % len(nodes)] for shift in shifts)}
            if len(holding) <= job.state.settings.copies and able - holding:
                found.append((place, shard))
    return found


def unkept(job: JobView) -> dict[int, list[str]]:
    """place -> nodes without a memory that train it: each rank alone keeps its shard of a cut, so no cut is whole."""
    able = {agent.element for agent in with_memory(job)}
    found: dict[int, set[str]] = defaultdict(set)
    for slot in job.state.members:
        agent = job.agent(slot)
        if agent is not None and agent.element not in able:
            found[slot % job.replica].add(agent.node)
    return {place: sorted(nodes) for place, nodes in sorted(found.items())}


def images(agents: Iterable[AgentView]) -> dict[State, dict[Part, Where]]:
    """state -> shard -> where it lies."""
    found: dict[State, dict[Part, Where]] = defaultdict(lambda: defaultdict(dict))
    for agent in agents:
        for image in agent.images:
            if image.kind == SHARD and (mark := _number(image.mark)) is not None:
                state = State(image.iteration, named(image.base, mark), image.count)
                found[state][image.place, image.shard][agent.node] = agent, image
    return found


def untrained(agents: Iterable[AgentView], version: int) -> dict[int, Where]:
    """place -> where that lies which goes with a state's shards."""
    found: dict[int, Where] = defaultdict(dict)
    for agent in agents:
        for image in agent.images:
            if image.kind == UNTRAINED and image.iteration == version:
                found[image.place][agent.node] = agent, image
    return found


def incomplete(agents: Iterable[AgentView], version: int) -> set[int]:
    """Places of which something goes with the shards, and nobody has what goes with those of this version."""
    versions: dict[int, set[int]] = defaultdict(set)
    for agent in agents:
        for image in agent.images:
            if image.kind == UNTRAINED:
                versions[image.place].add(image.iteration)
    return {place for place, there in versions.items() if version not in there}


def _number(mark: str) -> int | None:
    try:
        return int(mark, 16) if len(mark) == MARK_BITS // 4 else None
    except ValueError:
        return None


def newest_good(job: JobView, enough: bool = True) -> int:
    """The newest version of which every shard, and what goes with it, lies in enough nodes' memory, or, if that is not
    asked, in any; -1 where there is none."""
    agents, size = with_memory(job), job.replica
    most = min(1 + job.state.settings.copies, len({agent.node for agent in agents})) if enough else 1
    whole = [-1]
    for state, parts in images(agents).items():
        there = [*parts.values(), *untrained(agents, state.version).values()]
        complete = len(parts) == size * state.ways and not incomplete(agents, state.version)
        if complete and all(len(nodes) >= most for nodes in there):
            whole.append(state.version)
    return max(whole)


# ---------------------------------------------------------------- making copies
def cut(view: View, job: JobView, cuts: Cuts, waiting: Sequence[int] = ()) -> Iterator[tuple[AgentView, wire.Cut]]:
    """The cut that each agent is to keep, for those that have not heard of it. Called at every tick."""
    state = job.state
    if not job.live.sharded or state.over or state.phase is not Phase.RUNNING or state.plan is None:
        return
    if view.now >= cuts.look_at or changed(job, cuts):
        cuts.look_at = view.now + LOOK_SECONDS
        if note_change(job, cuts, waiting):  # a spare may have come
            missing = lacking(job)
            cuts.unkept = unkept(job) if missing else {}
            cuts.targets = targets(job, view.slurm.domains) if missing and not cuts.unkept else {}
        if cuts.targets:
            redirect(view, job, cuts, partial(targets, job, view.slurm.domains, False, True))
            ask(view, job, cuts, newest_good)
        else:
            end(view, job, cuts)
    for agent in [agent for agent in job.alive() if agent.cut != cuts.number] if cuts.targets or cuts.none else []:
        yield agent, order(cuts, agent, len([slot for slot in agent.slots if slot in state.members]))


# ---------------------------------------------------------------- getting them back
def wanted(view: View, job: JobView, reports: Mapping[int, RankStatus], found: Formed | None) -> Wanted | None:
    """The newest state of which every shard is with a rank that can enter, or in a living node's memory; None where the
    ranks have nothing newer to get."""
    there = images(with_memory(job))
    for state in sorted(there, reverse=True):
        if found is not None and state.version <= found.iteration:
            return None
        ways = _ways(view, job, reports, state, there[state])
        if ways is not None:
            return Wanted((state.version, f"{state.base:x}"), ways) if ways else None
    return None


def _ways(
    view: View, job: JobView, reports: Mapping[int, RankStatus], state: State, there: Mapping[Part, Where]
) -> list[nearest.Way] | None:
    """How the ranks get all shards of this state that they lack; None where that cannot be. What goes with the shards
    comes first: a rank that has them begins."""
    sources = with_memory(job)
    besides, without = untrained(sources, state.version), incomplete(sources, state.version)
    load, ways = nearest.Load(), []
    for place in range(job.replica):
        able = [slot for slot in sorted(reports) if slot % job.replica == place]
        have = {shard for slot in able for shard in _held(reports[slot], state)}
        agents = [agent for slot in able if (agent := job.agent(slot)) is not None and agent.images_at]
        for shard in (shard for shard in range(state.ways) if shard not in have):
            where = there.get((place, shard), {})
            if not where or not agents or place in without:
                return None
            receiver = next((agent for agent in agents if agent.node in where), agents[shard % len(agents)])
            first = besides.get(place, {})
            source = first if first and receiver.node not in first else where
            way = nearest.nearest([receiver], source, load, nearest.usual(job.alive()), view.slurm.domains)
            assert way is not None  # there is a receiver, and a source
            ways.append(way)
    return ways


def _held(status: RankStatus, state: State) -> list[int]:
    return [shard for its in status.shards if (its.version, its.base, its.count) == tuple(state) for shard in its.held]
