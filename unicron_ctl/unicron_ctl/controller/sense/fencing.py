"""In restart mode a new world waits until the processes of the last one are gone, since they may write the same files
(docs/design/consensus.md, *A lease for plain programs*).

Slurm's record or the node's own word proves it at once. Otherwise their agent or its watchdog ends them after they have
been cut off for long enough; both sides know how long that takes at most.
"""

from __future__ import annotations

from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import MAY_LIVE, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import Fence
from unicron_ctl.controller.model.view import View
from unicron_ctl.shared.consensus.restart_lease import gone_at, on_another_clock

UNKNOWN_SECONDS = 36.0  # the lease of an agent that has not named it to this controller: as in release 0.2, with margin


def fell_silent(view: View, job: JobView, element: int) -> str:
    """Note that the element's processes may live on; return how long a new world waits for that, in words."""
    state = job.state
    record, agent = state.agents.get(element), job.agents.get(element)
    nodes = _nodes(state)
    inside = element in state.inside or (agent is not None and _shows_process(state, agent))
    if not state.mode.fenced or record is None or nodes < 2 or not inside:
        return ""  # alone it has no others to miss
    seen = agent is not None and agent.agent == record.agent
    fenced = agent is None or not seen or agent.status.fenced
    heard = agent.last_heard if agent is not None and seen else view.started_at
    lease = agent.status.lease if agent is not None and seen else _unknown_lease(view)
    job.fences[record.agent] = fence = Fence(element, heard, nodes, fenced, lease)
    wait = max(0.0, _until(view, job, fence, len(_doubtful(job))) - view.now)
    return f"; its processes may live on, so no new world begins for {wait:.0f} s, or until Slurm shows their end"


def holds(view: View, job: JobView) -> bool:
    """Whether processes of the last world may still live."""
    state = job.state
    if not state.mode.fenced:
        return False
    _recall(view, job)
    doubtful = _doubtful(job)
    for name, fence in list(job.fences.items()):
        record = state.agents.get(fence.element)
        same = record is not None and record.agent == name
        back = same and record is not None and not record.gone and _has_stopped(job, name, fence.element)
        if back or (same and quorum.shown_dead(view, state, fence.element, fence.heard)):
            del job.fences[name]
        elif view.now >= _until(view, job, fence, len(doubtful)):
            del job.fences[name]
    return bool(job.fences) or any(_holds_on(view, job, agent, len(doubtful)) for agent in doubtful)


def _nodes(state: JobState) -> int:
    """Return the number of nodes of the last world, or of all agents once that is not known any more."""
    inside = len(state.elements(state.plan.members)) if state.plan is not None else len(state.inside)
    return inside or len(state.agents)


def _shows_process(state: JobState, agent: AgentView) -> bool:
    """Whether a process of a world that is over runs there, or may begin, by the agent's last status."""
    running = any(one.state == "running" and one.generation <= state.broken for one in agent.ranks.values())
    return running or 0 < agent.status.begins <= state.broken


def _doubtful(job: JobView) -> list[AgentView]:
    """Return agents that count as there, and on whose nodes processes of a world that is over may run.

    They were left out of the Break because their processes had ended before or did not stop, or they are silent and
    nobody knows why.
    """
    return [agent for agent in job.agents.values() if agent.alive and _shows_process(job.state, agent)]


def _holds_on(view: View, job: JobView, agent: AgentView, doubtful: int) -> bool:
    status, state = agent.status, job.state
    fence = Fence(agent.element, agent.last_heard, _nodes(state), status.fenced, status.lease)
    return view.now < min(_until(view, job, fence, doubtful), state.since + view.config.state_wait_seconds)


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
        if record.gone in MAY_LIVE and len(agents) > 1 and record.agent not in job.fences:
            fence = Fence(element, view.started_at, len(agents), True, _unknown_lease(view))
            job.fences[record.agent] = fence


def _unknown_lease(view: View) -> float:
    """Return a lease for agents that this controller has not heard: it may have been another before a restart."""
    return max(view.config.fence_seconds, UNKNOWN_SECONDS)


def _until(view: View, job: JobView, fence: Fence, doubtful: int) -> float:
    """Return when the processes of this agent are gone at the latest. If nothing ends them, silence gets its usual
    time. doubtful: the number of such agents."""
    if not fence.fenced:
        return fence.heard + view.config.state_wait_seconds
    silent, state = len(job.fences) + doubtful, job.state
    others = max(0, fence.nodes - silent)
    inside = (agent for agent in job.agents.values() if agent.alive and agent.element in state.inside)
    if fence.lease and any(not agent.status.world for agent in inside):
        silent, others = fence.nodes, 0  # agents of release 0.2 open their doors for every world
    broken = max(state.since, view.started_at) if state.phase is Phase.FORMING else view.now
    return gone_at(fence.heard, broken, fence.lease, silent, others)


def stop_limit(view: View, job: JobView) -> float:
    """Return how long a Break waits at least for its members: who does not hear of it has ended its processes then."""
    return on_another_clock(view.config.fence_seconds) if job.state.mode.fenced else 0.0
