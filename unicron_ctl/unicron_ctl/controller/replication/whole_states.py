"""Replication of whole training states: each rank keeps that of its place of the layout. Pure.

If enough nodes train a place, it needs no copies: each replica is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View
from unicron_ctl.controller.replication import nearest
from unicron_ctl.controller.replication.forming import states
from unicron_ctl.controller.replication.receivers import NOBODY, Away, targets_by_place
from unicron_ctl.controller.replication.strategy import (
    ReplicationStrategy,
    State,
    StoredState,
    domains_of,
    images_of,
    kinds_of,
    with_memory,
)
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_transition.snapshot.image_format import STATE

MIN_ITERATION_SECONDS = 1e-3


class SessionStates(ReplicationStrategy):
    """The common part of strategies for jobs with a session: their ranks report each iteration."""

    def first_iteration(self, job: JobView) -> int:
        plan = job.state.plan  # its iterations may be lower than those on record
        iterations = [
            status.iteration
            for _, slot, status in job.all_ranks()
            if slot in job.state.members and plan is not None and status.generation == plan.generation
        ]
        return max([0, job.stepped.iteration + 1, *iterations])

    def rate(self, view: View, job: JobView, pace: object) -> float:
        return 1.0 / max(job.state.seconds or 1.0, MIN_ITERATION_SECONDS)


class WholeStates(SessionStates):
    """The strategy for states that are whole in each rank of their place."""

    def targets(
        self, view: View, job: JobView, waiting: Collection[int], away: Away
    ) -> dict[int, list[structs.Holder]]:
        missing = missing_copies(job)
        return targets(job, missing, domains_of(view, job.state), waiting, away) if missing else {}

    def without_memory(self, job: JobView) -> dict[int, list[str]]:
        if not missing_copies(job):
            return {}
        able = {agent.element for agent in with_memory(job)}
        return {
            place: sorted({job.agents[element].node for element in elements if element in job.agents})
            for place, elements in sorted(trainers(job).items())
            if able.isdisjoint(elements)
        }

    def stored_states(self, job: JobView) -> list[StoredState]:
        return [
            StoredState(iteration, min(len(nodes) for nodes in places.values()))
            for (iteration, _), places in images(job).items()
            if len(places) == job.replica
        ]

    def parts(self, job: JobView, agent: AgentView) -> int:
        return len({slot % job.replica for slot in agent.slots if slot in job.state.members})

    def sources(
        self, view: View, job: JobView, reports: Mapping[int, RankStatus]
    ) -> Iterator[tuple[State, Sequence[nearest.Way] | None]]:
        there, able = images(job), {agent.element for agent in with_memory(job)}
        ranks: dict[State, set[int]] = defaultdict(set)
        for slot, status in reports.items():
            for state in states(status):
                ranks[state].add(slot % job.replica)
        receivers = {slot: status for slot, status in reports.items() if job.state.element(slot) in able}
        for state in sorted(there, reverse=True):
            missing = [place for place in range(job.replica) if place not in ranks[state]]
            ways = nearest.ways(job, receivers, missing, there[state], domains_of(view, job.state))
            yield state, ways if ways or not missing else None


def trainers(job: JobView) -> dict[int, set[int]]:
    """Return place -> elements whose members train it."""
    elements: dict[int, set[int]] = defaultdict(set)
    for slot in job.state.members:
        elements[slot % job.replica].add(job.state.element(slot))
    return elements


def missing_copies(job: JobView) -> dict[int, int]:
    """Return place -> how many nodes beyond those that train it should have its state in memory; of blocks likewise.

    Empty if enough nodes train each place, or no other has a memory. A cut is of use only as a whole: if one place
    needs copies, all do, and then a node that trains without a memory does not count.
    """
    missing: dict[int, int] = {}
    for kind in kinds_of(job.state) if job.remembers else ():
        able, wanted = {kind(agent) for agent in with_memory(job)}, 1 + job.state.settings.copies
        trained = {
            place: {kind(job.agents[e]) for e in found if e in job.agents} for place, found in trainers(job).items()
        }
        if not any(len(found) < wanted and able - found for found in trained.values()):
            continue
        most = min(wanted, len(able))
        for place, found in trained.items():
            missing[place] = max(missing.get(place, 0), most - len(able & found))
    return {place: count for place, count in sorted(missing.items()) if count > 0}


def targets(
    job: JobView,
    missing: Mapping[int, int],
    domains: Mapping[str, str],
    waiting: Collection[int] = (),
    away: Away = NOBODY,
) -> dict[int, list[structs.Holder]]:
    """Return, by element, the receivers of what it has. missing: as from :func:`missing_copies`."""
    able, spares = with_memory(job), dict[int, list[AgentView]]()
    for agent in able:
        for place in {slot % job.replica for slot in agent.slots} if agent.element in waiting else ():
            spares.setdefault(place, []).append(agent)
    return targets_by_place(able, trainers(job), missing, domains, spares, away)


def images(job: JobView) -> dict[State, dict[int, dict[str, tuple[AgentView, structs.Image]]]]:
    """Return state -> place -> node -> agent and image."""
    states: dict[State, dict[int, dict[str, tuple[AgentView, structs.Image]]]] = defaultdict(lambda: defaultdict(dict))
    for agent, image in images_of(job, STATE):
        states[image.iteration, image.mark][image.place][agent.node] = agent, image
    return states
