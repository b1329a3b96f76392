"""Silence: agents that have not been heard of for a lease, and agents that did not come back after this controller's
start.

Living agents stand in the order of their last word (`Live.leases`), so a tick looks at those only whose time is over.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job import AgentRecord, JobState, Phase
from unicron_ctl.controller.model.live import AgentView
from unicron_ctl.controller.model.view import View


def expired(view: View) -> Iterator[tuple[AgentView, Finding]]:
    """Agents whose lease is over, or that did not answer after Slurm said that they ended."""
    for key in view.live.leases:
        agent = view.live.agent(*key)
        silent = view.now - agent.last_heard if agent else 0.0
        if agent is None or silent <= view.config.lease:
            break  # all others have spoken later than this one
        yield agent, silence(view, agent.job, agent.element, agent.node, silent, "lease", Source.CLOCK)
    for key in sorted(view.live.suspects):
        agent = view.live.agent(*key)
        if agent is None or not agent.alive or agent.suspect_since is None:
            continue
        since = view.now - agent.suspect_since
        if since > view.config.hint_grace:
            by = "task exit in Slurm"
            yield agent, silence(view, agent.job, agent.element, agent.node, since, by, Source.SLURM)


def missing(view: View, job: JobState) -> Iterator[Finding]:
    """Agents that the log knows and that have not spoken to this controller since its start."""
    silent = view.now - view.started_at
    if silent <= view.config.restart_grace:
        return
    live = view.job(job)
    for element, record in job.agents.items():
        if element in live.agents:
            continue
        if not record.gone or _needed_again(job, record):
            by = "lease after the controller's restart"
            yield silence(view, job.job, element, record.node, silent, by, Source.CLOCK)


def _needed_again(job: JobState, record: AgentRecord) -> bool:
    """Restart mode: a world that breaks needs those once more that had ended well."""
    again = job.restart_mode and job.phase is Phase.BREAKING and record.gone == "finished"
    return again and any(s in job.members and s not in job.lost and s not in job.condemned for s in record.slots)


def silence(view: View, job: str, element: int, node: str, seconds: float, by: str, source: Source) -> Finding:
    said = f"no message from {node} for {seconds:.2f} s"
    return Finding(What.SILENT, job, (), view.now, source, said, element=element, node=node, by=by)
