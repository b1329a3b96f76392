"""Notes of ranks: what they have found by themselves, and dealt with. One that proves a rank's work unsound makes its
node a suspect: the job leaves the node, within its bounds."""

from __future__ import annotations

from msgspec.structs import replace

from unicron_ctl.controller.judge.remedies import escalate, failure_of, with_remedy
from unicron_ctl.controller.model.finding import Finding
from unicron_ctl.controller.model.job_view import ENDED, GONE, JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense.members import is_known
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol.structs import Fault
from unicron_detector.failures.escalation import Decision
from unicron_detector.failures.escalation_table import REATTEMPT
from unicron_detector.failures.severity import REPORT, Severity, Verdict
from unicron_detector.processes.rank_messages import SILENT_CORRUPTION, UNSOUND_MICRO_BATCH, UNSOUND_RANK


def record_note(view: View, job: JobView, finding: Finding) -> Outcome:
    """Record what ranks have noted, with its remedy."""
    note = finding.fault
    assert note is not None
    if is_known(job.state, note):
        return Outcome()
    if note.type in (UNSOUND_RANK, SILENT_CORRUPTION):
        return _unsound_rank(view, job, finding, note)
    if note.type == UNSOUND_MICRO_BATCH:
        verdict = view.classifier.cause("bad_micro_batch", note.text)
        decision = Decision(verdict.severity, REPORT, note.text, verdict.cause)
        nobody = replace(finding, element=-1, node="")
        return _record_only(job, "data", [], nobody, verdict, decision, "no node is blamed")
    verdict = view.classifier.text(f"{note.type}: {note.text}")
    decision = Decision(verdict.severity, REATTEMPT, note.text, verdict.cause)
    slots = list(finding.slots)
    return _record_only(job, "transfer", slots, finding, verdict, decision, "nothing was trained with it")


def _record_only(
    job: JobView, kind: str, slots: list[int], finding: Finding, verdict: Verdict, decision: Decision, action: str
) -> Outcome:
    """Record a note after which nothing has to be done."""
    out, note = Outcome(), finding.fault
    assert note is not None
    told = {"noted": note.at, "noted_by": finding.slots[0]}
    out.record(job.state, failure_of(job, kind, slots, finding, verdict, decision, member=False, **told))
    out.record(job.state, records.FailureAction(failure=records.THIS_FAILURE, text=action))
    return out


def _unsound_rank(view: View, job: JobView, finding: Finding, note: Fault) -> Outcome:
    """Leave out the rank that others have proved wrong, and its node. Its own job's ranks say so, so it is a suspect
    and no more; a pair test decides whether it comes back."""
    state, culprit = job.state, note.culprit
    verdict = view.classifier.cause("silent_corruption", note.text)
    slots = [] if culprit is None else [culprit]
    node, element = ("", -1) if culprit is None else (state.node(culprit), state.element(culprit))
    told_by = replace(finding, element=element, node=node)
    identity = job.identity(culprit) if culprit is not None else None
    stays = _why_it_stays(job, culprit)
    if stays or culprit is None or identity is None:
        decision = Decision(Severity.SEV1, REPORT, f"{note.text}; {stays}", verdict.cause)
        return _record_only(job, "corruption", slots, told_by, verdict, decision, "no node is left")
    decision, memory = escalate(view, job, culprit, verdict, None)
    why = "is suspected of silent corruption"
    record = failure_of(
        job,
        "corruption",
        slots,
        told_by,
        verdict,
        decision,
        escalation=memory,
        leave_out={culprit: why},
        noted=note.at,
        noted_by=finding.slots[0],
    )
    return with_remedy(view, job, record, decision, why, identity.incarnation + 1)


def _why_it_stays(job: JobView, culprit: int | None) -> str:
    """Return why nothing can be done about the rank; empty if others can go on without it. The job may form anew, so
    they need not be members."""
    if culprit is None:
        return "which rank is wrong is not known"
    living = {slot for _, slot, status in job.all_ranks() if status.state not in (*ENDED, *GONE)}
    if culprit not in living:
        return f"slot {culprit} trains no more"
    if len(living) - 1 < job.state.replica:
        return f"there is no replica without slot {culprit}"
    return ""
