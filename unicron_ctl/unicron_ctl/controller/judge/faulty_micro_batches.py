"""Micro-batches that fail wherever they are computed: the data or the script is at fault, not a rank.

A micro-batch that kills its rank is dealt to another one. If that one dies of it, too, all others would follow. So the
job ends, and the failure names the iteration and the micro-batch.
"""

from __future__ import annotations

from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.shared.protocol.structs import Fault
from unicron_detector.failures.escalation import Decision
from unicron_detector.failures.escalation_table import END_JOB, Event, State
from unicron_detector.failures.severity import Severity, Verdict
from unicron_detector.processes.rank_messages import LASTING_CORRUPTION

MOST_TRIES = 3  # on the same rank, if there is no other
ITS_OWN = ("application", "unknown")  # scopes that the data may be responsible for, unlike a network or a device


def of_fault(fault: Fault | None) -> tuple[int, int] | None:
    """Return the iteration and the index of the micro-batch in which a fault came; None if it names none."""
    if fault is None or fault.iteration is None or fault.micro_batch is None:
        return None
    return fault.iteration, fault.micro_batch


def failed_again(job: JobState, slot: int, fault: Fault | None, verdict: Verdict) -> Decision | None:
    """Return the decision to end the job if the micro-batch failed before in the same way: in an earlier generation on
    another rank, or on this one MOST_TRIES times."""
    at = of_fault(fault)
    if at is None or verdict.scope not in ITS_OWN:
        return None
    before = [
        known
        for known in (failure.record for failure in job.failures)
        if known.micro_batch == at and known.cause == verdict.cause and known.detected_in < job.generation
    ]
    others = [known for known in before if slot not in known.slots]
    tries = len({known.detected_in for known in before}) + 1
    if not others and tries < MOST_TRIES:
        return None
    first = (others or before)[0]
    where = f"slot {first.slots[0]} on {first.node} and on slot {slot}" if others else f"slot {slot}, {tries} times"
    reason = (
        f"{verdict.reason}; micro-batch {at[1]} of iteration {at[0]} failed with {verdict.cause} on {where}: it is the "
        "data's or the script's own failure, and would end one rank after another"
    )
    return Decision(Severity.SEV2, END_JOB, reason, verdict.cause, Event.OWN_BUG, State.ENDED)


def lasts(fault: Fault | None, verdict: Verdict) -> Decision | None:
    """Return the decision to end the job if all ranks end because their state became unsound again and again."""
    if fault is None or fault.type != LASTING_CORRUPTION:
        return None
    return Decision(Severity.SEV2, END_JOB, fault.text, verdict.cause, Event.OWN_BUG, State.ENDED)


def with_micro_batch(reason: str, fault: Fault | None) -> str:
    """Return the reason with the micro-batch in which the fault came."""
    at = of_fault(fault)
    words = f"micro-batch {at[1]} of iteration {at[0]}" if at else ""
    return reason if words in reason else f"{reason}; in {words}"
