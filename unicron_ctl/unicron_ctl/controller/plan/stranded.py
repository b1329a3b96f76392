"""Jobs that are one allocation and have too few nodes left for a world: an allocation gets no other node. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.requests import Action
from unicron_ctl.controller.model.view import View
from unicron_ctl.controller.plan.inputs import ended_in_allocation, unit_of
from unicron_ctl.controller.sense import fencing
from unicron_detector.words import counted

QUIET_SECONDS = 120.0  # after its agent's last word, a node that was judged lost does not come back
REFUSED_SECONDS = 600.0  # a job without a world ends after that, where Slurm does not requeue it for a passing reason
FOR_GOOD = ("disabled", "batch")  # in Slurm's refusal to requeue: --no-requeue; a job without a batch script


@dataclass(frozen=True)
class Shortage:
    """Too few nodes for a world. reason: how many the job needs, and has. final: what it lacks does not come back."""

    reason: str
    final: bool


def shortage(view: View, job: JobState) -> Shortage | None:
    """Why the job cannot form a world; None while it has one, or can.

    A node that does not answer for a moment counts until Slurm has taken it out of the allocation or shows it down, or
    until it was judged lost and has been quiet for QUIET_SECONDS. Processes that may live on there have to end first.
    """
    if not job.settings.allocation or job.over or job.phase is not Phase.FORMING or view.slurm.seen is None:
        return None
    listed, ended = view.slurm.seen.of(job.job), ended_in_allocation(job)
    if not listed or any(e.state != "RUNNING" for e in listed.values()):
        return None
    needs = max(job.least, unit_of(view, job))
    has = len(listed.keys() - ended.keys())
    if has >= needs:
        return None
    lasting = sum(element not in ended or not _stays_away(view, job, element) for element in listed)
    final = lasting < needs and not fencing.holds(view, view.job(job))
    return Shortage(f"it needs {counted(needs, 'node')}, has {has}, and an allocation gets no other", final)


def _stays_away(view: View, job: JobState, element: int) -> bool:
    """Nothing trains again on the node of an agent that is gone."""
    node, agent = view.slurm.node(job.agents[element].node), view.live.agent(job.job, element)
    heard = agent.last_heard if agent is not None else view.started_at
    return (node is not None and "DOWN" in node.states) or view.now - heard > QUIET_SECONDS


def requeue(job: JobState, short: Shortage) -> Action:
    """Slurm runs the batch script again, on as many nodes as it was submitted for."""
    return Action("requeue", job.job, 0, "", short.reason)


def must_end(view: View, job: JobState) -> str:
    """Why the job ends: it can form no world again, and Slurm does not requeue it. Empty for any other."""
    short = shortage(view, job)
    if short is None or not short.final or view.suspicions.doubt:
        return ""
    refused = permission.of_action(view, requeue(job, short)).refusal("requeue")
    said = job.unrequeueable
    if said and (any(word in said for word in FOR_GOOD) or view.now - job.since > REFUSED_SECONDS):
        refused = refused or f"Slurm does not requeue it: {said}"
    return f"{short.reason}; {refused}" if refused else ""
