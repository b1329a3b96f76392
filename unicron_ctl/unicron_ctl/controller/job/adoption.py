"""Takes over a generation that is not in the log: the log was lost, in part or whole, or the agents agreed on the
generation while the controller was away (docs/design/consensus.md).

Until then nothing is decided about the job. The controller asks the agents whose ranks are in the generation for its
plan (`wire.Recall`). If all members are there and in it, the job simply goes on; otherwise the generation is broken,
and the survivors go on with the state that they have. An agreement of the agents counts once all living agents have
answered a Ping, because one may know that it was chosen while another does not yet.

The wait is bounded: after `state_wait_seconds` the generation is broken with the members that are there, unless the
missing ones may be a majority that goes on by itself (`failure_detector.quorum`).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.job.candidates import forming_slots, missing_places, of_another_size, waiting_elements
from unicron_ctl.controller.job.deciding import decide
from unicron_ctl.controller.job.runtime import JobRuntime
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.finding import Finding
from unicron_ctl.controller.model.job_state import MAY_LIVE, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import look_again
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.replication.cuts import behind
from unicron_ctl.controller.sense import members
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import shared_plans, wire
from unicron_ctl.shared.slurm.states import OCCUPIES
from unicron_detector.words import all_of

RECORD_SECONDS = 1.0  # of a Break, before a wait for silent members is recorded
MISSED_KEPT = 16  # elements of one generation that are recorded as missed
LOOK_SECONDS = 0.5  # between two checks for missing ranks of a forming job
RECALLS_AT_ONCE = 3  # agents that are asked for the plan at the same time


def unknown(job: JobState, agent: AgentView) -> bool:
    """Whether the agent shows a generation, or a plan, that this controller has not made."""
    return agent.alive and (agent.newest > job.generation or _foreign(job, agent.status.agreed))


def _foreign(job: JobState, agreed: wire.Agreement | None) -> bool:
    if agreed is None or agreed.generation != job.generation or not agreed.chosen:
        return agreed is not None and agreed.generation > job.generation
    return job.plan is None or (job.plan.generation <= agreed.generation and job.plan.prefix != agreed.plan.prefix)


def ahead(job: JobView) -> bool:
    """Whether any agent shows a generation or plan that this controller does not know."""
    for element in list(job.ahead):
        agent = job.agents.get(element)
        if agent is None or not unknown(job.state, agent):
            job.ahead.discard(element)
    if not job.ahead:
        job.asked, job.held, job.ahead_since = 0, None, 0.0
    return bool(job.ahead)


def adopt_generation(view: View, job: JobView) -> Outcome:
    """Takes over the generation, or asks for its plan; empty while answers are awaited."""
    out, shown = Outcome(), [job.agents[element] for element in sorted(job.ahead)]
    agreed = [found for agent in shown if (found := agent.status.agreed) is not None and _foreign(job.state, found)]
    newest = max(agent.newest for agent in shown)
    job.ahead_since = job.ahead_since or view.now
    if agreed and not _all_heard(view, job, out) and not _late(view, job):
        return out
    highest = max((one.generation for one in agreed), default=0)
    chosen = [one for one in agreed if one.chosen and one.generation == highest]
    if chosen:
        _take_over(view, job, chosen, out)
    elif newest > job.state.generation:
        _recover(view, job, newest, out)
    elif not _may_have_begun(view, job, agreed, out):
        reason = f"number {highest}, which agents had begun to agree on, is not used"
        out.record(job.state, records.NumberUsed(reason=reason), highest)
    if out.records:
        job.held = None
    return out


def _all_heard(view: View, job: JobView, out: Outcome) -> bool:
    """Whether all living agents have answered; silent agents are judged elsewhere."""
    if not job.asked:
        view.suspicions.last_number += 1
        job.asked = view.suspicions.last_number
    silent = {element for name, element in view.suspicions.open if name == job.state.job}
    missing = [agent for agent in job.alive() if agent.status.pinged < job.asked and agent.element not in silent]
    for agent in missing:
        _once(view, agent, f"ping {job.asked}", wire.Ping(number=job.asked), out)
    return not missing


def _may_have_begun(view: View, job: JobView, agreed: list[wire.Agreement], out: Outcome) -> bool:
    """Whether the generation may have been chosen: no agent knows it, but its members, who would know, are silent."""
    for one in agreed:
        if quorum.plan_may_have_begun(view, job.state, one.plan, job.asked):
            elements = job.state.elements(one.plan.members)
            reason = (
                f"generation {one.generation}, which agents had begun to agree on, may go on without this controller: "
                f"of its elements {elements[:20]} none has been heard. Nothing is formed before that, or before Slurm "
                f"shows that they ended"
            )
            _record_wait(job.state, one.plan.members, reason, out)
            return True
    return False


def _late(view: View, job: JobView) -> bool:
    return view.now - job.ahead_since > view.config.state_wait_seconds


def _once(view: View, agent: AgentView, key: str, message: wire.Message, out: Outcome) -> None:
    if view.now - agent.repeated.get(key, float("-inf")) >= view.config.repeat_seconds:
        agent.repeated[key] = view.now
        out.send(agent, message)


def _take_over(view: View, job: JobView, chosen: list[wire.Agreement], out: Outcome) -> None:
    """Adopts the plan that the agents agreed on. Each agent knows the micro-batches of its own ranks, the proposers
    know all."""
    first = chosen[0]
    assignment = {slot: share for one in chosen for slot, share in one.plan.assignment.items()}
    plan = msgspec.structs.replace(first.plan, assignment=assignment)
    found = _crews(view, job, plan, out)
    if found is None:
        return
    crews, missing = found
    reason = f"generation {plan.generation} was agreed on while this controller was away: {first.reason}"
    out.findings += _find_missed(view, job, chosen, plan)
    out.record(
        job.state, records.GenerationAdopted(plan=plan, crews=crews, whole=not missing, reason=reason), plan.generation
    )


def _find_missed(view: View, job: JobView, chosen: list[wire.Agreement], plan: wire.Plan) -> Iterator[Finding]:
    """Findings about processes that were left out and whose agent can no longer be asked: another agent has the
    element, or none has come. All other agents show such an end or are asked for it (`members.check_missed`)."""
    state = job.state
    gone = {slot: identity.agent for slot, identity in state.members.items() if slot not in plan.members}
    named = {one.slot: one.agent for agreed in chosen for one in agreed.lost}
    gone |= {slot: agent for slot, agent in named.items() if state.element(slot) < state.settings.max_nodes}
    found: dict[int, list[int]] = {}
    for slot, agent in sorted(gone.items()):
        record = state.agents.get(state.element(slot))
        if slot in plan.members or slot in state.lost or slot in state.condemned:
            continue
        if record is not None and record.agent == agent:
            job.missed[slot] = agent, view.now
        else:
            found.setdefault(state.element(slot), []).append(slot)
    for element, slots in list(found.items())[:MISSED_KEPT]:
        record = state.agents.get(element)
        yield members.missed_finding(view, job, slots, record.node if record is not None else "")


def _recover(view: View, job: JobView, generation: int, out: Outcome) -> None:
    """Adopts the plan of an earlier controller, or asks for it."""
    plan = job.held
    if plan is None or plan.generation != generation:
        if _late(view, job):
            _break_off(view, job, generation, out)
        else:
            _recall(view, job, generation, out)
        return
    found = _crews(view, job, plan, out)
    if found is None:
        return
    crews, missing = found
    whole = not missing and all(job.inside(slot, generation) for crew in crews for slot in crew.slots)
    if whole:
        reason = f"{all_of(len(plan.members), 'member', 'run')} in generation {generation}, which this log did not hold"
    else:
        lost = f" without slots {missing[:20]}" if missing else ""
        reason = f"generation {generation}, which this log did not hold, is not complete{lost}: it is broken"
    out.record(job.state, records.GenerationAdopted(plan=plan, crews=crews, whole=whole, reason=reason), generation)


def _break_off(view: View, job: JobView, generation: int, out: Outcome) -> None:
    """Adopts a generation whose plan no agent has: those that show it count as its members, and regroup."""
    state = job.state
    inside: dict[int, list[int]] = {}
    for agent, slot, status in job.all_ranks():
        if agent.alive and max(status.generation, status.entering) == generation:
            inside.setdefault(agent.element, []).append(slot)
    nobody = (
        f"within {view.config.state_wait_seconds:g} s nobody could say what the plan of generation {generation} was"
    )
    here = {agent.element for agent in job.alive()}
    absent = [element for element in _known_elements(view, job) if element not in here]
    comes = view.now - job.last_arrival < view.config.forming_settle_seconds
    if comes or _too_many(job, absent, len(here) + len(absent), out):
        return
    if not inside:
        out.record(state, records.NumberUsed(reason=f"{nobody}, and none of its ranks is left"), generation)
        return
    slots = sorted(slot for mine in inside.values() for slot in mine)
    crews = [crew for e, mine in sorted(inside.items()) if (crew := _crew(job, e, sorted(mine))) is not None]
    store = next(filter(None, (job.agents[element].status.store for element in sorted(inside))), "")
    reason = f"{nobody}: it is broken, and its {len(slots)} ranks that are there go on"
    plan = wire.Plan(
        generation=generation, members=slots, store=store, prefix=f"{state.job}.g{generation}", replica=job.rank_replica
    )
    out.record(state, records.GenerationAdopted(plan=plan, crews=crews, whole=False, reason=reason), generation)


def _known_elements(view: View, job: JobView) -> list[int]:
    """Elements that have processes by the log or by Slurm."""
    seen = view.slurm.seen
    listed = seen.of(job.state.job) if seen is not None else {}
    found = {element for element, record in job.state.agents.items() if not record.gone}
    return sorted(found | {element for element, info in listed.items() if info.state in OCCUPIES})


def _too_many(job: JobView, absent: list[int], count: int, out: Outcome) -> bool:
    """Whether more than half of the elements are missing without evidence of their end: they may go on by
    themselves."""
    if not job.state.mode.agents_agree or count < 2 or 2 * len(absent) <= count:
        return False
    reason = (
        f"elements {absent[:20]} of job {job.state.job} have not been heard, and may go on by themselves: nothing is "
        f"formed from the other {count - len(absent)} before they are heard, or Slurm shows that they ended"
    )
    slots = [slot for element in absent for slot in range(element * job.per_node, (element + 1) * job.per_node)]
    _record_wait(job.state, slots, reason, out)
    return True


def _record_wait(job: JobState, slots: list[int], reason: str, out: Outcome) -> None:
    """Records a wait, once."""
    if job.waits != reason:
        out.record(job, records.StateAwaited(slots=slots, reason=reason))


def _crews(view: View, job: JobView, plan: wire.Plan, out: Outcome) -> tuple[list[records.Crew], list[int]] | None:
    """The plan's processes, and the slots without one; None while an agent may still come."""
    crews, missing, elements, unheard = [], [], job.by_element(plan.members), []
    for element, slots in elements.items():
        crew = _crew(job, element, slots)
        if crew is not None:
            crews.append(crew)
            continue
        if _may_come(view, job, element):
            if not _late(view, job):
                return None
            unheard.append(element)
        missing += slots
    return None if _too_many(job, unheard, len(elements), out) else (crews, missing)


def _crew(job: JobView, element: int, slots: list[int]) -> records.Crew | None:
    """The element's processes by its agent or, if that has not come back, by the log; None if unknown."""
    agent = job.agents.get(element)
    if agent is not None:
        ranks = agent.ranks
        if any(slot not in ranks for slot in slots):
            return None
        return records.Crew(agent.agent, slots, [ranks[slot].incarnation for slot in slots])
    record, members = job.state.agents.get(element), job.state.members
    if record is None or record.gone or any(s not in members or members[s].agent != record.agent for s in slots):
        return None
    return records.Crew(record.agent, slots, [members[slot].incarnation for slot in slots])


def _may_come(view: View, job: JobView, element: int) -> bool:
    """Whether the element's agent may still register or speak: Slurm runs the element, or nothing is known of it."""
    if (agent := job.agents.get(element)) is not None:
        return agent.alive
    seen = view.slurm.seen
    if not view.slurm.used or seen is None or seen.asked_at < view.started_at:
        return True
    info = seen.of(job.state.job).get(element)
    return info is not None and info.state in OCCUPIES


def _recall(view: View, job: JobView, generation: int, out: Outcome) -> None:
    asked = [job.agents[e] for e in sorted(job.ahead) if job.agents[e].newest == generation]
    for agent in asked[:RECALLS_AT_ONCE]:
        _once(view, agent, f"recall {generation}", wire.Recall(generation=generation), out)


def take_in_plan(job: JobView, agent: AgentView, message: wire.RecallAnswer) -> None:
    """Takes in an agent's answer to `wire.Recall`; one that holds no plan is ignored."""
    try:
        plan = shared_plans.whole(message.share)
    except wire.BadMessage:
        return
    if agent.element in job.ahead and plan.generation == agent.newest and plan.members:
        # Only this agent's part of the assignment is known; reports tell what was computed.
        job.held = msgspec.structs.replace(plan, assignment={}, boundary=False)


# ---------------------------------------------------------------- the last ranks with the training state
def may_come_back(view: View, job: JobView) -> list[int]:
    """Lost members that may live and have the training state, which no other rank has: nothing has shown them dead. The
    wait for them is bounded by `_patience`."""
    state = job.state
    if not state.mode.keeps_state or state.phase is not Phase.BREAKING:
        return []
    if job.seconds_in_phase(view.now) > _patience(view, job):
        return []
    found = []
    for slot, identity in state.lost.items():
        record = state.agents.get(state.element(slot))
        if record is not None and record.agent == identity.agent and record.gone in MAY_LIVE:
            if not quorum.shown_dead(view, state, state.element(slot)):
                found.append(slot)
    return found


def _patience(view: View, job: JobView) -> float:
    """Seconds to wait for silent members: at most the work to repeat if the job goes on from other nodes' memory."""
    return min(view.config.state_wait_seconds, behind(job))


def _report_incomplete(view: View, job: JobView) -> Outcome:
    """Records that a job that is formed anew has ranks with their state, but lacks ranks for other places."""
    out, state = Outcome(), job.state
    if view.now < job.nobody_until or not state.mode.keeps_state:
        return out
    job.nobody_until = look_again(view.now, len(job.agents), LOOK_SECONDS)
    slots = forming_slots(view, job, waiting_elements(view, job, True))
    kept = [slot for slot in slots if (status := job.status(slot)) is not None and status.state != "waiting"]
    missing = missing_places(slots, job.replica)
    if kept and missing:
        reason = (
            f"slots {kept[:20]} have kept their training state, and of the {job.replica} ranks of a replica those for "
            f"the places {missing[:20]} are missing: the job waits for them"
        )
        _record_wait(state, kept, reason, out)
    return out


def _report_unlike(view: View, job: JobView, out: Outcome) -> bool:
    """Records ranks that wait with replicas of another size; whether there are any."""
    if view.now >= job.unlike_look_at:
        strange = of_another_size(job)
        job.unlike, job.unlike_look_at = bool(strange), look_again(view.now, len(job.agents), LOOK_SECONDS)
        if strange:
            sizes = ", ".join(map(str, sorted(set(strange.values()))))
            reason = (
                f"slots {sorted(strange)[:20]} have replicas of {sizes} ranks and the others of {job.replica}, so they "
                "cannot train together: start the same command on all nodes"
            )
            _record_wait(job.state, sorted(strange), reason, out)
    return job.unlike


def report_awaited(view: View, job: JobView, runtime: JobRuntime) -> Outcome:
    """Records, once, the ranks for which a job waits that could be formed anew."""
    out, state = Outcome(), job.state
    if state.phase in (Phase.FORMING, Phase.RUNNING) and _report_unlike(view, job, out):
        return out
    if state.phase is Phase.FORMING:
        return _report_incomplete(view, job)
    here = state.phase is Phase.BREAKING and not job.awaited and job.seconds_in_phase(view.now) > RECORD_SECONDS
    if not here or runtime.state_awaited == state.broken:
        return out
    slots = may_come_back(view, job)
    if slots and (not job.anybody_stopped() or (job.replica > 1 and decide(job) is None)):
        runtime.state_awaited = state.broken
        nodes = ", ".join(sorted({state.node(slot) for slot in slots}))
        reason = (
            f"slots {slots} on {nodes} are silent, may live, and nobody else has the training state: the job is not "
            f"formed anew for {_patience(view, job):.0f} s, unless Slurm shows that they ended "
            f"(`scontrol requeue` does)"
        )
        out.record(state, records.StateAwaited(slots=slots, reason=reason))
    return out


def reinstate(job: JobView, agent: AgentView) -> Outcome:
    """Makes the processes of an agent that was taken for lost members again, if the others have not gone on yet."""
    out, state, back = Outcome(), job.state, []
    for slot, status in agent.ranks.items():
        alive = status.end is None and status.state not in ("left", "starting")
        if alive and state.phase is Phase.BREAKING and state.lost.get(slot) == job.identity(slot):
            back.append(slot)
    if back:
        reason = f"slots {back} on {agent.node} were taken for lost, and are members again"
        out.record(state, records.MembersReinstated(slots=back, reason=reason))
    return out
