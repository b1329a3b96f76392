"""In restart mode a new world waits until the processes of the last one are gone, since they may write the same files
(docs/design/consensus.md, *A lease for plain programs*).

Slurm's record or the node's own word proves it at once. Otherwise their agent or its watchdog ends them after they have
been cut off for long enough; both sides know how long that takes at most.
"""

from __future__ import annotations

from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import Fence
from unicron_ctl.controller.model.view import View
from unicron_ctl.shared.consensus.restart_lease import seconds_to_expiry


def fell_silent(view: View, job: JobView, element: int) -> str:
    """Note that the element's processes may live on; return how long a new world waits for that, in words."""
    state = job.state
    record, agent = state.agents.get(element), job.agents.get(element)
    nodes = len(state.inside)
    if not state.mode.fenced or record is None or nodes < 2 or element not in state.inside:
        return ""  # alone it has no others to miss
    seen = agent is not None and agent.agent == record.agent
    fenced = agent is None or not seen or agent.status.fenced
    heard = agent.last_heard if agent is not None and seen else view.started_at
    job.fences[record.agent] = fence = Fence(element, heard, nodes, fenced)
    wait = max(0.0, _until(view, job, fence) - view.now)
    return f"; its processes may live on, so no new world begins for {wait:.0f} s, or until Slurm shows their end"


def holds(view: View, job: JobView) -> bool:
    """Whether processes of the last world may still live."""
    state = job.state
    if not state.mode.fenced:
        return False
    _recall(view, job)
    for name, fence in list(job.fences.items()):
        record = state.agents.get(fence.element)
        same = record is not None and record.agent == name
        back = same and record is not None and not record.gone and _has_stopped(job, name, fence.element)
        if back or (same and quorum.shown_dead(view, state, fence.element, fence.heard)):
            del job.fences[name]
        elif view.now >= _until(view, job, fence):
            del job.fences[name]
    return bool(job.fences)


def _has_stopped(job: JobView, name: str, element: int) -> bool:
    """Whether the agent speaks again, and no process of the last world is left there."""
    agent = job.agents.get(element)
    here = agent is not None and agent.agent == name and agent.alive
    return here and agent is not None and all(rank.state != "running" for rank in agent.ranks.values())


def _recall(view: View, job: JobView) -> None:
    """Recall agents that the previous controller gave up as silent. Their time counts from this controller's start."""
    agents = job.state.agents
    if job.fences_known:
        return
    job.fences_known = True
    for element, record in agents.items():
        if record.gone == "silent" and len(agents) > 1 and record.agent not in job.fences:
            job.fences[record.agent] = Fence(element, view.started_at, len(agents), True)


def _until(view: View, job: JobView, fence: Fence) -> float:
    """Return when the processes of this agent are gone at the latest. If nothing ends them, silence gets its usual
    time."""
    if not fence.fenced:
        return fence.heard + view.config.state_wait_seconds
    silent = len(job.fences)
    return fence.heard + seconds_to_expiry(silent, max(0, fence.nodes - silent))
