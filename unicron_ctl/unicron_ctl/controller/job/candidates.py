"""Finds the ranks that can come in, and the replicas that they make: newcomers, standbys, and the ranks that form the
job anew. Ranks that complete no replica wait and keep their state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from unicron_ctl.controller.job import spares
from unicron_ctl.controller.model.agent_view import CAN_ENTER, AgentView, keeps
from unicron_ctl.controller.model.job_state import NO_SLOT, JobState
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View
from unicron_transition.generations import layout


# ---------------------------------------------------------------- who can come in
def may_work(view: View, job: JobView, element: int) -> bool:
    """Whether the plan and the state of its nodes let the element take part. A block takes part as a whole."""
    if job.state.settings.block == 1:
        return _may_work(view, job, element)
    mates = job.state.mates(element)
    return all(mate in job.agents and job.agents[mate].alive and _may_work(view, job, mate) for mate in mates)


def _may_work(view: View, job: JobView, element: int) -> bool:
    allotted, agent = job.state.allotted, job.agents.get(element)
    if element in job.state.parted or element in job.state.noticed:
        return False
    if agent is not None and (view.unfit(agent.node) or job.state.moves(element)):
        return False
    if job.state.swap is not None and job.state.swap.element == element:
        return False
    return allotted is None or element in allotted


def able(job: JobView, agent: AgentView, slots: Iterable[int], forming: bool = False) -> list[int]:
    """Return those of the agent's slots whose rank can enter now. forming: a stopped rank that has kept its state can
    enter, too."""
    state, ranks, found = job.state, agent.ranks, list[int]()
    if not agent.alive:
        return found
    size, known, banished = job.replica, state.slots, state.banished
    text = layout.parse_layout(state.layout).layout.text if state.layout else None
    for slot in slots:
        status = ranks.get(slot)
        if status is None or status.end is not None or status.replica != size:
            continue
        if status.incarnation < known.get(slot, NO_SLOT).wanted or (text is not None and status.layout != text):
            continue  # it has to start again
        if status.state == "waiting" and size == 1 and text is None:
            found.append(slot)
            continue
        kept = status.state in CAN_ENTER or (forming and status.state == "stopped" and keeps(status))
        if kept and banished.get(slot) != (agent.agent, status.incarnation):
            found.append(slot)
    return found


def waiting_elements(view: View, job: JobView, forming: bool = False) -> list[int]:
    """Return the elements all of whose ranks can enter now."""
    found = (e for e in sorted(job.ready) if may_work(view, job, e) and is_whole(job, job.agents[e], forming))
    return in_whole_blocks(job.state, found)


def in_whole_blocks(job: JobState, elements: Iterable[int], inside: Collection[int] = ()) -> list[int]:
    """Return the elements whose block is complete. inside: elements with ranks that train already; they count as
    present."""
    found = list(elements)
    if job.settings.block == 1:
        return found
    there = {*found, *inside}
    return [element for element in found if there.issuperset(job.mates(element))]


def is_whole(job: JobView, agent: AgentView, forming: bool = False) -> bool:
    """Whether all ranks of the agent can enter now. The answer is kept until one of them, or the job, changes: while a
    large job forms, all are asked again and again."""
    if not agent.alive:
        return False
    asked = forming, job.phases, job.replica, job.state.layout
    if agent.can_enter is None or agent.can_enter[0] != asked:
        agent.can_enter = asked, len(able(job, agent, agent.slots, forming)) == len(agent.slots)
    return agent.can_enter[1]


def forming_slots(view: View, job: JobView, whole: Sequence[int]) -> list[int]:
    """Return the ranks that can form the job and are not spares. whole: the elements all of whose ranks can enter; used
    only if a replica is one rank."""
    if job.replica == 1:
        return spares.formers(job, (slot for element in whole for slot in job.agents[element].slots))
    ready = (element for element in sorted(job.ready) if may_work(view, job, element))
    agents = (job.agents[element] for element in in_whole_blocks(job.state, ready))
    return spares.formers(job, (slot for agent in agents for slot in able(job, agent, agent.slots, True)))


def newcomers(view: View, job: JobView, delay: float) -> list[int]:
    """Return the slots that can come in now, replica-major.

    Their processes have been ready for `delay` seconds, or no other can follow in a mode in which newcomers join.
    Ranks come one by one if their element is inside already or has a standby; other elements come as a whole. Surplus
    elements wait as spares.
    """
    state = job.state
    found, late = dict[int, list[int]](), dict[int, list[int]]()
    for element in sorted(job.ready):
        if element in state.leaving or not may_work(view, job, element):
            continue
        agent = job.agents[element]
        if slots := _entering(job, agent):
            waited = view.now - max(agent.came.get(slot, 0.0) for slot in slots)
            (found if waited >= delay else late)[element] = slots
    if late and state.mode.joins and not _coming(view, job):
        found = dict(sorted((found | late).items()))
    found = {element: found[element] for element in in_whole_blocks(state, found, state.inside)}
    taken = spares.entrants(view, job, found) if found else ()
    chosen = [slot for element, slots in found.items() if element in taken for slot in slots]
    return layout.arrange(layout.compose(chosen, job.replica)[0])


def _entering(job: JobView, agent: AgentView) -> list[int]:
    """Return the agent's slots that can come in: any of them if it is inside or has a standby, else all or none."""
    outside = [slot for slot in agent.slots if slot not in job.state.members]
    inside = job.state.mode.joins and len(outside) < len(agent.slots)
    if inside or any(status.state == "standby" for status in agent.ranks.values()):
        return able(job, agent, outside)
    return outside if len(outside) == len(agent.slots) and is_whole(job, agent) else []


def _coming(view: View, job: JobView) -> bool:
    """Whether a living agent has processes that are neither inside nor able to come in yet, or an agent of the log has
    not been heard since the controller started."""
    if any(not known.gone and element not in job.agents for element, known in job.state.agents.items()):
        return True
    for element, agent in job.agents.items():
        outside = [slot for slot in agent.slots if slot not in job.state.members] if agent.alive else []
        if len(able(job, agent, outside)) < len(outside) and may_work(view, job, element):
            return True
    return False


def remaining(members: Sequence[int], leavers: Collection[int], size: int) -> list[int]:
    """Return the members that go on, replica-major: every replica without a leaver. If there is none, the remaining
    members are regrouped into complete replicas."""
    gone = set(leavers)
    groups = layout.replicas(members, size)
    whole = [replica for replica in groups if gone.isdisjoint(replica)]
    return layout.arrange(whole or layout.compose((slot for slot in members if slot not in gone), size)[0])


def leavers(job: JobView, joiners: Collection[int] = ()) -> list[int]:
    """Return the members that must leave, with the others in the replicas that they break up. The last replica never
    leaves, because no other has the state. A suspect leaves only when enough `joiners` take its place."""
    state = job.state
    departing = state.departing | spares.leaving_by_swap(job, joiners)
    if not departing or state.plan is None:
        return []
    named = [slot for slot in state.members if state.element(slot) in departing]
    staying = set(remaining(state.plan.members, named, job.replica)) if named else set()
    return [slot for slot in state.members if slot not in staying] if staying else []


def of_another_size(job: JobView) -> dict[int, int]:
    """Return the slots that would enter but can never train with the job, with the size of their replicas. Those that
    will start again do not count."""
    ranks = ((slot, status) for element in job.ready for slot, status in job.agents[element].ranks.items())
    return {
        slot: status.replica
        for slot, status in ranks
        if status.replica != job.replica
        and status.state in CAN_ENTER
        and status.end is None
        and status.incarnation >= job.state.slot(slot).wanted
    }


def missing_places(slots: Iterable[int], size: int) -> list[int]:
    """Places of a replica for which there is no rank among these slots."""
    if size == 1:
        return [] if any(True for _ in slots) else [0]
    return sorted(set(range(size)).difference(slot % size for slot in slots))
