"""Which submission a job id stands for: Slurm may use an id again.

`submitted` (squeue's SubmitTime) tells two jobs apart. Slurm sets it anew when it requeues an element, so only elements
that were never requeued count.
"""

from __future__ import annotations

from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.shared.slurm.slurm_client import ElementInfo

AFTER_END_SECONDS = 30.0  # what Slurm starts again later than this after a job's end is wanted again


def another(job: JobState, info: ElementInfo | None) -> bool:
    """Slurm shows another job under this id than the one that is known; or the same one, wanted again after its end."""
    if job.disowned:
        return True
    if info is None:
        return False
    if job.uid is not None and info.uid != job.uid:
        return True
    if job.submitted and not info.restarts and info.submitted > job.submitted + 1.0:
        return True
    return job.ended is not None and info.submitted > job.ended.time + AFTER_END_SECONDS
