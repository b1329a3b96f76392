"""The weekly report: to admins of all jobs and nodes, to others of their own jobs."""

from __future__ import annotations

from msgspec.structs import replace

from unicron_ctl.controller.api.observed_savings import observed_lines
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.log.week import KINDS, week
from unicron_ctl.shared.protocol.answer_schema import Report
from unicron_ctl.shared.protocol.questions import ReportQuestion
from unicron_ctl.shared.settings.config import ControllerConfig


def report(core: Core, store: Store, question: ReportQuestion, asker: Asker) -> Report:
    """Failures by cause, what they cost and what healing saved, in the last `seconds`."""
    since = core.now - question.seconds
    own = None if asker.reads_all else {job.job for job in core.state.jobs.values() if asker.owns(job)}
    found = store.since(KINDS, since, jobs=own)
    told = week(found.events, since, core.now, spared_seconds(core.config))
    if asker.reads_all:
        told = replace(told, observed=observed_lines(core, store))
    else:
        told = replace(told, nodes=[])
    return replace(told, cut_at=found.cut[1] if found.cut else None)


def spared_seconds(config: ControllerConfig) -> float:
    """What a failure costs a job that is requeued and begins from its last checkpoint: half the time between two of
    them, and the start of the processes."""
    return config.checkpoint_seconds / 2.0 + config.replacement_seconds
