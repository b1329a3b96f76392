"""The admin's permission for a job, a node and a call of Slurm: the configuration's partitions applied to what Slurm
shows. Pure.

Only requests to Slurm need permission. A job is healed within its own nodes in every mode: its owner wants that, and it
affects no other job and no node. Call :func:`withheld` before any request to Slurm.
"""

from __future__ import annotations

from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.requests import Action
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.settings.partitions import ACT, Rules, strictest


def of_job(view: View, job: str) -> Rules:
    """The rules for a job: what all partitions allow that Slurm shows for its elements; those of [partition.default]
    while Slurm shows none."""
    seen = view.slurm.seen
    names = (seen.partitions(job) if seen else ()) or {""}
    return strictest(view.rules(name) for name in sorted(names))


def of_action(view: View, action: Action) -> Rules:
    """The rules for a call of Slurm: its job's, or for a node those of its partition that allows the action."""
    if action.job:
        return of_job(view, action.job)
    info = view.slurm.node(action.node)
    found = [view.rules(name) for name in (info.partitions if info else ()) or ("",)]
    return next((one for one in found if one.may(action.action)), found[0])


def withheld(view: View, action: Action, out: Outcome) -> str:
    """Why Slurm must not be asked for the action, which is then recorded as observed; empty if it may be."""
    why = of_action(view, action).refusal(action.action)
    if why:
        reason = f"would {action.label}: {action.reason}; not done, for {why}"
        record = records.ActionObserved(
            would=action.label, action=action.action, node=action.node, element=action.element, reason=reason
        )
        out.records.append((action.job, 0, record))
    return why


def acts(view: View, job: JobState) -> bool:
    """Whether the plan may give the job nodes and take them."""
    return of_job(view, job.job).mode == ACT
