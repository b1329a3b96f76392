"""In restart mode a new world waits until the processes of the last one are gone, since they may write the same files
(docs/design/consensus.md, *A lease for plain programs*).

Slurm's record or the node's own word proves it at once. Otherwise their agent or its watchdog ends them after they have
been cut off for long enough; both sides know how long that takes at most. The doors of other agents renew a lease, too,
so whoever has not shown that its door is shut counts as one that may renew it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import MAY_LIVE, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import Fence
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.consensus.restart_lease import gone_at, old_gone_at, on_another_clock, tried_by
from unicron_ctl.shared.log import records

UNKNOWN_SECONDS = 36.0  # the lease of an agent that has not named it to this controller: as in release 0.2, with margin


def fell_silent(view: View, job: JobView, element: int) -> str:
    """Note that the element's processes may live on; return how long a new world waits for that, in words."""
    state = job.state
    record, agent = state.agents.get(element), job.agents.get(element)
    inside = element in state.inside or (agent is not None and _shows_process(state, agent))
    if not state.mode.fenced or record is None or len(state.agents) < 2 or not inside:
        return ""  # the job has no other agents, so that only Slurm can start it elsewhere
    seen = agent is not None and agent.agent == record.agent
    fenced = agent.status.fenced if agent is not None and seen else element not in state.unfenced
    heard = agent.last_heard if agent is not None and seen else view.started_at
    lease = agent.status.lease if agent is not None and seen else _unknown_lease(view)
    job.fences[record.agent] = fence = Fence(element, heard, fenced, lease)
    _note_shut(view, job)
    wait = max(0.0, _until(view, job, fence, _soonest(view, job)) - view.now)
    return f"; its processes may live on, so no new world begins for {wait:.0f} s, or until Slurm shows their end"


def powered_off(view: View, node: str, out: Outcome) -> None:
    """Record that the processes of silent agents on this node are dead, because the site's program has switched it
    off."""
    for state in view.managed_jobs():
        job = view.job(state)
        for name, fence in list(job.fences.items()):
            record = state.agents.get(fence.element)
            present = record is not None and record.agent == name
            if (record.node if record is not None and present else state.superseded.get(name)) != node:
                continue
            job.ended.add(name)
            del job.fences[name]
            if record is not None and present and record.gone in MAY_LIVE:
                out.record(state, records.AgentGone(element=fence.element, agent=name, reason="dead"))
                failures = [one for one in state.failures if one.record.node == node]
                if failures:
                    text = f"{node} is powered off: its processes are dead, so nothing is waited for"
                    out.record(state, records.FailureAction(failure=failures[-1].id, text=text))


def has_ended(view: View, job: JobView, element: int) -> None:
    """Note that this element's agent has ended with its processes, so that its door is shut."""
    record = job.state.agents.get(element)
    if job.state.mode.fenced and record is not None:
        job.ended.add(record.agent)
        _note_shut(view, job, {element: record.agent})


def on_word(view: View, job: JobView, agent: AgentView) -> None:
    """Take in that an agent speaks: it has not ended, whatever showed that, and its door is shut only if it says so."""
    state = job.state
    if not state.mode.fenced:
        return
    job.ended.discard(agent.agent)
    if agent.status.left < state.broken:
        job.shut.pop(agent.agent, None)
    elif state.broken and state.phase in (Phase.BREAKING, Phase.FORMING):
        _note_shut(view, job, {agent.element: agent.agent})


def holds(view: View, job: JobView) -> bool:
    """Whether processes of the last world may still live."""
    state = job.state
    if not state.mode.fenced:
        return False
    _recall(view, job)
    for name, fence in list(job.fences.items()):
        if _shown_dead(view, state, fence.element, name, fence.heard):
            job.ended.add(name)
            del job.fences[name]
        elif _has_stopped(job, name, fence.element):
            del job.fences[name]
    _note_shut(view, job)
    fences = [(fence, math.inf) for fence in job.fences.values()]
    limit = state.since + view.config.state_wait_seconds
    fences += [(_fence_of(agent), limit) for agent in job.agents.values() if _is_doubtful(state, agent)]
    waits = any(view.now < min(_until(view, job, fence, job.shut), limit) for fence, limit in fences)
    if not waits:
        job.fences.clear()  # also those before: as long as one is open, the silent ones may keep each other's processes
    return waits


def _world(state: JobState) -> dict[int, str]:
    """Return the agents of the last world, or all once these are not known."""
    return state.world or {element: record.agent for element, record in state.agents.items()}


def _shows_process(state: JobState, agent: AgentView) -> bool:
    """Whether a process of a world that is over runs there, or may begin, by the agent's last status."""
    running = any(one.state == "running" and one.generation <= state.broken for one in agent.ranks.values())
    return running or 0 < agent.status.begins <= state.broken


def _is_doubtful(state: JobState, agent: AgentView) -> bool:
    """Whether the agent counts as there, and processes of a world that is over may run on its node.

    It was left out of the Break because its processes had ended before or did not stop, or it is silent and nobody
    knows why.
    """
    return agent.alive and _shows_process(state, agent)


def _fence_of(agent: AgentView) -> Fence:
    return Fence(agent.element, agent.last_heard, agent.status.fenced, agent.status.lease)


def _has_stopped(job: JobView, name: str, element: int) -> bool:
    """Whether the agent speaks again, and no process of the last world is left there."""
    record, agent = job.state.agents.get(element), job.agents.get(element)
    if record is None or record.agent != name or record.gone or agent is None or agent.agent != name:
        return False
    return agent.alive and all(rank.state != "running" for rank in agent.ranks.values())


def _shown_dead(view: View, state: JobState, element: int, name: str, since: float) -> bool:
    record = state.agents.get(element)
    if record is not None and record.agent == name:
        return bool(quorum.shown_dead(view, state, element, since))
    seen = view.slurm.seen
    return seen is not None and seen.asked_at > since and quorum.is_dead(view, state, element, name)


# ---------------------------------------------------------------- doors
def _note_shut(view: View, job: JobView, news: Mapping[int, str] | None = None) -> None:
    """Note whose doors are shut now for the worlds that are over: they stay so. news: only these agents may have shut
    theirs since."""
    state = job.state
    if job.shut_for != state.broken:
        job.shut_for, job.shut, news = state.broken, {}, None
    for element, name in (_world(state) if news is None else news).items():
        if name not in job.shut and _is_shut(view, job, element, name):
            job.shut[name] = view.now


def _is_shut(view: View, job: JobView, element: int, name: str) -> bool:
    """Whether this agent has said that it heard the Break, or has ended."""
    state, agent = job.state, job.agents.get(element)
    if agent is not None and agent.agent == name and agent.status.left >= state.broken > 0:
        return True
    if name in job.ended:
        return True
    record = state.agents.get(element)
    if name in job.fences or record is None:
        return False
    if record.agent == name:
        return bool(record.gone) and record.gone not in MAY_LIVE
    return _shown_dead(view, state, element, name, view.started_at)


def _soonest(view: View, job: JobView) -> dict[str, float]:
    """Return since when doors will be shut, if all agents that speak leave the world now."""
    spoken = {agent.agent for agent in job.agents.values() if agent.alive and agent.agent not in job.fences}
    return dict.fromkeys(spoken, view.now) | job.shut


def _until(view: View, job: JobView, fence: Fence, shut: dict[str, float]) -> float:
    """Return when the processes of this agent are gone at the latest. If nothing ends them, silence gets its usual
    time. shut: agents whose doors are shut, and since when."""
    world = _world(job.state)
    if fence.fenced and not fence.lease:
        doubtful = sum(_is_doubtful(job.state, agent) for agent in job.agents.values())
        silent = len(job.fences) + doubtful
        return old_gone_at(fence.heard, silent, max(0, len(world) - silent))
    doors = tried_by(fence.element, sorted(world)) if fence.fenced else []
    gone = gone_at(fence.heard, fence.lease, [shut.get(world[one], math.inf) for one in doors])
    return gone if gone < math.inf else fence.heard + view.config.state_wait_seconds


def _recall(view: View, job: JobView) -> None:
    """Recall agents of the last world that the previous controller gave up as silent. Their time counts from this
    controller's start. Nobody waits for the others: the last world could not form before their processes were gone."""
    state = job.state
    if job.fences_known:
        return
    job.fences_known = True
    for element, name in _world(state).items():
        record = state.agents.get(element)
        present = record is not None and record.agent == name
        silent = record.gone in MAY_LIVE if record is not None and present else name in state.superseded
        if silent and len(state.agents) > 1 and name not in job.fences:
            fenced = element not in state.unfenced
            job.fences[name] = Fence(element, view.started_at, fenced, _unknown_lease(view))


def _unknown_lease(view: View) -> float:
    """Return a lease for agents that this controller has not heard: it may have been another before a restart."""
    return max(view.config.fence_seconds, UNKNOWN_SECONDS)


def stop_limit(view: View, job: JobView) -> float:
    """Return how long a Break waits at least for its members: who does not hear of it has ended its processes then."""
    return on_another_clock(view.config.fence_seconds) if job.state.mode.fenced else 0.0
