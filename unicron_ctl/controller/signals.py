"""From what agents say and what the clock shows to the next event of a job's state machine. Pure: (views, now) ->
event and reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from detector.classify import Classifier
from unicron_ctl.config import ControllerConfig
from unicron_ctl.controller import restarting
from unicron_ctl.controller.machine import Event, State
from unicron_ctl.controller.soft import AT_REST, AgentView, JobView
from unicron_ctl.controller.state import Identity
from unicron_ctl.protocol.wire import RankStatus

PUT_BACK_SECONDS = 1.0  # a newcomer that does not acknowledge a Break by then has not got in
WITNESS_SECONDS = 0.05  # what is heard later than this after a rank stopped was sent after its peers' connections broke
ENTER_TRIES = 3  # in a row; then those who never entered count as lost
ITERATIONS_TO_TAKE_AN_OFFER = 4


@dataclass(frozen=True)
class Signal:
    """An event of the state machine with its slots: lost ones, newcomers (joiners) or leavers, and the reason in words.

    code: with FINISHED and FAILED, what the job's agents are to exit with.
    """

    event: Event
    reason: str
    slots: dict[int, str] = field(default_factory=dict)
    joiners: list[int] = field(default_factory=list)
    leavers: list[int] = field(default_factory=list)
    code: int = 0


@dataclass(frozen=True)
class Surroundings:
    """What a job's next event depends on beside its own ranks.

    expected: elements that Slurm shows running or that the plan still wants to start; None while Slurm has not
    answered. restarted_at: when this controller started. put_aside: nodes that must not get work of this job now.
    """

    config: ControllerConfig
    classifier: Classifier
    restarted_at: float
    expected: Collection[int] | None
    put_aside: Collection[str] = ()


def next_signal(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """The next event, the most far-reaching first; None while there is nothing to do."""
    state = State(job.state.phase)
    if state is State.ENDED:
        return None
    for look in _LOOK[state]:
        signal = look(job, around, now)
        if signal:
            return signal
    return None


# ---------------------------------------------------------------- all states with members
def finished(job: JobView, around: Surroundings, now: float) -> Signal | None:
    members = [slot for slot in job.state.members if slot not in job.state.lost]
    if members and all(job.finished(slot) for slot in members):
        return Signal(Event.FINISHED, "all members trained to the end")
    return None


def losses(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """Members that are gone, with the reason of each."""
    gone: dict[int, str] = {}
    for slot, identity in {**job.state.members, **job.state.joining}.items():
        if slot not in job.state.lost:
            reason = lost_because(job, around, slot, identity, now)
            if reason:
                gone[slot] = reason
    if not gone:
        return None
    return Signal(Event.LOSS, "; ".join(f"slot {slot} {reason}" for slot, reason in sorted(gone.items())), gone)


def lost_because(job: JobView, around: Surroundings, slot: int, identity: Identity, now: float) -> str:
    """Why this member is gone; empty while it is there."""
    view = job.agents.get(job.state.element(slot))
    if view is None:
        record = job.state.agents.get(job.state.element(slot))
        late = now - around.restarted_at > around.config.restart_grace
        again = job.state.restart_mode and job.state.phase == State.BREAKING  # it is needed once more
        return (
            "did not come back after the controller was restarted"
            if late and (again or not (record and record.gone == "finished"))
            else ""
        )
    if view.agent != identity.agent:
        return "was replaced: its element was started again"
    status = view.ranks.get(slot)
    if status is not None and (status.state == "finished" or (status.exit is not None and status.exit.code == 0)):
        return ""
    if view.expired:
        return f"has not been heard of: {view.node} is silent"
    if view.left:
        return f"is gone: its agent on {view.node} ended ({view.left})"
    if status is None:
        return ""
    if status.incarnation != identity.incarnation:
        return "was started again"
    if status.end is not None and status.exit is None:
        return f"ends by an exception: {status.fault.type}"
    if status.state == "exited":
        return f"exited with {status.exit.code if status.exit else 'an unknown status'}"
    if status.state == "left" and slot in job.state.members and job.state.phase != State.OFFERING:
        return "left"
    return ""


def faults(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """A member stopped by itself, all agents have spoken since, and still nobody is gone: it has to be tried again.

    A rank's connections also break because a peer's node died, which only the lease shows: until every agent has been
    heard again (they are pinged) this is no fault yet.
    """
    stopped = self_stopped(job)
    found: dict[int, str] = {}
    for slot, since in stopped.items():
        status = job.status(slot)
        if now - since >= around.config.fault_grace and not unheard_since(job, since):
            found[slot] = (
                f"stopped: {status.fault.type}: {status.fault.text}" if status and status.fault else "stopped by itself"
            )
    if not found:
        return None
    return Signal(Event.FAULT, "; ".join(f"slot {slot} {reason}" for slot, reason in sorted(found.items())), found)


def self_stopped(job: JobView) -> dict[int, float]:
    """Members that stopped without a Break, and when that was heard."""
    found: dict[int, float] = {}
    for slot in {**job.state.members, **job.state.joining}:
        status, view = job.status(slot), job.agents.get(job.state.element(slot))
        if status is None or view is None or status.state not in AT_REST or job.finished(slot):
            continue
        if status.broken > job.state.broken:  # else it obeys an earlier Break and has not got its plan yet
            found[slot] = view.progress.get(slot, view.last_heard)
    return found


def unheard_since(job: JobView, since: float) -> list[AgentView]:
    """Agents with members that have said nothing since a moment after `since`."""
    elements = job.state.elements({**job.state.members, **job.state.joining})
    views = [job.agents[element] for element in elements if element in job.agents]
    return [view for view in views if view.alive and view.last_heard < since + WITNESS_SECONDS]


# ---------------------------------------------------------------- forming
def ready(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """Enough ranks wait: all that can be expected, or the least that is allowed and nobody came for a while."""
    config, state = around.config, job.state
    whole = waiting_elements(job, around)
    if not whole or not any(view.store for view in job.agents.values() if view.alive):
        return None
    coming = {e for e, view in job.agents.items() if view.alive and e not in whole and _may_work(job, around, e)}
    if state.restart_mode and len(whole) < min(state.settings.min_nodes, state.settings.max_nodes):
        return None  # the script may be told no smaller world
    expected = set(around.expected or ()) - set(whole)
    slots = sorted(slot for element in whole for slot in job.agents[element].slots)
    if len(whole) >= state.settings.max_nodes or (around.expected is not None and not expected and not coming):
        return Signal(Event.READY, f"all {len(whole)} nodes that are to be had are ready", joiners=slots)
    arrival = max(
        job.agents[element].progress.get(slot, 0.0) for element in whole for slot in job.agents[element].slots
    )
    if state.restart_mode:
        soon = [state.slot(slot).not_before for element in coming for slot in job.agents[element].slots]
        arrival = max([arrival, *(at for at in soon if at <= now + restarting.BACKOFF_WORTH_WAITING)])
    if len(whole) >= state.settings.min_nodes and now - arrival >= config.forming_settle_seconds:
        return Signal(
            Event.READY,
            f"{len(whole)} nodes are ready and no other came for {config.forming_settle_seconds:g} s",
            joiners=slots,
        )
    return None


def hopeless(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """Restart mode: one world after the other breaks."""
    reason = restarting.exhausted(job.state)
    return Signal(Event.FAILED, reason, code=1) if reason else None


def waiting_elements(job: JobView, around: Surroundings) -> list[int]:
    """Elements of which every rank can enter now."""
    found = []
    for element, view in sorted(job.agents.items()):
        ranks = [view.ranks.get(slot) for slot in view.slots]
        ready = all(r and r.state == "waiting" and r.end is None for r in ranks)
        if view.alive and ready and _may_work(job, around, element):
            found.append(element)
    return found


def _may_work(job: JobView, around: Surroundings, element: int) -> bool:
    allotted = job.state.allotted
    view = job.agents.get(element)
    return (allotted is None or element in allotted) and (view is None or view.node not in around.put_aside)


# ---------------------------------------------------------------- running
def change(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """Newcomers that can be taken in, and elements that the plan takes away. Whole elements only."""
    state, joiners, leavers = job.state, [], []
    inside = set(state.elements(state.members))
    for element in waiting_elements(job, around):
        view = job.agents[element]
        if element in inside or element in state.leaving:
            continue
        delay = around.config.join_after_seconds if state.restart_mode else around.config.offer_delay
        if now - max(view.progress.get(slot, 0.0) for slot in view.slots) >= delay:
            joiners += view.slots
    for element in state.leaving:
        leavers += [slot for slot in state.members if state.element(slot) == element]
    if set(leavers) >= set(state.members):
        leavers = []  # the last ones never leave: nobody else has the state
    if any(job.finished(slot) for slot in state.members) or not (joiners or leavers):
        return None
    words = [
        f"{len(group)} rank{'s' if len(group) > 1 else ''} {verb}"
        for group, verb in ((joiners, "join"), (leavers, "leave"))
        if group
    ]
    if state.restart_mode:
        return _restart_for(job, around, now, " and ".join(words), state.elements(joiners), leavers)
    return Signal(Event.CHANGE, " and ".join(words), joiners=sorted(joiners), leavers=sorted(leavers))


def _restart_for(
    job: JobView, around: Surroundings, now: float, words: str, joiners: list[int], leavers: list[int]
) -> Signal | None:
    """There is no boundary: all stop, and those that are to work begin a new world. The plan has weighed leavers."""
    if around.config.observe:
        return None
    good, reason = True, "the plan takes nodes away: the processes of the others start again"
    if not leavers:
        good, reason = restarting.worth(
            len(job.state.elements(job.state.members)), len(joiners), now - job.state.since, around.config
        )
    return Signal(Event.FAULT, f"{words}: {reason}") if good else None


# ---------------------------------------------------------------- entering and offering
def entered(job: JobView, around: Surroundings, now: float) -> Signal | None:
    plan = job.state.offer or job.state.plan
    if plan is None or not all(_is_in(job, slot, plan.generation) for slot in plan.members):
        return None
    return Signal(Event.ENTERED, f"all {len(plan.members)} members run in generation {plan.generation}")


def _is_in(job: JobView, slot: int, generation: int) -> bool:
    status = job.status(slot)
    return job.finished(slot) or (status is not None and status.state == "running" and status.generation == generation)


def outside(job: JobView) -> list[int]:
    """Members of the plan or offer that are not in it."""
    plan = job.state.offer or job.state.plan
    return [slot for slot in plan.members if not _is_in(job, slot, plan.generation)] if plan else []


def enter_timeout(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """Not all are in after the time; the third time those who never got in are named as lost."""
    state, limit = job.state, around.config.enter_timeout
    plan = state.offer or state.plan
    missing = outside(job)
    if plan is None or not missing:
        return None
    began = state.since
    if state.offer is not None:
        inside = [
            job.agents[state.element(s)].progress.get(s, now)
            for s in plan.members
            if s not in missing and state.element(s) in job.agents
        ]
        if inside:
            began = max(began, min(inside))
        else:
            limit = max(limit, ITERATIONS_TO_TAKE_AN_OFFER * (state.seconds or 0.0))
    if now - began < limit:
        return None
    reason = f"slots {missing} did not enter generation {plan.generation} within {limit:g} s"
    lost = (
        dict.fromkeys(missing, f"never entered in {ENTER_TRIES} tries")
        if state.enter_failures + 1 >= ENTER_TRIES
        else {}
    )
    return Signal(Event.TIMEOUT, reason, lost)


# ---------------------------------------------------------------- breaking
def reported(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """Every survivor is at rest; or nobody is left."""
    state = job.state
    survivors = [slot for slot in state.members if slot not in state.lost]
    if state.restart_mode and all(at_rest(job, slot, now) for slot in survivors):
        return Signal(Event.NOBODY, "all processes of the world have ended")
    if not survivors:
        return Signal(Event.NOBODY, "no member is left that has the training state")
    if all(job.finished(slot) or at_rest(job, slot, now) for slot in survivors):
        stopped = [
            slot
            for slot in survivors
            if (status := job.status(slot)) and status.state == "stopped" and not job.finished(slot)
        ]
        if stopped and not any(view.store for view in job.agents.values() if view.alive):
            return None
        if stopped:
            return Signal(Event.REPORTED, f"{len(stopped)} survivors have stopped", joiners=stopped)
        return Signal(Event.NOBODY, "no member is left that has the training state")
    return None


def at_rest(job: JobView, slot: int, now: float) -> bool:
    """The rank has left its collectives for good and waits for a plan above the Break.

    A stopped rank can't enter an offer, so a report counts if it is newer than every plan that the rank could still
    enter.
    """
    state, status = job.state, job.status(slot)
    if status is None or status.state not in AT_REST:
        return False
    if status.broken >= state.broken:
        return True
    view = job.agents[state.element(slot)]
    unchanged = view.last_heard > state.since + PUT_BACK_SECONDS and now - state.since > PUT_BACK_SECONDS
    if status.state == "waiting":
        return unchanged
    newest = max(status.generation, state.plan.generation if state.plan else 0)
    return status.broken >= newest or unchanged


def stragglers(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """Survivors that did not stop in time: nobody who does not answer is waited for."""
    state, slow = job.state, {}
    for slot in state.members:
        status, view = job.status(slot), job.agents.get(state.element(slot))
        if slot in state.lost or status is None or view is None or job.finished(slot) or at_rest(job, slot, now):
            continue
        limit = max(around.config.report_timeout, 3.0 * status.iteration_seconds)
        if now - max(view.progress.get(slot, 0.0), state.since) > limit:
            slow[slot] = f"did not stop within {limit:g} s"
    if not slow:
        return None
    return Signal(Event.LOSS, "; ".join(f"slot {slot} {reason}" for slot, reason in sorted(slow.items())), slow)


def broken_survivors(job: JobView, around: Surroundings, now: float) -> Signal | None:
    """Survivors at rest whose own fault, by a rule of the table, says that their process or node cannot go on."""
    bad: dict[int, str] = {}
    for slot in job.state.members:
        status = job.status(slot)
        if (
            slot not in job.state.lost
            and status
            and status.state == "stopped"
            and status.fault
            and needs_restart(around.classifier, status)
        ):
            bad[slot] = f"stopped: {status.fault.type}: {status.fault.text}"
    if not bad:
        return None
    return Signal(Event.LOSS, "; ".join(f"slot {slot} {reason}" for slot, reason in sorted(bad.items())), bad)


def needs_restart(classifier: Classifier, status: RankStatus) -> bool:
    """A known fault of SEV1 or SEV2. An unknown text is what the peers of a dead rank may say: it is tried again."""
    if status.fault is None:
        return False
    verdict = classifier.match(f"{status.fault.type}: {status.fault.text}")
    return verdict is not None and verdict.action in ("restart", "isolate")


_Look = Callable[[JobView, Surroundings, float], Signal | None]
_LOOK: dict[State, tuple[_Look, ...]] = {
    State.FORMING: (hopeless, ready),
    State.ENTERING: (finished, losses, faults, entered, enter_timeout),
    State.RUNNING: (finished, losses, faults, change),
    State.OFFERING: (finished, losses, faults, entered, enter_timeout),
    State.BREAKING: (finished, losses, broken_survivors, stragglers, reported),
    State.ENDED: (),
}
