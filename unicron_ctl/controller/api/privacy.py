"""What whom is told: owners and admins all of a job; others what squeue would show them, or nothing where Slurm's
PrivateData says so (slurm.conf(5)). Pure.

Error texts, stacks, addresses, process ids and the ids of agents are the owner's and the admins'.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from unicron.ctl.controller.model.asker import Asker
from unicron.ctl.controller.model.job_state import JobState
from unicron.ctl.controller.model.view import View

# Of a job, for everybody whom Slurm shows it: what squeue shows, and how far it is.
OPEN_FIELDS = frozenset(
    "job name user mode state since generation nodes min_nodes max_nodes planned_nodes members iteration "
    "train_iterations iteration_seconds weight flops waf failures layout layouts planned_layout replica "
    "replicas".split()
)
# Of a node: what sinfo shows, and what this controller has done to it.
OPEN_NODE_FIELDS = frozenset(
    "node states healthy reason used_by downed_by_unicron lost_at last_heard asked_since".split()
)


def hidden(view: View, job: JobState, asker: Asker) -> bool:
    """The asker is not even told that there is such a job."""
    return not asker.may_order(job) and "jobs" in view.slurm.private


def visible(view: View, asker: Asker) -> list[JobState]:
    """The jobs of which the asker may know, the ended ones last."""
    listed = sorted(view.state.jobs.items(), key=lambda item: (bool(item[1].ended), item[0]))
    return [job for _, job in listed if not hidden(view, job, asker)]


def blanked(fields: dict[str, Any], kept: Collection[str]) -> dict[str, Any]:
    """The same keys; what is not kept is empty."""
    return {name: value if name in kept else _nothing(value) for name, value in fields.items()}


def _nothing(value: Any) -> Any:
    """The empty value of its kind."""
    return type(value)() if isinstance(value, str | list) else None


def of_job(view: View, job: JobState, fields: dict[str, Any], asker: Asker) -> dict[str, Any]:
    """A job's fields as far as they are for the asker; for others with its name in Slurm."""
    if asker.may_order(job):
        return fields
    told = blanked(fields, OPEN_FIELDS)
    if fields["ended"]:
        told["ended"] = fields["ended"] | {"reason": ""}
    listing = view.slurm.seen
    shown = next(iter(listing.of(job.job).values()), None) if listing else None
    return told | {"name": shown.name} if shown is not None else told


def own_jobs(view: View, asker: Asker) -> set[str]:
    """The ids of the jobs of which the asker is told all."""
    return {name for name, job in view.state.jobs.items() if asker.may_order(job)}


def of_node(view: View, fields: dict[str, Any], asker: Asker, mine: Collection[str]) -> dict[str, Any]:
    """A node's fields as far as they are for the asker, who has the jobs `mine`."""
    if asker.admin:
        return fields
    waiting = {user: how for user, how in fields["spare_of"].items() if user.partition("_")[0] in mine}
    told = blanked(fields, OPEN_NODE_FIELDS) | {"metrics": {}, "spare_of": waiting}
    if "jobs" in view.slurm.private:
        told["used_by"] = [user for user in told["used_by"] if user.partition("_")[0] in mine]
    return told


def sees_nodes(view: View, asker: Asker) -> bool:
    """Whether sinfo would show this asker any node."""
    return asker.admin or "nodes" not in view.slurm.private
