"""When a job has got over its failures: it trains again."""

from __future__ import annotations

from unicron_ctl.controller.model.job_state import Failure, JobState
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records


def report_healed(view: View, job: JobView) -> Outcome:
    """Records, once for all failures that one recovery mended, that the job trains again, and what that has cost."""
    out, state = Outcome(), job.state
    mended = {failure.id: at for failure in state.failures if (at := _mended_at(view, state, failure)) is not None}
    if not mended:
        return out
    failures = [failure for failure in state.failures if failure.id in mended]
    first = failures[0]
    seconds = max(0.0, max(mended.values()) - first.detected_at)
    lost = state.lost_seconds - state.lost_before if state.stepped else seconds
    elements = state.inside | set(state.elements(slot for failure in failures for slot in failure.record.slots))
    many = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    where = f" on {first.record.node}" if first.record.node else ""
    healed = records.JobHealed(
        failures=list(mended),
        cause=first.record.cause,
        node=first.record.node,
        seconds=seconds,
        lost_seconds=max(0.0, lost),
        nodes=len(elements),
        reason=f"trains again {seconds:.1f} s after {first.record.cause}{where}{many}; {max(0.0, lost):.1f} s are lost",
    )
    out.record(state, healed)
    count = len([failure for failure in state.failures if failure.healed or failure.id in mended])
    out.note_at_end(
        job.agents,
        f"{count} failure{'s were' if count != 1 else ' was'} healed, {state.lost_seconds:.1f} s lost; the last: "
        f"{first.record.cause}{where}{many}, {seconds:.1f} s; `unicronctl explain {state.job}` has all",
    )
    return out


def _mended_at(view: View, job: JobState, failure: Failure) -> float | None:
    """When the job trained again after the failure; None where that is on record, or has not come about. Of a plain
    program that tells of no iterations only its steady world is known."""
    if failure.healed or failure.resumed_at is None:
        return None
    if failure.stepped_at is not None:
        return failure.stepped_at
    steady = not job.mode.reports and failure.generation is not None and job.steady > failure.generation
    return failure.resumed_at if steady else None
