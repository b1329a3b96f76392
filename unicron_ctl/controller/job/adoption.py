"""A generation that the controller knows nothing of: its log was lost, in part or whole, or the agents agreed on it
while the controller was away. It is taken over as its agents show it; until then nothing is decided about the job.

What the plan was is asked of agents whose ranks are in it (`wire.Recall`). When all of its members are there and in it
the job simply goes on; else the generation is broken, and the survivors go on from what they have.
"""

from __future__ import annotations

import msgspec

from unicron_ctl.controller.job.desk import JobDesk
from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.job import Phase
from unicron_ctl.controller.model.live import AgentView, JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.protocol import wire

SAY_SECONDS = 1.0  # of a Break, before it is said that the job waits for somebody
ASKED = 3  # agents that are asked at once what the plan was
HERE = frozenset({"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"})  # states in which an element has processes


def ahead(job: JobView) -> int:
    """The highest generation that agents show and that this controller knows nothing of; 0 when there is none."""
    live, known = job.live, job.state.generation
    for element in list(live.ahead):
        agent = job.agents.get(element)
        if agent is None or not agent.alive or agent.newest <= known:
            live.ahead.discard(element)
    return max((job.agents[element].newest for element in live.ahead), default=0)


def look(view: View, job: JobView, generation: int) -> Outcome:
    """Takes the generation over, or asks what it is; empty while answers are awaited."""
    out, held = Outcome(), job.live.held
    if held is None or held.generation != generation:
        _recall(view, job, generation, out)
        return out
    per_node, plan = job.per_node, held
    crews, missing = [], []
    for element in job.state.elements(plan.members):
        slots = [slot for slot in plan.members if slot // per_node == element]
        crew = _crew(view, job, element, slots)
        if crew is not None:
            crews.append(crew)
        elif _may_come(view, job, element):
            return out
        else:
            missing += slots
    inside = all(job.inside(slot, generation) for crew in crews for slot in crew.slots)
    if not missing and inside:
        reason = f"all {len(plan.members)} members run in generation {generation}, which this log did not hold"
        whole = True
    else:
        lost = f" without slots {missing[:20]}" if missing else ""
        reason = f"generation {generation}, which this log did not hold, is not complete{lost}: it is broken"
        whole = False
    record = records.Adopted(plan=plan, crews=crews, whole=whole, reason=reason)
    out.record(job.state, record, generation)
    job.live.held = None
    job.live.ahead.clear()
    return out


def _crew(view: View, job: JobView, element: int, slots: list[int]) -> records.Crew | None:
    """The element's processes; those of an agent that has not come back yet are known from the log, if at all."""
    agent = job.agents.get(element)
    if agent is not None:
        ranks = agent.ranks
        return records.Crew(agent.agent, slots, [ranks[s].incarnation if s in ranks else 0 for s in slots])
    record, members = job.state.agents.get(element), job.state.members
    if record is None or record.gone or any(s not in members or members[s].agent != record.agent for s in slots):
        return None
    return records.Crew(record.agent, slots, [members[slot].incarnation for slot in slots])


def _may_come(view: View, job: JobView, element: int) -> bool:
    """An agent of which only the plan tells may still register: Slurm runs its element, or nothing is known of it."""
    if view.now - view.started_at > view.config.state_wait_seconds:
        return False
    seen = view.slurm.seen
    if not view.slurm.used or seen is None or seen.asked_at < view.started_at:
        return True
    info = seen.of(job.state.job).get(element)
    return info is not None and info.state in HERE and view.now - view.started_at <= view.config.state_wait_seconds


def _recall(view: View, job: JobView, generation: int, out: Outcome) -> None:
    key, asked = f"recall {generation}", 0
    for element in sorted(job.live.ahead):
        agent = job.agents[element]
        if agent.newest != generation or asked >= ASKED:
            continue
        asked += 1
        if view.now - agent.repeated.get(key, float("-inf")) >= view.config.repeat_seconds:
            agent.repeated[key] = view.now
            out.send(agent, wire.Recall(generation=generation))


def recalled(job: JobView, agent: AgentView, message: wire.Held) -> None:
    """An agent's answer; a plan that is none says nothing."""
    try:
        plan = wire.whole(message.share)
    except wire.BadMessage:
        return
    if agent.element in job.live.ahead and plan.generation == agent.newest and plan.members:
        # Only this agent's part of the assignment is known; whoever reports says what it has computed.
        job.live.held = msgspec.structs.replace(plan, assignment={}, boundary=False)


# ---------------------------------------------------------------- the last ones who know the training state
def may_come_back(view: View, job: JobView) -> list[int]:
    """Lost members that may live and hold the training state, when nobody else does: nothing has shown them dead.

    Nobody waits for them longer than `state_wait_seconds`. In restart mode there is no state.
    """
    state = job.state
    if state.restart_mode or state.phase is not Phase.BREAKING or job.waited(view.now) > view.config.state_wait_seconds:
        return []
    found = []
    for slot, identity in state.lost.items():
        record = state.agents.get(state.element(slot))
        if record is not None and record.agent == identity.agent and record.gone == "silent":
            if not _shown_dead(view, job, state.element(slot), record.node):
                found.append(slot)
    return found


def _shown_dead(view: View, job: JobView, element: int, node: str) -> bool:
    """Slurm no longer runs the element there."""
    seen = view.slurm.seen
    info = seen.of(job.state.job).get(element) if seen is not None else None
    if not view.slurm.used or info is None:
        return False
    return info.state not in HERE or info.node != node


def say_awaited(view: View, job: JobView, desk: JobDesk) -> Outcome:
    """Puts on record, once, for whom a job waits that could be formed anew."""
    out, state = Outcome(), job.state
    here = state.phase is Phase.BREAKING and not job.live.awaited and job.waited(view.now) > SAY_SECONDS
    if not here or desk.state_awaited == state.broken:
        return out
    slots = may_come_back(view, job)
    if slots and not job.anybody_stopped():
        desk.state_awaited = state.broken
        nodes = ", ".join(sorted({state.node(slot) for slot in slots}))
        reason = (
            f"slots {slots} on {nodes} are silent, may live, and nobody else has the training state: the job is not "
            f"formed anew for {view.config.state_wait_seconds:g} s, unless Slurm shows that they ended "
            f"(`scontrol requeue` does)"
        )
        out.record(state, records.StateAwaited(slots=slots, reason=reason))
    return out


def reinstate(job: JobView, agent: AgentView) -> Outcome:
    """An agent that was taken for lost speaks again before the others have gone on: its processes are members again."""
    out, state = Outcome(), job.state
    back = []
    for slot in agent.slots:
        status = agent.ranks.get(slot)
        alive = status is not None and status.end is None and status.state not in ("left", "starting")
        if alive and state.phase is Phase.BREAKING and state.lost.get(slot) == job.identity(slot):
            back.append(slot)
    if back:
        reason = f"slots {back} on {agent.node} were taken for lost, and are members again"
        out.record(state, records.Reinstated(slots=back, reason=reason))
    return out
