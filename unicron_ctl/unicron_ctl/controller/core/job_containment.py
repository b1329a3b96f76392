"""Containment: a job whose handling fails, or that writes too much, is set aside; the others are not affected."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable

from unicron_ctl.controller.model.quotas import OF_A_JOB, OF_AN_OWNER, LogQuota
from unicron_ctl.controller.model.view import View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.log.thinning import KEPT_FIRST, KEPT_LAST

log = logging.getLogger("unicron.controller")
STEPS_KEPT = KEPT_FIRST + KEPT_LAST  # of one run
COMPLAIN_AGAIN, COMPLAINTS_KEPT = 60.0, 1000  # seconds; kinds


class JobContainment:
    """Sets jobs aside; one per core."""

    def __init__(self, view: View, append: Callable[[str, int, Record], Event], written: LogQuota) -> None:
        self._view, self._append = view, append
        self._written = written  # the log quotas of jobs and their owners
        self._complained: dict[str, float] = {}
        self._steps: Counter[str] = Counter()  # by job, since its last other record

    def charge(self, event: Event, size: int) -> None:
        """Charges an event of `size` bytes to the log quotas of its job and the job's owner. Steps that thinning drops
        are free."""
        name = event.job or getattr(event.record, "of_job", "")
        job = self._view.state.jobs.get(name)
        if job is None:
            return
        if isinstance(event.record, records.Step):
            self._steps[name] += 1
            if self._steps[name] > STEPS_KEPT:
                return
        elif event.job:
            self._steps.pop(name, None)
        self._written.charge(name, job.owner, size, len(job.agents))

    def attempt(self, job: str, what: str, work: Callable[..., object], *args: object) -> None:
        """Does the work. An error sets the job aside, or is logged if it belongs to no job."""
        try:
            work(*args)
        except Exception as error:
            self.set_aside(job, what, error)

    def set_aside(self, name: str, what: str, error: Exception) -> None:
        """Sets the job aside after an error in the handling of `what`; for an unknown job the error is only logged."""
        where = "".join(traceback.format_exception(error))[-2000:]
        job = self._view.state.jobs.get(name)
        if job is None:
            self._complain(what, error, where)
            return
        if job.set_aside:
            return
        log.error("job %s is set aside after an error in the handling of %s: %r\n%s", name, what[:200], error, where)
        reason = (
            f"the controller cannot handle this job ({type(error).__name__}: {str(error)[:200]}) and leaves it alone; "
            "its ranks train on. Please report it with this record"
        )
        self._append(name, job.generation, records.JobSetAside(input=what[:2000], where=where, reason=reason))
        self._view.job(job).forget_changes()

    def enforce_quota(self, name: str) -> None:
        """Sets a job aside whose agents cause endless records, which would fill the disk."""
        job = self._view.state.jobs.get(name)
        if job is None or job.over or self._written.allows(name, job.owner, self._view.now):
            return
        most = f"{OF_A_JOB[1] / 1e6:g} MB for each of {max(1, len(job.agents))} elements"
        if not self._written.owner_may(job.owner, self._view.now):
            most = f"{OF_AN_OWNER[1] / 1e9:g} GB for all jobs of {job.settings.user}"
        reason = (
            f"what its agents say has made more records than {most}: the controller leaves the job alone; its ranks "
            "train on"
        )
        self._append(name, job.generation, records.JobSetAside(input="more than the log can hold", reason=reason))
        self._view.job(job).forget_changes()

    def _complain(self, what: str, error: Exception, where: str) -> None:
        """Logs an error that belongs to no job, the same one once in a while."""
        key, now = f"{what[:50]} {type(error).__name__}", self._view.now
        if now - self._complained.get(key, -COMPLAIN_AGAIN) < COMPLAIN_AGAIN:
            return
        if len(self._complained) > COMPLAINTS_KEPT:
            self._complained.clear()
        self._complained[key] = now
        log.error("could not handle %s, which is skipped: %r\n%s", what[:200], error, where)
