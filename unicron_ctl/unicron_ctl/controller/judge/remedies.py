"""Tools of all judges: the escalation, the record of a failure, and its remedies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unicron_ctl.controller.judge import faulty_micro_batches
from unicron_ctl.controller.model.finding import Finding
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.nodes import isolation
from unicron_ctl.shared.log import records
from unicron_detector.failures import escalation
from unicron_detector.failures.escalation import Circumstances, Decision
from unicron_detector.failures.escalation_table import END_JOB, ISOLATE, MOVE, RESTART
from unicron_detector.failures.fault_history import WHOLE_JOB, Fault
from unicron_detector.failures.severity import Verdict


def escalate(
    view: View,
    job: JobView,
    slot: int,
    verdict: Verdict,
    uptime: float | None,
    apart: bool = False,
    own_words: bool = False,
) -> tuple[Decision, records.EscalationFacts]:
    """Return the decision about a verdict on a slot, and the escalation's memory of it for the log.

    apart: the job trains without the slot. own_words: the verdict is on the process's own words.
    """
    state, identity = job.state, job.identity(slot)
    worked = slot == WHOLE_JOB or (identity is not None and state.worked.get(slot) == identity)
    node = "" if slot == WHOLE_JOB else state.node(slot)
    what = verdict.cause, verdict.scope, verdict.severity
    fault = Fault(view.now, state.job, slot, node, *what, uptime, worked)
    # A plain program may make the same few steps again and again.
    fresh = own_words and not state.steady and (state.iteration < 0 or not state.mode.keeps_state)
    around = Circumstances(max(1, len(state.agents)), apart, fresh, keeps_node(view, state, slot))
    decision = escalation.decide(view.state.history, verdict, fault, around)
    memory = records.EscalationFacts(
        slot=slot,
        node=fault.node,
        scope=fault.scope,
        severity=int(fault.severity),
        uptime=uptime,
        worked=worked,
        event=decision.event.value,
        state=decision.state.value,
    )
    return decision, memory


def keeps_node(view: View, job: JobState, slot: int) -> bool:
    """Whether only a fault of the node moves the slot: Slurm gives an allocation no other node, and runs the batch
    script of a plain job from its start if it requeues it."""
    if slot == WHOLE_JOB:
        return False
    if job.settings.allocation:
        spare = any(element not in job.inside for element in view.live.jobs[job.job].ready)
        return not (spare and job.settings.spares)
    info = view.slurm.seen.of(job.job).get(job.element(slot)) if view.slurm.seen is not None else None
    return info is not None and not info.array


def failure_of(
    job: JobView, kind: str, slots: list[int], finding: Finding, verdict: Verdict, decision: Decision, **more: Any
) -> records.FailureDetected:
    state = job.state
    element = finding.element if finding.element >= 0 or not slots else state.element(slots[0])
    record = state.agents.get(element)
    return records.FailureDetected(
        kind_of_failure=kind,
        slots=slots,
        severity=int(decision.severity),
        cause=verdict.cause,
        action=decision.action,
        detected_by=finding.by,
        source=finding.source.value,
        element=element,
        node=finding.node or (record.node if record else ""),
        member=more.pop("member", any(slot in state.members or slot in state.joining for slot in slots)),
        wait_seconds=decision.wait_seconds,
        reason=faulty_micro_batches.with_micro_batch(more.pop("reason", decision.reason), finding.fault),
        micro_batch=faulty_micro_batches.of_fault(finding.fault),
        detected_in=state.generation,
        iteration=more.pop("iteration", finding.iteration),
        **more,
    )


def inside_of(job: JobState, slots: list[int] | tuple[int, ...]) -> list[int]:
    """Return those of these slots that the job trains with."""
    return [s for s in slots if (s in job.members or s in job.joining) and s not in job.lost]


def with_remedy(
    view: View, job: JobView, record: records.FailureDetected, decision: Decision, why: str, incarnation: int
) -> Outcome:
    """Record the failure and its slots' remedy: none, a move to another node, or new processes in place."""
    out = Outcome()
    out.record(job.state, record)
    if decision.action != END_JOB and not leave_node(view, job, decision, record, out):
        at = view.now + decision.wait_seconds
        start_ranks(job.state, record.slots, incarnation, at, why, out, records.THIS_FAILURE)
    return out


def leave_node(view: View, job: JobView, decision: Decision, record: records.FailureDetected, out: Outcome) -> bool:
    """Take the job off the failure's node if the decision is to move, or if the node is out of service, so that a new
    process could not join. Return False if the job stays."""
    agent = job.agents.get(record.element)
    if agent is None or not (
        decision.action in (MOVE, ISOLATE) or (decision.action == RESTART and view.unfit(agent.node))
    ):
        return False
    suspect = decision.action == ISOLATE
    return isolation.leave_node(
        view, job.state, agent, records.THIS_FAILURE, record.slots, decision.reason, suspect, out
    )


def start_rank(job: JobState, slot: int, incarnation: int, at: float, why: str, out: Outcome, failure: int = 0) -> None:
    """Order a new process in the slot, unless a newer one is ordered already. failure: the one that this remedies, or
    0."""
    start_ranks(job, (slot,), incarnation, at, why, out, failure)


def start_ranks(
    job: JobState, slots: Iterable[int], incarnation: int, at: float, why: str, out: Outcome, failure: int = 0
) -> None:
    """Order new processes in these slots of one node, as :func:`start_rank` does."""
    wanting = [slot for slot in slots if job.slot(slot).wanted < incarnation]
    if wanting:
        first, *others = wanting
        out.record(job, records.RankStart(first, incarnation, at, failure, others, reason=why))
