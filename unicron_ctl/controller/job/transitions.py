"""What the state machine's actions do: each records one decision; orders to the agents follow from the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unicron_ctl.agreement import resume
from unicron_ctl.controller.job.machine import Action, Event
from unicron_ctl.controller.job.modes import Happening
from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job import JobState
from unicron_ctl.controller.model.live import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.protocol import wire
from unicron_ctl.protocol.wire import Plan, RankStatus


def form(view: View, job: JobView, happening: Happening) -> Outcome:
    """The first generation, or one after which nobody was left: the rank that is furthest hands its state to all
    others."""
    reports = {slot: status for slot in happening.joiners if (status := job.status(slot)) is not None}
    slots = sorted(reports)
    source = max(slots, key=lambda slot: (reports[slot].iteration, -slot))
    number = job.state.generation + 1
    plan = Plan(
        generation=number,
        members=slots,
        store=store_of(job, slots),
        prefix=prefix(job.state, number),
        joiners=[slot for slot in slots if slot != source],
        source=source,
        iteration=reports[source].iteration,
        assignment=resume.deal(range(reports[source].micro_batches), slots),
        reason=happening.reason,
    )
    out = Outcome()
    out.record(job.state, records.PlanMade(plan=plan, crews=crews(job, slots), reason=plan.reason), number)
    return out


def break_(view: View, job: JobView, happening: Happening) -> Outcome:
    """All generations so far are over; who is lost is named."""
    out, state = Outcome(), job.state
    number = state.generation  # the highest ever used: an outstanding offer is over, too
    inside = {**state.members, **state.joining}
    lost = [
        records.Lost(slot, inside[slot].agent, inside[slot].incarnation)
        for slot in sorted(state.condemned)
        if slot in inside
    ]
    tries = state.tries + 1 if happening.event is Event.TIMEOUT else 0
    planned = state.restart_mode and happening.event is Event.FAULT and not state.regroup
    record = records.Break(number=number, lost=lost, tries=tries, planned=planned, reason=happening.reason)
    out.record(state, record, number)
    return out


def resume_(view: View, job: JobView, happening: Happening) -> Outcome:
    """The survivors have stopped: decide how they go on."""
    out, state, reports = Outcome(), job.state, job.reports()
    total = max(status.micro_batches for status in reports.values())
    at = max(status.iteration for status in reports.values())
    decision = resume.decide(reports, total, _furthest_end(job), _lost_done(job, at), _lost_share(job, at, total), at)
    unusable = decision.unusable if decision else dict.fromkeys(reports, "its report cannot be worked with")
    if unusable:
        out.findings = [_unusable(view, job, slot, why) for slot, why in sorted(unusable.items())]
        return out
    assert decision is not None
    number = state.generation + 1
    plan = Plan(
        generation=number,
        members=decision.members,
        store=store_of(job, decision.members),
        prefix=prefix(state, number),
        step=decision.step,
        iteration=decision.iteration,
        assignment=decision.assignment,
        reason=decision.reason,
    )
    record = records.PlanMade(
        plan=plan,
        crews=crews(job, decision.members),
        reused=decision.reused,
        recomputed=decision.recomputed,
        redistributed=decision.redistributed,
        reason=plan.reason,
    )
    out.record(state, record, number)
    return out


def reform(view: View, job: JobView, happening: Happening) -> Outcome:
    """Nobody knows the training state any more: wait for fresh ranks."""
    out = Outcome()
    reason = f"{happening.reason}: formed anew from what the script starts with"
    out.record(job.state, records.Reform(reason=reason))
    return out


def offer(view: View, job: JobView, happening: Happening) -> Outcome:
    """A plan for the next iteration boundary, with newcomers or without leavers."""
    out, state = Outcome(), job.state
    leavers, joiners = set(happening.leavers), sorted(happening.joiners)
    staying = [slot for slot in sorted(state.members) if slot not in leavers]
    number = state.generation + 1
    plan = Plan(
        generation=number,
        members=sorted({*staying, *joiners}),
        store=store_of(job, staying),
        prefix=prefix(state, number),
        boundary=True,
        joiners=joiners,
        source=staying[0],
        reason=happening.reason,
    )
    record = records.Offer(
        plan=plan,
        crews=crews(job, joiners),
        joiners=joiners,
        leavers=sorted(leavers),
        reason=happening.reason,
    )
    out.record(state, record, number)
    return out


def withdraw(view: View, job: JobView, happening: Happening) -> Outcome:
    """What was offered does not come about. Members that hold the offer still can only take it together, which their
    statuses show; so telling them once is enough."""
    out, state = Outcome(), job.state
    assert state.offer is not None
    number = state.offer.generation
    gone = [(slot, state.joining[slot]) for slot in sorted(state.condemned) if slot in state.joining]
    lost = [records.Lost(slot, process.agent, process.incarnation) for slot, process in gone]
    out.record(state, records.OfferWithdrawn(number=number, lost=lost, reason=happening.reason), number)
    for agent in job.alive():
        out.send(agent, wire.Withdraw(generation=number, reason=happening.reason))
    return out


def enter(view: View, job: JobView, happening: Happening) -> Outcome:
    """Everyone is in: training goes on."""
    out, state = Outcome(hurry=True), job.state
    plan = state.offer or state.plan
    assert plan is not None
    left = sorted(set(state.members) - set(plan.members)) if state.offer else []
    out.record(state, records.Entered(members=plan.members, left=left, reason=happening.reason), plan.generation)
    return out


def end(view: View, job: JobView, happening: Happening) -> Outcome:
    """The job is over; its agents are told the exit code."""
    out = Outcome(hurry=True)
    out.record(job.state, records.JobEnded(code=happening.code, reason=happening.reason))
    return out


PERFORM: dict[Action, Callable[[View, JobView, Happening], Outcome]] = {
    Action.FORM: form,
    Action.BREAK: break_,
    Action.RESUME: resume_,
    Action.REFORM: reform,
    Action.OFFER: offer,
    Action.WITHDRAW: withdraw,
    Action.ENTER: enter,
    Action.END: end,
}


# ---------------------------------------------------------------- helpers
def store_of(job: JobView, preferred: Iterable[int]) -> str:
    """The rendezvous store of the first living member's agent that has one, else of any living agent of the job."""
    for element in (*job.state.elements(preferred), *sorted(job.agents)):
        agent = job.agents.get(element)
        if agent is not None and agent.alive and agent.store:
            return agent.store
    raise LookupError(f"no living agent of job {job.state.job} keeps a store")  # nobody forms or reports without one


def prefix(job: JobState, generation: int) -> str:
    """Keys of a generation never meet those of another, in whatever store."""
    return f"{job.job}.g{generation}"


def crews(job: JobView, slots: Iterable[int]) -> list[records.Crew]:
    """The processes that are in these slots now, by agent."""
    wanted, found = set(slots), []
    for _, agent in sorted(job.agents.items()):
        present = agent.ranks
        inside = [slot for slot in agent.slots if slot in wanted and slot in present]
        if inside:
            found.append(records.Crew(agent.agent, inside, [present[slot].incarnation for slot in inside]))
    return found


def _furthest_end(job: JobView) -> int | None:
    """How many iterations a finished member has trained: fewer than wanted when the script was asked to stop."""
    if len(job.live.unfinished) == len(job.state.survivors()):
        return None
    ends = [_end(status) for s in job.state.members if job.finished(s) and (status := job.status(s)) is not None]
    return max(ends, default=None)


def _end(status: RankStatus) -> int:
    return status.iteration + 1 if status.phase == "stepped" else status.train_iterations


def _lost_done(job: JobView, iteration: int) -> dict[int, list[int]]:
    """What lost ranks had finished of the iteration."""
    found = {}
    for slot, identity in job.state.lost.items():
        status = job.last_word(slot, identity)
        if status is not None and status.iteration == iteration and status.phase != "stepped":
            found[slot] = status.done
    return found


def _lost_share(job: JobView, iteration: int, total: int) -> list[int]:
    """What the lost ranks were to compute in the iteration."""
    plan = job.state.plan
    if plan is None or not job.state.lost:
        return []
    planned = plan.assignment if plan.iteration == iteration else {}
    members, lost = plan.members, job.state.lost
    usual = {slot: range(place, total, len(members)) for place, slot in enumerate(members) if slot in lost}
    return [index for slot in lost for index in planned.get(slot, usual.get(slot, ()))]


def _unusable(view: View, job: JobView, slot: int, why: str) -> Finding:
    status = job.status(slot)
    return Finding(
        What.UNUSABLE,
        job.state.job,
        (slot,),
        view.now,
        Source.RANK,
        why,
        element=job.state.element(slot),
        node=job.state.node(slot),
        by="report",
        identity=job.identity(slot),
        iteration=status.iteration if status else None,
    )
