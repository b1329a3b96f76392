"""Members of one job that do not come where the others wait for them: by themselves at rest, late to stop, or late to
enter a generation."""

from __future__ import annotations

from collections.abc import Iterator

from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job import JobState, Phase
from unicron_ctl.controller.model.live import AgentView, JobView
from unicron_ctl.controller.model.view import View

WITNESS_SECONDS = 0.05  # what is heard later than this after a rank stopped was sent after its peers' connections broke
ENTER_TRIES = 3  # in a row; then those who never entered count as lost
ITERATIONS_TO_TAKE_AN_OFFER = 4
ITERATIONS_TO_STOP = 3.0
MOST_NAMED = 16  # of the members that stopped at once


def _finding(view: View, job: JobView, what: What, slots: tuple[int, ...], said: str, by: str) -> Finding:
    agent, status = job.agent(slots[0]), job.status(slots[0])
    return Finding(
        what,
        job.state.job,
        slots,
        view.now,
        Source.CLOCK if what is What.LATE else Source.RANK,
        said,
        element=job.state.element(slots[0]),
        node=agent.node if agent else job.state.node(slots[0]),
        by=by,
        identity=job.state.members.get(slots[0]) or job.state.joining.get(slots[0]),
        fault=status.fault if status else None,
        iteration=status.iteration if status else None,
    )


# ---------------------------------------------------------------- stopped by themselves
def stopped(view: View, job: JobView) -> Iterator[Finding]:
    """Members stopped by themselves, all agents have spoken since, and still nobody is gone: it has to be tried again.

    A rank's connections also break because a peer's node died, which only the lease shows: until every agent has been
    heard again (they are pinged) this is no fault yet.
    """
    state = job.state
    if not job.live.stopped or state.phase is Phase.BREAKING or state.regroup or state.condemned:
        return
    grace = view.config.fault_grace
    latest = max((since for since in job.live.stopped.values() if view.now - since >= grace), default=None)
    if latest is None or unheard_since(job, latest):
        return
    found = _some(job, [s for s, since in job.live.stopped.items() if view.now - since >= grace])
    yield _finding(view, job, What.STOPPED, found, "stopped by itself", "exception")


def _some(job: JobView, slots: list[int]) -> tuple[int, ...]:
    """The first few of them, of as many nodes as can be: when thousands stop at once, more of them say nothing new."""
    return tuple(sorted(sorted(slots, key=lambda slot: (slot % job.per_node, slot))[:MOST_NAMED]))


def unheard_since(job: JobView, since: float) -> list[AgentView]:
    """Agents with members that have said nothing since a moment after `since`."""
    silent = [agent for agent in job.alive() if agent.last_heard < since + WITNESS_SECONDS]
    inside = (job.state.members, job.state.joining)
    return [agent for agent in silent if any(slot in those for slot in agent.slots for those in inside)]


# ---------------------------------------------------------------- late
def late_to_stop(view: View, job: JobView) -> Iterator[Finding]:
    """Survivors that did not stop in time: nobody who does not answer is waited for."""
    state = job.state
    if state.phase is not Phase.BREAKING or job.waited(view.now) <= view.config.report_timeout:
        return
    for slot in sorted(job.live.awaited):
        status, agent = job.status(slot), job.agent(slot)
        if slot in state.lost or slot in state.condemned or status is None or agent is None:
            continue
        limit = max(view.config.report_timeout, ITERATIONS_TO_STOP * status.iteration_seconds)
        if min(view.now - agent.progress.get(slot, 0.0), job.waited(view.now)) > limit:
            yield _finding(view, job, What.LATE, (slot,), f"did not stop within {limit:g} s", "time-out")


def late_to_enter(view: View, job: JobView) -> str:
    """Why the time to enter the plan or the offer is over; empty while it is not."""
    state, limit = job.state, view.config.enter_timeout
    plan = state.offer or state.plan
    if plan is None or not job.live.awaited or job.waited(view.now) < limit:
        return ""
    began = view.now - job.waited(view.now)
    if state.offer is not None:
        began, limit = _offer_taken(view, job, state, limit)
    if view.now - began < limit:
        return ""
    missing = sorted(job.live.awaited)
    shown = f"{missing[:20]}{' and more' if len(missing) > 20 else ''}"
    return f"slots {shown} did not enter generation {plan.generation} within {limit:g} s"


def _offer_taken(view: View, job: JobView, state: JobState, limit: float) -> tuple[float, float]:
    """(since when the offer is being entered, how long that may take): it begins with the first who is in it."""
    assert state.offer is not None
    inside = [
        agent.progress.get(slot, view.now)
        for slot in state.offer.members
        if slot not in job.live.awaited and (agent := job.agent(slot)) is not None
    ]
    if inside:
        return max(state.since, min(inside)), limit
    return state.since, max(limit, ITERATIONS_TO_TAKE_AN_OFFER * (state.seconds or 0.0))


def never_entered(view: View, job: JobView) -> Iterator[Finding]:
    """The third time in a row those who never got in are named; before that all try again."""
    entering = job.state.phase in (Phase.ENTERING, Phase.OFFERING)
    if not entering or job.state.tries + 1 < ENTER_TRIES or not late_to_enter(view, job):
        return
    for slot in sorted(job.live.awaited):
        if slot not in job.state.condemned:
            yield _finding(view, job, What.LATE, (slot,), f"never entered in {ENTER_TRIES} tries", "time-out")
