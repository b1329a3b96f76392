"""Who can come in, and what they make together: newcomers and standbys compose replicas, and so do the ranks that form
the job anew. What completes none waits, with the state that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from transition import layout
from unicron_ctl.agreement.resume import newest_state
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.model.agent_view import CAN_ENTER, AgentView, keeps
from unicron_ctl.controller.model.job import Identity
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View
from unicron_ctl.protocol.wire import RankStatus


# ---------------------------------------------------------------- who can come in
def may_work(view: View, job: JobView, element: int) -> bool:
    """The plan, and the state of its node, let the element take part."""
    allotted, agent = job.state.allotted, job.agents.get(element)
    if element in job.state.parted:
        return False
    if agent is not None and (view.unfit(agent.node) or job.state.moves(element)):
        return False
    return allotted is None or element in allotted


def able(job: JobView, agent: AgentView, slot: int, forming: bool = False) -> bool:
    """The rank can enter now. forming: one that has stopped can, too, with the state that it has kept."""
    status = agent.ranks.get(slot)
    if status is None or status.end is not None or not agent.alive or status.replica != job.replica:
        return False
    if status.state == "waiting" and job.replica == 1 and not job.state.layout:
        return True
    if status.incarnation < job.state.slot(slot).wanted or not _in_layout(job, status):
        return False  # it is to start again
    kept = status.state in CAN_ENTER or (forming and status.state == "stopped" and keeps(status))
    gone = job.state.banished.get(slot)
    return kept and gone != Identity(agent.agent, status.incarnation)


def _in_layout(job: JobView, status: RankStatus) -> bool:
    wanted = job.state.layout
    return not wanted or status.layout == layout.stated(wanted).layout.text


def waiting_elements(view: View, job: JobView, forming: bool = False) -> list[int]:
    """Elements of which every rank can enter now."""
    return [e for e in sorted(job.live.ready) if may_work(view, job, e) and _whole(job, job.agents[e], forming)]


def _whole(job: JobView, agent: AgentView, forming: bool = False) -> bool:
    return agent.alive and all(able(job, agent, slot, forming) for slot in agent.slots)


def forming_slots(view: View, job: JobView, whole: Sequence[int]) -> list[int]:
    """All ranks that can form the job and are not to be spares. Where a rank is a replica, an element comes as a whole:
    those are `whole`."""
    if job.replica == 1:
        return spares.formers(job, (slot for element in whole for slot in job.agents[element].slots))
    agents = (job.agents[element] for element in sorted(job.live.ready) if may_work(view, job, element))
    return spares.formers(job, (slot for agent in agents for slot in agent.slots if able(job, agent, slot, True)))


def newcomers(view: View, job: JobView, delay: float) -> list[int]:
    """Slots that can come in now, replica-major, of elements whose processes have been ready for `delay` seconds, or
    whom nobody can follow: those of an element that is inside already, or has a standby, by themselves, else all of it
    together. Who is one too many waits as a spare."""
    state = job.state
    found, late = dict[int, list[int]](), dict[int, list[int]]()
    for element in sorted(job.live.ready):
        agent = job.agents[element]
        if element in state.leaving or not may_work(view, job, element):
            continue
        outside = [slot for slot in agent.slots if slot not in state.members]
        inside = len(outside) < len(agent.slots) and not state.restart_mode
        if inside or any(status.state == "standby" for status in agent.ranks.values()):
            outside = [slot for slot in outside if able(job, agent, slot)]
        elif not _whole(job, agent) or len(outside) < len(agent.slots):
            continue
        if outside:
            waited = view.now - max(agent.came.get(slot, 0.0) for slot in outside)
            (found if waited >= delay else late)[element] = outside
    if late and not state.restart_mode and not _coming(view, job):
        found = dict(sorted((found | late).items()))
    taken = spares.admitted(view, job, found) if found else ()
    chosen = [slot for element, slots in found.items() if element in taken for slot in slots]
    return layout.arranged(layout.compose(chosen, job.replica)[0])


def _coming(view: View, job: JobView) -> bool:
    """An agent that is there has processes that are neither inside nor able to come in, and may be any moment; or one
    of the log's has not been heard yet, since the controller has just started."""
    if any(not known.gone and element not in job.agents for element, known in job.state.agents.items()):
        return True
    return any(
        agent.alive
        and any(slot not in job.state.members and not able(job, agent, slot) for slot in agent.slots)
        and may_work(view, job, element)
        for element, agent in job.agents.items()
    )


def remaining(members: Sequence[int], leavers: Collection[int], size: int) -> list[int]:
    """Those of the members, replica-major, who go on: the replicas without a leaver; where there is none, those that
    the others compose."""
    gone = set(leavers)
    groups = layout.replicas(members, size)
    whole = [replica for replica in groups if gone.isdisjoint(replica)]
    return layout.arranged(whole or layout.compose((slot for slot in members if slot not in gone), size)[0])


def leavers(job: JobView) -> list[int]:
    """Members that are to leave, with those whose replica they break. The last replica never does: nobody else has the
    state."""
    state = job.state
    if not state.leaving or state.plan is None:
        return []
    named = [slot for slot in state.members if state.element(slot) in state.leaving]
    staying = set(remaining(state.plan.members, named, job.replica)) if named else set()
    return [slot for slot in state.members if slot not in staying] if staying else []


# ---------------------------------------------------------------- forming
@dataclass(frozen=True)
class Formed:
    """members: replica-major. source: the head of the replica whose ranks give their state to the joiners. state: as in
    :class:`unicron_ctl.protocol.wire.Plan`. why: where the state comes from, if that is not plain."""

    members: list[int]
    joiners: list[int]
    source: int | None
    iteration: int
    state: tuple[int, int] | None = None
    why: str = ""


def formed(reports: Mapping[int, RankStatus], size: int) -> Formed | None:
    """The generation that these ranks, each able to enter, can form; None where they have no state in common.

    That is the newest iteration of which there is a state for every place, of one mark; with a distributed optimizer,
    the newest state of which all shards are there, once any rank has some. There must be a rank for every place. Where
    nobody has trained yet, the shards are what earlier processes left in the nodes' memory: then a checkpoint may be
    newer, or the last resort.
    """
    held = max((shards.version for status in reports.values() for shards in status.shards), default=None)
    if held is None:
        return _from_files(reports, size)
    found = _from_shards(reports, size)
    if any(_has_been_in(status) for status in reports.values()):
        return found
    saved = _from_files(reports, size)
    if saved is None or (found is not None and found.iteration >= saved.iteration):
        return found
    missing = f"the nodes' memory has only a part of the state after {held} steps" if found is None else found.why
    return replace(saved, why=f"{missing}: all go on from what ranks start with, iteration {saved.iteration}")


def _from_files(reports: Mapping[int, RankStatus], size: int) -> Formed | None:
    """From what the ranks began with, or have trained where each of them has all of it."""
    at: dict[tuple[int, str], list[int]] = {}
    for slot, status in sorted(reports.items()):
        for state in states(status):
            at.setdefault(state, []).append(slot)
    for iteration, mark in sorted(at, reverse=True):
        sources, _ = layout.compose(at[iteration, mark], size)
        if sources:
            source = min(sources)
            others, _ = layout.compose((slot for slot in reports if slot not in source), size)
            joiners = sorted(slot for replica in others for slot in replica)
            return Formed(layout.arranged([source, *others]), joiners, source[0], iteration)
    return None


def states(status: RankStatus) -> list[tuple[int, str]]:
    """(iteration, mark) of the states with which the rank could begin."""
    return [(iteration, mark) for iteration, mark in status.kept] or [(trained(status), "")]


def left_behind(reports: Mapping[int, RankStatus], found: Formed) -> str:
    """Of a newer state than that of `found`, of which parts are there, for people; empty where there is none."""
    newest = max(iteration for status in reports.values() for iteration, _ in states(status))
    if newest <= found.iteration:
        return ""
    have = [slot for slot, status in sorted(reports.items()) if newest in dict(states(status))]
    return (
        f"; iteration {newest} is left behind: only slots {have[:20]} have a state of it, and a replica needs one for "
        "every place"
    )


def taken_over(reports: Mapping[int, RankStatus], found: Formed) -> str:
    """Of joiners that could begin with an older state of their own, for people: a whole replica has a newer one, so
    they take that, and nobody does work again; empty where there are none."""
    older = {slot: max((i for i, _ in states(reports[slot])), default=-1) for slot in found.joiners if slot in reports}
    behind = {slot: iteration for slot, iteration in older.items() if 0 < iteration < found.iteration}
    if not behind or found.source is None:
        return ""
    return (
        f"; slots {sorted(behind)[:20]} have iteration {max(behind.values())} at most, and take the state from the "
        f"replica of slot {found.source}: that costs a transfer, and no iteration is done again"
    )


def trained(status: RankStatus) -> int:
    """The iteration that comes next for the parameters that the rank has."""
    return status.iteration + (status.phase == "stepped")


def _from_shards(reports: Mapping[int, RankStatus], size: int) -> Formed | None:
    _, holders = newest_state(reports, reports, size)
    first, _ = layout.compose(holders, size)
    inside = {slot for replica in first for slot in replica}
    others, _ = layout.compose((slot for slot in reports if slot not in inside), size)
    members = layout.arranged([*first, *others])
    state, holders = newest_state(reports, members, size)
    if state is None:
        return None
    # Ranks of one replica must come in alike: those that go on with the iteration in which they have stopped compare
    # what is in their gradients, and nobody else does.
    mixed = any(reports[slot].state != "stopped" or reports[slot].iteration > state[1] for slot in members)
    anew = {slot for slot in members if mixed and _has_been_in(reports[slot])}
    sources = [replica for replica in first if holders.issuperset(replica)]
    joiners = sorted(slot for slot in members if slot not in holders or slot in anew)
    kept = any(_has_been_in(status) for status in reports.values())
    why = "" if kept else f"the nodes' memory has the state after {state[1]} steps"
    return Formed(members, joiners, min(sources)[0] if sources else None, state[1], state, why)


def without_match(reports: Mapping[int, RankStatus]) -> list[int]:
    """Ranks that start again where :func:`formed` finds nothing: those that have been in a generation, and newcomers
    that came with an older checkpoint than others."""
    fresh = {slot: trained(status) for slot, status in reports.items() if not _has_been_in(status)}
    newest = max(fresh.values(), default=-1)
    return [slot for slot in reports if slot not in fresh or fresh[slot] < newest]


def _has_been_in(status: RankStatus) -> bool:
    return status.state != "waiting"


def of_another_size(job: JobView) -> dict[int, int]:
    """Slots that would enter but can never train with the others, and the ranks of a replica as they say it; not those
    that are to start again."""
    ranks = ((slot, status) for element in job.live.ready for slot, status in job.agents[element].ranks.items())
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
    here = {slot % size for slot in slots}
    return [place for place in range(size) if place not in here]
