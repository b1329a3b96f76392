"""What the state machine's actions do: each records one decision as events; orders to the agents follow from the
state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from unicron_ctl.controller import failures, resume
from unicron_ctl.controller.machine import Action
from unicron_ctl.controller.machine import Event as Happening
from unicron_ctl.controller.signals import Signal
from unicron_ctl.controller.soft import JobView
from unicron_ctl.controller.state import JobState
from unicron_ctl.protocol.wire import Plan, RankStatus

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine

_DETECTED_BY = {Happening.LOSS: "status", Happening.FAULT: "exception", Happening.TIMEOUT: "time-out"}


def form(engine: Engine, job: JobState, signal: Signal) -> None:
    """The first generation, or one after which nobody was left: the rank that is furthest hands its state to all
    others.
    """
    view = engine.view(job)
    slots = sorted(signal.joiners)
    source = max(slots, key=lambda slot: (view.status(slot).iteration, -slot))
    status = view.status(source)
    number = job.generation + 1
    plan = Plan(
        generation=number,
        members=slots,
        store=store_of(view, slots),
        prefix=prefix(job, number),
        joiners=[s for s in slots if s != source],
        source=source,
        iteration=status.iteration,
        assignment=resume.deal(range(status.micro_batches), slots),
        reason=signal.reason,
    )
    engine.disturbed_until[job.job] = -1
    _record_plan(engine, job, view, plan, 0, 0, 0)


def break_(engine: Engine, job: JobState, signal: Signal) -> None:
    """All generations so far are over; who is lost is named."""
    number = job.generation  # the highest ever used: an outstanding offer is over, too
    tries = job.enter_failures + 1 if signal.event is Happening.TIMEOUT else 0
    lost = failures.of_signal(engine, job, signal, _DETECTED_BY[signal.event])
    if job.ended:
        return
    if signal.event is Happening.TIMEOUT:
        lost = set(signal.slots)
    engine.emit("break", job.job, number, number=number, lost=sorted(lost), reason=signal.reason, enter_failures=tries)


def resume_(engine: Engine, job: JobState, signal: Signal) -> None:
    """The survivors have stopped: decide how they go on."""
    view = engine.view(job)
    reports = {slot: view.status(slot) for slot in signal.joiners}
    total = max(status.micro_batches for status in reports.values())
    ends = [_end(status) for slot in job.members if view.finished(slot) and (status := view.status(slot))]
    at = max(status.iteration for status in reports.values())
    lost_done = {
        slot: status.done
        for slot, identity in job.lost.items()
        if (status := view.status(slot))
        and view.identity(slot) == identity
        and status.iteration == at
        and status.phase != "stepped"
    }
    share = [index for slot in job.lost for index in _share(job, slot, at, total)]
    decision = resume.decide(reports, total, max(ends, default=None), lost_done, share, at)
    unusable = decision.unusable if decision else dict.fromkeys(reports, "its report cannot be worked with")
    if unusable:
        failures.of_signal(engine, job, Signal(Happening.LOSS, "", unusable), "report")
        reason = "; ".join(f"slot {slot} {why}" for slot, why in sorted(unusable.items()))
        engine.emit("break", job.job, job.generation, number=job.broken, lost=sorted(unusable), reason=reason)
    if decision is None or job.ended:
        return
    number = job.generation + 1
    plan = Plan(
        generation=number,
        members=decision.members,
        store=store_of(view, decision.members),
        prefix=prefix(job, number),
        step=decision.step,
        iteration=decision.iteration,
        assignment=decision.assignment,
        reason=decision.reason,
    )
    engine.disturbed_until[job.job] = decision.iteration
    _record_plan(engine, job, view, plan, decision.reused, decision.recomputed, decision.redistributed)


def reform(engine: Engine, job: JobState, signal: Signal) -> None:
    """Nobody knows the training state any more: wait for fresh ranks."""
    engine.emit(
        "reform", job.job, job.generation, reason=f"{signal.reason}: formed anew from what the script starts with"
    )


def offer(engine: Engine, job: JobState, signal: Signal) -> None:
    """A plan for the next iteration boundary, with newcomers or without leavers."""
    view = engine.view(job)
    staying = [slot for slot in sorted(job.members) if slot not in signal.leavers]
    members = sorted({*staying, *signal.joiners})
    number = job.generation + 1
    plan = Plan(
        generation=number,
        members=members,
        store=store_of(view, staying),
        prefix=prefix(job, number),
        boundary=True,
        joiners=sorted(signal.joiners),
        source=staying[0],
        reason=signal.reason,
    )
    identities = {slot: view.identity(slot) for slot in signal.joiners}
    engine.emit(
        "offer",
        job.job,
        number,
        plan=msgspec.to_builtins(plan),
        identities=_plain(identities),
        joiners=signal.joiners,
        leavers=signal.leavers,
        reason=signal.reason,
    )


def enter(engine: Engine, job: JobState, signal: Signal) -> None:
    """Everyone is in: training goes on."""
    plan = job.offer or job.plan
    left = sorted(set(job.members) - set(plan.members)) if job.offer else []
    engine.emit("entered", job.job, plan.generation, members=plan.members, left=left, reason=signal.reason)
    engine.cluster.hurry()


def end(engine: Engine, job: JobState, signal: Signal) -> None:
    """The job is over; its agents are told the exit code."""
    engine.emit("job_ended", job.job, job.generation, code=signal.code, reason=signal.reason)
    engine.ledgers.pop(job.job, None)
    engine.watches.pop(job.job, None)
    engine.peers.pop(job.job, None)
    engine.clocks.forget(job.job)
    engine.cluster.hurry()


def observed(engine: Engine, job: JobState, signal: Signal) -> Signal:
    """Observe mode: say what would be done. The job meets the fate that it would have met without this controller."""
    lost = failures.of_signal(engine, job, signal, _DETECTED_BY[signal.event])
    would = (
        f"break generation {job.generation} and go on without slots {sorted(lost)}"
        if lost
        else f"break generation {job.generation} and try again"
    )
    engine.emit(
        "observed", job.job, job.generation, would=would, reason=f"observe mode: would {would}: {signal.reason}"
    )
    view = engine.view(job)
    codes = [status.exit.code for slot in signal.slots if (status := view.status(slot)) and status.exit]
    return Signal(
        Happening.FAILED,
        f"observe mode: {signal.reason}",
        code=next((code for code in codes if 0 < code < 256), failures.DEFAULT_EXIT),
    )


PERFORM: dict[Action, Callable[[Engine, JobState, Signal], None]] = {
    Action.FORM: form,
    Action.BREAK: break_,
    Action.RESUME: resume_,
    Action.REFORM: reform,
    Action.OFFER: offer,
    Action.ENTER: enter,
    Action.END: end,
}


# ---------------------------------------------------------------- helpers
def store_of(view: JobView, preferred: Iterable[int]) -> str:
    """The rendezvous store of the first living member's agent that has one, else of any living agent of the job."""
    elements = [*view.state.elements(preferred), *sorted(view.agents)]
    return next(
        agent.store for element in elements if (agent := view.agents.get(element)) and agent.alive and agent.store
    )


def prefix(job: JobState, generation: int) -> str:
    """Keys of a generation never meet those of another, in whatever store."""
    return f"{job.job}.g{generation}"


def _end(status: RankStatus) -> int:
    """How many iterations a finished rank has trained: fewer than wanted when the script was asked to stop."""
    return status.iteration + 1 if status.phase == "stepped" else status.train_iterations


def _share(job: JobState, slot: int, iteration: int, total: int) -> list[int]:
    """What the slot was to compute in the iteration."""
    if job.plan is None:
        return []
    if job.plan.iteration == iteration and slot in job.plan.assignment:
        return job.plan.assignment[slot]
    return resume.deal(range(total), job.plan.members).get(slot, [])


def _record_plan(
    engine: Engine, job: JobState, view: JobView, plan: Plan, reused: int, recomputed: int, redistributed: int
) -> None:
    identities = {slot: view.identity(slot) for slot in plan.members}
    engine.emit(
        "plan",
        job.job,
        plan.generation,
        plan=msgspec.to_builtins(plan),
        identities=_plain(identities),
        reused=reused,
        recomputed=recomputed,
        redistributed=redistributed,
        reason=plan.reason,
    )


def _plain(identities: dict) -> dict[str, list]:
    return {str(slot): [identity.agent, identity.incarnation] for slot, identity in identities.items()}
