"""Cuts the controller's answers down to what the asker may see, by the rules of `protocol.audience`."""

from __future__ import annotations

import os
from collections.abc import Collection

from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.view import View
from unicron_ctl.shared.protocol import audience
from unicron_ctl.shared.protocol.answer_schema import Job, Node, Sharing


def hidden(view: View, job: JobState, asker: Asker) -> bool:
    """Whether the asker must not learn that the job exists."""
    return not asker.may_read(job) and audience.JOBS in view.slurm.private


def visible(view: View, asker: Asker) -> list[JobState]:
    """Return the jobs that the asker may know, the ended ones last."""
    listed = sorted(view.state.jobs.items(), key=lambda item: (bool(item[1].ended), item[0]))
    return [job for _, job in listed if not hidden(view, job, asker)]


def of_job(view: View, job: JobState, answer: Job, asker: Asker) -> Job:
    """Return the answer about a job as the asker may see it; others see its name in Slurm."""
    if asker.may_read(job):
        return answer
    return audience.job_for_others(answer, listed_name(view, job))


def listed_name(view: View, job: JobState) -> str | None:
    """Return the job's name in Slurm, if Slurm shows the job."""
    listing = view.slurm.seen
    shown = next(iter(listing.of(job.job).values()), None) if listing else None
    return shown.name if shown is not None else None


def of_node(view: View, answer: Node, asker: Asker, mine: Collection[str]) -> Node:
    """Return the answer about a node as the asker may see it. mine: the jobs that the asker may read."""
    if asker.reads_all:
        return answer
    return audience.node_for_users(answer, mine, view.slurm.private)


def sees_nodes(view: View, asker: Asker) -> bool:
    """Whether sinfo would show this asker any node."""
    return asker.reads_all or audience.NODES not in view.slurm.private


def sharing(view: View) -> Sharing:
    """Return the rules by which others see less than admins do."""
    jobs = view.state.jobs.values()
    names = {job.job: listed_name(view, job) for job in jobs}
    return Sharing(
        auth=view.config.auth,
        uid=os.geteuid(),
        admins=list(view.config.admins),
        readers=list(view.config.readers),
        private=sorted(view.slurm.private),
        owners={job.job: job.uid for job in jobs},
        names={job: name for job, name in names.items() if name is not None},
    )
