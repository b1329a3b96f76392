"""Failures of ranks: processes that ended, members that do not do their part, collectives that never end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from msgspec.structs import replace

from unicron_ctl.controller.judge import evidence, faulty_micro_batches
from unicron_ctl.controller.judge.remedies import (
    escalate,
    failure_of,
    inside_of,
    leave_node,
    start_rank,
    start_ranks,
    with_remedy,
)
from unicron_ctl.controller.model.finding import Finding, What
from unicron_ctl.controller.model.job_state import Identity, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes import isolation
from unicron_ctl.controller.sense.members import apart, taken_away
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol.structs import Exit, Fault
from unicron_detector.failures.escalation import Decision
from unicron_detector.failures.escalation_table import END_JOB, ISOLATE, MOVE, REATTEMPT, RESTART
from unicron_detector.failures.fault_history import WHOLE_JOB
from unicron_detector.failures.severity import REPORT, Severity, Verdict
from unicron_detector.words import plural

NETWORK_ERROR = "other_network_error"


# ---------------------------------------------------------------- processes that ended
def wanted_end(view: View, job: JobView, finding: Finding) -> Outcome:
    out, identity, end = Outcome(), finding.identity, finding.exit
    assert identity is not None and end is not None
    first, *others = finding.slots
    out.record(job.state, records.ExitNoted(first, identity.agent, identity.incarnation, end.code, others))
    agent, inside = job.agents.get(finding.element), inside_of(job.state, finding.slots)
    if (end.code or (agent is not None and agent.status.noticed)) and inside:
        out.record(job.state, records.LeaveOut(failure=0, slots=dict.fromkeys(inside, _end_words(end, finding))))
    return out


def _end_words(end: Exit, finding: Finding) -> str:
    if finding.by == "exception" and finding.fault is not None:
        return f"ends by an exception: {finding.fault.type}"
    return f"exited with {end.code}"


def rank_exited(view: View, job: JobView, finding: Finding) -> Outcome:
    """Judge processes of one node that ended alike. They are one failure if the decision about each is the same."""
    state, identity, end = job.state, finding.identity, finding.exit
    assert identity is not None and end is not None
    if len(finding.slots) > 1 and (node := view.state.nodes.get(finding.node)) is not None and node.events:
        return Outcome(findings=apart(job, finding))  # what the node said may name one of them
    own = view.classifier.exit(end.code, finding.evidence, end.oom)
    verdict = evidence.with_node(view, state, finding.node, end.code, end.at, finding.pid, own)
    own_words = (verdict.cause, verdict.rule) == (own.cause, own.rule)
    verdict = _own_word(state, verdict, end)
    with_peers = _died_with_peers(view, state, verdict, end)
    if with_peers is not None and state.noticed:  # SIGTERM has ended the peer, which is no failure
        out = wanted_end(view, job, finding)
        start_ranks(state, finding.slots, identity.incarnation + 1, view.now, "a peer was to end", out)
        return out
    if with_peers is not None:
        return _exit_failure(view, job, finding, verdict, list(finding.slots), with_peers, None)
    found = _decisions_on_exit(view, job, finding, verdict, own_words)
    return Outcome().merge(_exit_failure(view, job, finding, verdict, *each) for each in found)


_Judgement = tuple[list[int], Decision, records.EscalationFacts | None]


def _decisions_on_exit(
    view: View, job: JobView, finding: Finding, verdict: Verdict, own_words: bool
) -> Iterable[_Judgement]:
    """Return the decisions about the ended processes, each with its slots. Faults of one node at one moment do not
    change the decision about each other (`escalation.decide`), so that slots without a past have one decision."""
    state, end, history = job.state, finding.exit, view.state.history
    assert end is not None
    found: dict[tuple[Decision, bool], _Judgement] = {}
    new: dict[tuple[bool, bool], _Judgement] = {}
    trains = state.phase is not Phase.FORMING and state.mode.joins and bool(state.members)
    for slot in finding.slots:
        again = faulty_micro_batches.lasts(finding.fault, verdict)
        again = again or faulty_micro_batches.failed_again(state, slot, finding.fault, verdict)
        if again is not None:
            found.setdefault((again, False), ([], again, None))[0].append(slot)
            continue
        outside = trains and slot not in state.members  # the job trains without the slot, which may join again
        like = outside, state.worked.get(slot) == finding.identity
        if like in new and not history.knows(state.job, slot):
            new[like][0].append(slot)
            continue
        decision, memory = escalate(view, job, slot, verdict, end.lived, outside, own_words)
        decided = found.setdefault((decision, memory.worked), ([], decision, memory))
        decided[0].append(slot)
        if not history.knows(state.job, slot):
            new[like] = decided
    return found.values()


def _exit_failure(
    view: View,
    job: JobView,
    finding: Finding,
    verdict: Verdict,
    slots: list[int],
    decision: Decision,
    memory: records.EscalationFacts | None,
) -> Outcome:
    """Record the failure of processes that ended alike, and its remedy."""
    state, identity, end = job.state, finding.identity, finding.exit
    assert identity is not None and end is not None
    text = f"{finding.fault.type}: {finding.fault.text}" if finding.fault else ""
    record = failure_of(
        job,
        "rank",
        slots,
        finding,
        verdict,
        decision,
        exit_code=end.code,
        pid=finding.pid,
        last_line=end.last_line or text,
        lived=end.lived,
        fault_at=finding.fault.at if finding.fault else None,
        escalation=memory if memory is None else replace(memory, slot=slots[0], others=slots[1:]),
        exits=[
            records.SeenExit(slot=slot, agent=identity.agent, incarnation=identity.incarnation, pid=_pid(job, slot))
            for slot in slots
        ],
        leave_out=dict.fromkeys(inside_of(state, slots), _end_words(end, finding)),
    )
    how = f"exited with {end.code}" if finding.by == "process exit" else "ends by an exception"
    why = f"{how}: {verdict.cause}"
    return with_remedy(view, job, record, decision, why, identity.incarnation + 1)


def _pid(job: JobView, slot: int) -> int:
    status = job.status(slot)
    return status.pid if status is not None else 0


def _own_word(job: JobState, verdict: Verdict, end: Exit) -> Verdict:
    """In restart mode, blame the plain program for an exit status that no rule knows."""
    if not job.mode.reports and verdict.scope == "unknown" and 0 < end.code < 128:
        return dataclasses.replace(verdict, scope="application")
    return verdict


def _died_with_peers(view: View, job: JobState, verdict: Verdict, end: Exit) -> Decision | None:
    """Return the decision about a process that ended in restart mode because a peer did; None for any other.

    A plain program dies when a peer dies, by an error of the network or, unless it had just started, while the world is
    breaking. Neither may cost a healthy node its place.
    """
    if job.mode.reports:
        return None
    late = job.phase is Phase.BREAKING and bool(job.lost) and end.lived > view.state.history.policy.quick_seconds
    if verdict.scope != "network" and not late:
        return None
    reason = f"{verdict.reason}; programs that lose a peer end so, and nobody is blamed for it"
    return Decision(Severity.SEV3, REATTEMPT, reason, verdict.cause)


# ---------------------------------------------------------------- members that do not do their part
def leave_out_member(view: View, job: JobView, finding: Finding) -> Outcome:
    """Go on without a member that was replaced, is late, or gave an unusable report."""
    state, slot = job.state, finding.slots[0]
    why = {slot: finding.evidence}
    out = Outcome()
    if _on_record(state, slot):
        out.record(state, records.LeaveOut(failure=0, slots=why))
        return out
    if finding.fault is not None and finding.what is What.BROKEN:
        verdict, kind = view.classifier.text(f"{finding.fault.type}: {finding.fault.text}"), "exception"
        by = kind
    else:
        verdict, by = view.classifier.cause("task_hang", finding.evidence), finding.by
        status = job.status(slot)
        kind = "hang" if status is not None and status.state != "exited" else "rank"
    decision, memory = _decide(view, job, slot, finding.fault, verdict)
    record = failure_of(job, kind, [slot], replace(finding, by=by), verdict, decision, escalation=memory, leave_out=why)
    out.record(state, record)
    if decision.action == END_JOB:
        return out
    _leave_out(view, job, decision, record, finding.evidence, out)
    return out


def _on_record(job: JobState, slot: int) -> bool:
    """Whether a failure that has not been dealt with names the slot."""
    return any(slot in f.record.slots and f.record.member and f.planned_at is None for f in job.failures)


def rank_broken(view: View, job: JobView, finding: Finding) -> Outcome:
    """Leave out a survivor at rest whose own fault, by a rule of the table, needs a new process or node. An unknown
    text may be what the peers of a dead rank say, so it is tried again."""
    verdict = evidence.known_fault(view.classifier, finding.fault) if finding.fault is not None else None
    needs_restart = verdict is not None and verdict.action in (RESTART, ISOLATE)
    return leave_out_member(view, job, finding) if needs_restart else Outcome()


def ranks_stopped(view: View, job: JobView, finding: Finding) -> Outcome:
    """Judge the first of the members that stopped by themselves: it is tried again in place, unless a known fault rules
    that out. The others are judged after it."""
    if reason := _same_time_out(view, job, finding):
        return collective(view, job, replace(finding, evidence=reason, slots=tuple(sorted(job.state.members))))
    out, state, slot = Outcome(), job.state, finding.slots[0]
    status = job.status(slot)
    fault = status.fault if status else None
    words = f"stopped: {fault.type}: {fault.text}" if fault else finding.evidence
    verdict = evidence.with_links(view, state, state.node(slot), _stop_verdict(view, fault, words))
    decision, memory = _decide(view, job, slot, fault, verdict)
    gone = decision.action not in (REATTEMPT, REPORT)
    record = failure_of(
        job,
        "exception" if fault else "hang",
        [slot],
        replace(finding, element=state.element(slot), node=state.node(slot), fault=fault),
        verdict,
        decision,
        escalation=memory,
        iteration=status.iteration if status else None,
        leave_out={slot: words} if gone else {},
        regroup="" if gone else f"slot {slot} {words}",
    )
    out.record(state, record)
    if decision.action == END_JOB:
        return out
    agent = job.agent(slot)
    if gone and agent is not None and agent.alive:
        _leave_out(view, job, decision, record, words, out)
    if finding.slots[1:]:
        out.findings.append(replace(finding, slots=finding.slots[1:]))
    return out


def _stop_verdict(view: View, fault: Fault | None, words: str) -> Verdict:
    """Return the verdict on a rank that stopped by itself: an error that no rule knows counts as the network's."""
    if fault is None:
        return view.classifier.cause(NETWORK_ERROR, words)
    verdict, note = view.classifier.judge(f"{fault.type}: {fault.text}")
    unknown = f"stopped in a collective by an error{'; ' + note if note else ' that no rule knows'}"
    return verdict or view.classifier.cause(NETWORK_ERROR, f"{unknown}; tried again in place")


def _decide(
    view: View, job: JobView, slot: int, fault: Fault | None, verdict: Verdict
) -> tuple[Decision, records.EscalationFacts | None]:
    """Return the decision about a verdict: that of a micro-batch that failed before, or the escalation's."""
    again = faulty_micro_batches.failed_again(job.state, slot, fault, verdict)
    return (again, None) if again is not None else escalate(view, job, slot, verdict, None)


def _leave_out(
    view: View, job: JobView, decision: Decision, record: records.FailureDetected, why: str, out: Outcome
) -> None:
    """Record that the failure's slot is left out, and take the job off its node if that is decided."""
    agent = job.agents.get(record.element)
    if agent is not None and agent.alive:
        leave_node(view, job, decision, record, out)
    text = f"slot {record.slots[0]} is left out: {why}"
    out.record(job.state, records.FailureAction(failure=records.THIS_FAILURE, text=text))


def _same_time_out(view: View, job: JobView, finding: Finding) -> str:
    """Return a reason if ranks of several nodes have stopped and all name just a collective that took too long."""
    if len(job.state.elements(finding.slots)) < 2:
        return ""
    for slot in finding.slots:
        status = job.status(slot)
        verdict = evidence.known_fault(view.classifier, status.fault) if status and status.fault else None
        if verdict is None or verdict.cause != "nccl_timeout":
            return ""
    return f"{plural(len(finding.slots), 'rank')} stopped because a collective took too long, and none of them says why"


def hang(view: View, job: JobView, finding: Finding) -> Outcome:
    """Record at once that others wait for this rank; stop it when its stacks are known (`finding.seen`)."""
    slot, out = finding.slots[0], Outcome()
    if not finding.seen:
        verdict = view.classifier.cause("task_hang", finding.evidence)
        decision, memory = escalate(view, job, slot, verdict, None)
        out.record(job.state, failure_of(job, "hang", [slot], finding, verdict, decision, escalation=memory))
        return out
    failure = job.state.failure(finding.seen)
    identity = finding.identity
    if failure is None or identity is None:
        return out
    record = failure.record
    decision = Decision(Severity(record.severity), record.action, finding.evidence, record.cause)
    agent, suspect = job.agent(slot), record.action == ISOLATE
    if (
        agent is None
        or record.action not in (MOVE, ISOLATE)
        or not isolation.leave_node(view, job.state, agent, failure.id, record.slots, decision.reason, suspect, out)
    ):
        start_rank(job.state, slot, identity.incarnation + 1, view.now, "hangs", out, failure.id)
    out.record(job.state, records.LeaveOut(failure=failure.id, slots={slot: "hangs"}, reason=finding.evidence))
    return out


# ---------------------------------------------------------------- collectives that never end
def collective(view: View, job: JobView, finding: Finding) -> Outcome:
    """Judge a collective in which nobody is behind, so that no rank and no node can be named.

    The first time all regroup in place (SEV3). If it hangs again within the window, processes are restarted (SEV2): all
    but those of one node, from which the others get the training state, and the next time all but those of another
    node. So every process is replaced without going back to a checkpoint, and no node is put aside.
    """
    out, state = Outcome(), job.state
    verdict = evidence.with_links(view, state, "", view.classifier.cause("nccl_timeout", finding.evidence))
    decision, memory = escalate(view, job, WHOLE_JOB, verdict, None)
    lost = to_restart(state) if decision.action == RESTART else set()
    record = failure_of(
        job,
        "hang",
        sorted(state.members),
        finding,
        verdict,
        decision,
        escalation=memory,
        leave_out=dict.fromkeys(sorted(lost), "is started again"),
        regroup="" if lost else finding.evidence,
    )
    out.record(state, record)
    for slot in sorted(lost):
        incarnation, at = state.members[slot].incarnation + 1, view.now + decision.wait_seconds
        start_rank(state, slot, incarnation, at, "the same collective hangs again", out, records.THIS_FAILURE)
    return out


def to_restart(job: JobState) -> set[int]:
    """Return all members but those of the node with the newest processes, so that each node has its turn.

    On a job's last node one rank stays, since nobody else has the training state. If several ranks make a replica, one
    whole replica stays.
    """
    if job.replica > 1:
        groups = [one for one in job.groups() if all(slot in job.members for slot in one)] or [list(job.members)]
        newest = {one[0]: min(job.members[slot].incarnation for slot in one) for one in groups}
        stay = min(groups, key=lambda one: (-newest[one[0]], one[0]))
        return set(job.members).difference(stay)
    elements = job.elements(job.members)
    if len(elements) < 2:
        stays = max(job.members, key=lambda slot: (job.members[slot].incarnation, -slot), default=None)
        return {slot for slot in job.members if slot != stays or not job.mode.keeps_state}
    since: dict[int, int] = {}
    for slot, member in job.members.items():
        element = job.element(slot)
        since[element] = min(since.get(element, member.incarnation), member.incarnation)
    kept = min(elements, key=lambda element: (-since[element], element))
    return {slot for slot in job.members if job.element(slot) != kept}


# ---------------------------------------------------------------- processes of old generations
def revive(view: View, job: JobView, slot: int) -> Outcome:
    """Restart a living process that a plan went on without: it holds old state."""
    out, state, agent = Outcome(), job.state, job.agent(slot)
    status = agent.ranks.get(slot) if agent else None
    if agent is None or status is None or not agent.alive:
        return out
    unusable = agent.element in state.leaving or view.unfit(agent.node) or state.moves(agent.element)
    unusable = unusable or (state.swap is not None and state.swap.element == agent.element)
    if unusable or taken_away(state, agent.element):
        return out
    identity = Identity(agent.agent, status.incarnation)
    banished = state.banished.get(slot) == identity
    left_out = status.state == "left" and slot not in state.members and state.phase is Phase.RUNNING
    if (banished and status.state != "finished") or left_out:
        why = "was declared lost" if banished else "was left out before"
        at = max(view.now, state.slot(slot).not_before)
        start_rank(state, slot, status.incarnation + 1, at, why, out)
    return out
