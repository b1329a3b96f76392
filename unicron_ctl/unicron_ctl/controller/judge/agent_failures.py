"""Failures of agents, nodes and actions, and what Slurm adds to them."""

from __future__ import annotations

from unicron_ctl.controller.failure_detector.leases import PORT_CLOSED
from unicron_ctl.controller.judge import evidence
from unicron_ctl.controller.judge.remedies import escalate, failure_of, inside_of, keeps_node, leave_node, start_rank
from unicron_ctl.controller.model.finding import Finding, What
from unicron_ctl.controller.model.job_state import (
    AGENT_DIED,
    NODE_ENDED,
    WITH_BLOCK,
    AgentRecord,
    Failure,
    JobState,
    Phase,
)
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes import isolation
from unicron_ctl.controller.sense import fencing
from unicron_ctl.controller.sense.members import ended_with_block, given_up, taken_away
from unicron_ctl.controller.sense.slurm_states import describe
from unicron_ctl.shared.log import records
from unicron_ctl.shared.slurm import drains
from unicron_detector.failures import escalation, escalation_table
from unicron_detector.failures.escalation import Decision
from unicron_detector.failures.escalation_table import ISOLATE, MOVE, NOTHING, REATTEMPT, RESTART
from unicron_detector.failures.severity import Severity, Verdict


def node_lost(view: View, job: JobView, finding: Finding) -> Outcome:
    """Record the loss of a node on two kinds of evidence, and take the node out of service."""
    out, state, element = Outcome(hurry=True), job.state, finding.element
    agent = state.agents.get(element)
    if agent is None or agent.agent != finding.agent:
        return out  # replaced meanwhile
    # Also of a node without which the job goes on already: it may not have stopped.
    lives = _may_live_on(view, job, element, finding.dead)
    if _quiet(view, job, agent, element, out):
        return out
    verdict = view.classifier.cause("lost_connection", finding.evidence)
    decision = Decision(Severity.SEV1, ISOLATE, f"{agent.node} is lost ({finding.by}){lives}", verdict.cause)
    out.record(state, _element_failure(job, agent, finding, verdict, decision, f"is gone with its node {agent.node}"))
    reason = "dead" if finding.dead else "silent"
    out.record(state, records.AgentGone(element=element, agent=agent.agent, reason=reason))
    if lives:
        out.note(job.agents, f"{agent.node} is lost{lives}")
    if finding.spare:
        return out
    lost = f"{agent.node} is lost ({finding.by}): {finding.evidence}"
    out.record(state, _node_lost(view, agent.node, element, lost))
    text = drains.drain_reason(drains.LOST_NODE, f"lost heartbeat of {state.label(element)}")
    isolation.take_out(view, state, element, agent.node, records.THIS_FAILURE, text, out)
    if lives:
        isolation.power_off(view, state, element, agent.node, records.THIS_FAILURE, out)
    return out


def _may_live_on(view: View, job: JobView, element: int, dead: bool) -> str:
    """Say how long a new world waits for the element's processes; nothing if they are dead."""
    if not dead:
        return fencing.fell_silent(view, job, element)
    fencing.has_ended(view, job, element)
    return ""


def _node_lost(view: View, node: str, element: int, why: str) -> records.NodeLost:
    info = view.slurm.node(node)
    started = info.slurmd_start if info is not None else None
    return records.NodeLost(node=node, element=element, slurmd_start=started or 0.0, reason=why)


def agent_died(view: View, job: JobView, finding: Finding) -> Outcome:
    """Record the death of an agent and its ranks. Its node answers, or stays under question (:mod:`ending_nodes`)."""
    out, state, element = Outcome(hurry=True), job.state, finding.element
    agent = state.agents.get(element)
    if agent is None or agent.agent != finding.agent:
        return out  # replaced meanwhile
    # Also of a node without which the job goes on already: it may not have stopped.
    lives = _may_live_on(view, job, element, finding.dead or finding.by == PORT_CLOSED)
    if _quiet(view, job, agent, element, out, ended_with_block(state, element)):
        return out
    if state.noticed.get(element) == agent.agent:
        _leave_out(state, agent, f"is gone: its agent on {agent.node} was killed", out)
        out.record(state, records.AgentGone(element=element, agent=agent.agent, reason="noticed"))
        return out
    live = view.live.agent(state.job, element)
    task = evidence.task_end(view.classifier, live.task_status if live is not None else None)
    hint = f" (a datagram, which proves nothing, says of its task: {task.reason})" if task else ""
    verdict = view.classifier.cause("exited_abnormally", finding.evidence)
    node = "its node answers" if finding.answers else "as far as is known: nothing else of its node has answered"
    follows, action = "its element is started again in place", RESTART
    if state.settings.allocation:
        follows, action = "Slurm starts no task of an allocation again, so the job goes on without the node", NOTHING
    reason = f"only the agent on {agent.node} died{hint}, {node}; {follows}{lives}"
    decision = Decision(Severity.SEV2, action, reason, verdict.cause)
    out.record(
        state, _element_failure(job, agent, finding, verdict, decision, f"is gone: its agent on {agent.node} died")
    )
    out.record(state, records.AgentGone(element=element, agent=agent.agent, reason=AGENT_DIED))
    if lives:
        out.note(job.agents, f"the agent on {agent.node} is lost{lives}")
    return out


def node_ended(view: View, job: JobView, finding: Finding) -> Outcome:
    """Record that the node of an agent that died or left has ended, too. The agent's failure is on record, and its
    ranks are left out already."""
    out, state, element = Outcome(hurry=True), job.state, finding.element
    agent = state.agents.get(element)
    if agent is None or not agent.ended_early or agent.node != finding.node:
        return out
    if view.suspicions.doubt or view.suspicions.unsure:
        return out  # its node is still questioned, so this finding returns if the node did end
    lost = f"{agent.node} is lost ({finding.by}): {finding.evidence}"
    gone = NODE_ENDED if agent.gone == AGENT_DIED else "dead"  # one that left by itself has said that its ranks ended
    out.record(state, records.AgentGone(element=element, agent=agent.agent, reason=gone))
    out.record(state, _node_lost(view, agent.node, element, lost))
    of_agents = (f for f in reversed(state.failures) if f.record.kind_of_failure == "agent")
    failure = next((f for f in of_agents if (f.record.element, f.record.node) == (element, agent.node)), None)
    if failure is not None:
        verdict = view.classifier.cause("lost_connection", finding.evidence)
        amended = records.FailureVerdict(
            failure=failure.id,
            cause=verdict.cause,
            severity=int(Severity.SEV1),
            action=ISOLATE,
            reason=f"{failure.record.reason}; then {lost}",
        )
        out.record(state, amended)
    why = f"its slurmd was not reached after the agent of {state.label(element)} ended"
    text = drains.drain_reason(drains.LOST_NODE, why)
    isolation.take_out(view, state, element, agent.node, failure.id if failure is not None else 0, text, out)
    return out


def member_missed(view: View, job: JobView, finding: Finding) -> Outcome:
    """Record a member without which the others went on: nobody can tell any more how it ended."""
    out, state = Outcome(), job.state
    verdict = view.classifier.cause("exited_abnormally", finding.evidence)
    decision = Decision(Severity.SEV2, RESTART, "what becomes of its element is Slurm's to say", verdict.cause)
    reason = f"{decision.reason}: {finding.evidence}"
    out.record(state, failure_of(job, "agent", list(finding.slots), finding, verdict, decision, reason=reason))
    return out


def _quiet(view: View, job: JobView, agent: AgentRecord, element: int, out: Outcome, with_block: bool = False) -> str:
    """Record that the agent is gone if its end is no failure, and return why. with_block: Slurm ended its block."""
    state = job.state
    quiet = "taken away" if taken_away(state, element) else "put aside" if given_up(view, state, agent) else ""
    quiet = quiet or (WITH_BLOCK if with_block else "")
    if not quiet and state.phase is not Phase.BREAKING and all(job.finished(slot) for slot in agent.slots):
        quiet = "finished"
    if quiet:
        out.record(state, records.AgentGone(element=element, agent=agent.agent, reason=quiet))
    return quiet


def _element_failure(
    job: JobView, agent: AgentRecord, finding: Finding, verdict: Verdict, decision: Decision, why: str
) -> records.FailureDetected:
    state = job.state
    inside = inside_of(state, agent.slots)
    kind = "node" if finding.what is What.NODE_LOST else "agent"
    breaking = state.phase is Phase.BREAKING
    lost = {slot: why for slot in inside if breaking or not job.finished(slot)}
    reason = f"{decision.reason}: {finding.evidence}"
    return failure_of(job, kind, inside or agent.slots, finding, verdict, decision, leave_out=lost, reason=reason)


def node_parted(view: View, job: JobView, finding: Finding) -> Outcome:
    """Leave out one of several nodes that do not reach each other. Only this job is concerned; no node is blamed."""
    out, state = Outcome(), job.state
    if finding.element in state.parted:
        return out
    verdict = view.classifier.cause("other_network_error", finding.evidence)
    decision = Decision(Severity.SEV3, REATTEMPT, finding.evidence, verdict.cause)
    slots = inside_of(state, finding.slots)
    why = f"is on {finding.node}, which not all others reach"
    lost = dict.fromkeys(slots, why)
    record = failure_of(job, "network", slots or list(finding.slots), finding, verdict, decision, leave_out=lost)
    out.record(state, record)
    out.record(state, records.ElementCutOff(element=finding.element, reason=finding.evidence))
    return out


def _leave_out(state: JobState, agent: AgentRecord, why: str, out: Outcome) -> None:
    """Leave out the ranks of an element whose end was requested, which is no failure."""
    if lost := dict.fromkeys(inside_of(state, agent.slots), why):
        out.record(state, records.LeaveOut(failure=0, slots=lost))


def agent_left(view: View, job: JobView, finding: Finding) -> Outcome:
    """Record that an agent ended by itself, because its ranks finished or Slurm stopped it."""
    out, state = Outcome(hurry=True), job.state
    agent, live = state.agents[finding.element], job.agents.get(finding.element)
    finished = all(job.finished(slot) for slot in agent.slots)
    with_block = ended_with_block(state, finding.element)
    wanted = with_block or taken_away(state, finding.element) or given_up(view, state, agent)
    if not finished and live is not None and live.status.noticed:
        _leave_out(state, agent, f"is gone: its agent on {agent.node} {finding.evidence}", out)
    elif not finished and not wanted:
        said = f"the agent on {agent.node} ended: {finding.evidence}"
        verdict = view.classifier.cause("killed_from_outside", said)
        reason = f"{verdict.reason}; what becomes of its element is Slurm's to say"
        decision = Decision(Severity.SEV2, "wait", reason, verdict.cause)
        inside = inside_of(state, agent.slots)
        why = f"is gone: its agent on {agent.node} ended ({finding.evidence})"
        gone = {slot: why for slot in inside if not job.finished(slot)}
        out.record(state, failure_of(job, "agent", inside or agent.slots, finding, verdict, decision, leave_out=gone))
    reason = "finished" if finished else WITH_BLOCK if with_block else finding.evidence
    out.record(state, records.AgentGone(element=finding.element, agent=agent.agent, reason=reason))
    return out


def node_unfit(view: View, job: JobView, finding: Finding) -> Outcome:
    """Take the job off a node whose log, as the job's agent reports, calls it unfit for work."""
    out, state = Outcome(), job.state
    agent = job.agents.get(finding.element)
    seen = view.state.node(finding.node).event(finding.seen)
    if agent is None or seen is None:
        return out
    event = seen.said
    verdict = Verdict(event.cause, Severity.SEV1, ISOLATE, finding.evidence, event.rule, event.scope)
    earlier = _just_died(state, finding.node, seen.time)
    if earlier is not None:  # one fault is judged once
        reason = f'{earlier.record.reason}; {finding.node} said: "{event.text}"'
        amended = records.FailureVerdict(
            failure=earlier.id, cause=event.cause, severity=int(Severity.SEV1), action=ISOLATE, reason=reason
        )
        out.record(state, amended)
    slots = [slot for slot in finding.slots if earlier is None or slot not in earlier.record.slots]
    if earlier is not None and not slots:
        isolation.leave_node(view, state, agent, earlier.id, earlier.record.slots, finding.evidence, True, out)
        return out
    inside, slots = slots, slots or list(agent.slots)
    decision, memory = escalate(view, job, slots[0], verdict, None)
    leaving = Outcome()
    leaves = isolation.leave_node(view, state, agent, records.THIS_FAILURE, slots, finding.evidence, True, leaving)
    # If it must not leave, the log says why, and its ranks go on as long as they can.
    lost = {s: f"is on a node that the job leaves: {event.cause}" for s in inside} if leaves else {}
    out.record(state, failure_of(job, "node", slots, finding, verdict, decision, escalation=memory, leave_out=lost))
    return out.merge([leaving])


def _just_died(job: JobState, node: str, at: float) -> Failure | None:
    """Return the failure of a rank that has just died of what its node reports now."""
    for failure in reversed(job.failures):
        recent, record = abs(failure.detected_at - at) <= evidence.AFTER_SECONDS, failure.record
        if record.node == node and record.kind_of_failure == "rank" and record.action != ISOLATE and recent:
            return failure
    return None


def action_failed(view: View, job: JobView, finding: Finding) -> Outcome:
    """Take the next severity after an action that exceeded its time limit."""
    state, slot, out = job.state, finding.slots[0], Outcome(hurry=True)
    faults = view.state.history.of_slot(state.job, slot)
    if finding.action == RESTART and finding.element >= 0:  # an element that Slurm was to start again
        reason = f"restart of element {finding.element} on {finding.node} failed ({finding.evidence}): {MOVE}"
        after = escalation_table.State.ISOLATING
        decision = Decision(Severity.SEV2, MOVE, reason, "action_failed", state=after)
        cause = "exited_abnormally"
    else:
        history, stays = view.state.history, keeps_node(view, state, slot)
        decision = escalation.action_failed(
            history, view.now, state.job, slot, finding.evidence, moved=finding.moved, stays=stays
        )
        cause = faults[-1].cause if faults else "other_software_error"
    agent = job.agent(slot)
    here = agent is not None and agent.alive
    trains = here and slot in state.members and slot not in state.lost and state.phase is not Phase.FORMING
    verdict = view.classifier.cause(cause, decision.reason)
    lost = {slot: decision.reason} if trains else {}
    record = failure_of(job, "action", [slot], finding, verdict, decision, leave_out=lost)
    out.record(state, record)
    failed = records.ActionFailed(
        slot=slot,
        node=state.node(slot),
        failed=finding.action,
        action=decision.action,
        severity=int(decision.severity),
        state=decision.state.value,
        failure=records.THIS_FAILURE,
        reason=decision.reason,
    )
    out.record(state, failed)
    moves = leave_node(view, job, decision, record, out)
    if not moves and here and agent is not None:
        status = agent.ranks.get(slot)
        incarnation = status.incarnation + 1 if status else 0
        start_rank(state, slot, incarnation, view.now, decision.reason[:200], out, records.THIS_FAILURE)
    return out


def slurm_said(view: View, job: JobView, finding: Finding) -> Outcome:
    """Add to a failure Slurm's state of its element, or of its node if the finding names one."""
    out, failure, state = Outcome(), job.state.failure(finding.seen), finding.evidence
    element = view.slurm.seen.of(finding.job).get(finding.element) if view.slurm.seen is not None else None
    node = view.slurm.node(finding.node)
    if failure is None or element is None:
        return out
    if node is None:
        verdict, words = evidence.element_end(view.classifier, element), describe(element)
    else:
        verdict = view.classifier.slurm(state)
        words = f"Slurm: {node.name} is {state} ({node.reason or 'no reason'})"
    if verdict is None:
        return out
    counts = verdict.scope != "none"
    record = records.FailureVerdict(
        failure=failure.id,
        cause=verdict.cause if counts else None,
        severity=int(verdict.severity) if counts else None,
        slurm=state,
        reason=f"{failure.record.reason}; {words}: {verdict.reason}",
    )
    out.record(job.state, record)
    return out
