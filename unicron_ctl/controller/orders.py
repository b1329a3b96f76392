"""What agents have to be told now, given what they say: level-triggered, so an order is due until the statuses show
that it was obeyed.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron_ctl.controller.machine import State
from unicron_ctl.controller.signals import WITNESS_SECONDS, self_stopped, unheard_since
from unicron_ctl.controller.soft import AgentView, JobView
from unicron_ctl.protocol import wire

Order = tuple[AgentView, str, wire.Message]
BREAKABLE = ("waiting", "entering", "running", "stopped")


def due(job: JobView, now: float) -> Iterator[Order]:
    """(agent, key, message) for every order that is not obeyed yet; the key is the same as long as the order is."""
    agents = [view for _, view in sorted(job.agents.items()) if view.alive]
    if job.state.ended:
        for view in agents:
            yield view, "end", wire.End(code=job.state.ended["code"], reason=job.state.ended["reason"])
        return
    yield from _pings(job, now)
    for view in agents:
        yield from _breaks(job, view)
    for view in agents:
        yield from _plans(job, view)
        yield from _processes(job, view, now)


def _pings(job: JobView, now: float) -> Iterator[Order]:
    """After a rank stopped by itself: every agent is asked whether it lives."""
    for since in self_stopped(job).values():
        if now >= since + WITNESS_SECONDS:
            for view in unheard_since(job, since):
                yield view, f"ping {since}", wire.Ping()


def _breaks(job: JobView, view: AgentView) -> Iterator[Order]:
    state = job.state
    if not state.broken:
        return
    breaking = state.phase == State.BREAKING
    for status in view.ranks.values():
        stops = status.state in BREAKABLE or (state.restart_mode and status.state == "finished")
        told = status.broken >= state.broken or not stops
        old = max(status.generation, status.entering) <= state.broken
        if told or not old or (not breaking and status.state not in ("entering", "running")):
            continue
        # A joiner of a broken offer that is still "waiting" has to hear of it too, so has everyone while the job is
        # breaking.
        lost = sorted(state.lost)
        yield view, f"break {state.broken} {lost}", wire.Break(generation=state.broken, lost=lost, reason=state.why)
        return


def _plans(job: JobView, view: AgentView) -> Iterator[Order]:
    state = job.state
    plan = {State.ENTERING: state.plan, State.OFFERING: state.offer}.get(State(state.phase))
    if plan is None:
        return
    for slot, status in view.ranks.items():
        if slot in plan.members:
            missing = status.state in BREAKABLE and max(status.generation, status.entering) < plan.generation
        else:
            missing = status.state in ("stopped", "running") and status.generation < plan.generation
        if missing:
            yield view, f"plan {plan.generation}", plan
            return


def _processes(job: JobView, view: AgentView, now: float) -> Iterator[Order]:
    for slot, status in view.ranks.items():
        known = job.state.slots.get(slot)
        if known is None or status.incarnation >= known.wanted:
            continue
        if status.state not in ("exited", "finished"):
            yield (
                view,
                f"stop {slot} {status.incarnation}",
                wire.StopRank(slot=slot, incarnation=status.incarnation, reason=known.why),
            )
        elif now >= known.not_before:
            yield (
                view,
                f"start {slot} {known.wanted}",
                wire.StartRank(slot=slot, incarnation=known.wanted, reason=known.why),
            )
