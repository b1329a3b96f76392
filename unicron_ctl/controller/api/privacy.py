"""Who is told what: owners and admins all of a job; others what squeue would show them, or nothing where Slurm's
PrivateData says so (slurm.conf(5)). The fields that are not for others are marked in `protocol.answer_schema`."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from unicron.ctl.controller.model.asker import Asker
from unicron.ctl.controller.model.job_state import JobState
from unicron.ctl.controller.model.view import View
from unicron.ctl.protocol.answer_schema import ADMIN, OWNER, Job, Node, redacted


def hidden(view: View, job: JobState, asker: Asker) -> bool:
    """The asker is not even told that there is such a job."""
    return not asker.may_order(job) and "jobs" in view.slurm.private


def visible(view: View, asker: Asker) -> list[JobState]:
    """The jobs of which the asker may know, the ended ones last."""
    listed = sorted(view.state.jobs.items(), key=lambda item: (bool(item[1].ended), item[0]))
    return [job for _, job in listed if not hidden(view, job, asker)]


def of_job(view: View, job: JobState, answer: Job, asker: Asker) -> Job:
    """A job as far as it is for the asker; for others with its name in Slurm."""
    if asker.may_order(job):
        return answer
    listing = view.slurm.seen
    shown = next(iter(listing.of(job.job).values()), None) if listing else None
    ended = redacted(answer.ended, OWNER) if answer.ended else None
    return replace(redacted(answer, OWNER), ended=ended, name=shown.name if shown is not None else answer.name)


def own_jobs(view: View, asker: Asker) -> set[str]:
    """The ids of the jobs of which the asker is told all."""
    return {name for name, job in view.state.jobs.items() if asker.may_order(job)}


def of_node(view: View, answer: Node, asker: Asker, mine: Collection[str]) -> Node:
    """A node as far as it is for the asker, who has the jobs `mine`."""
    if asker.admin:
        return answer
    waiting = {user: how for user, how in answer.spare_of.items() if user.partition("_")[0] in mine}
    private = "jobs" in view.slurm.private
    users = [user for user in answer.used_by if user.partition("_")[0] in mine] if private else answer.used_by
    return replace(redacted(answer, ADMIN), spare_of=waiting, used_by=users)


def sees_nodes(view: View, asker: Asker) -> bool:
    """Whether sinfo would show this asker any node."""
    return asker.admin or "nodes" not in view.slurm.private
