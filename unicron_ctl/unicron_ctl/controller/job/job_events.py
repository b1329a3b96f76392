"""Finds the next event of a job's state machine. Pure: (view, job) -> event and reason.

Losses are not found here: a failure on record has condemned members (`judge`), and that is the event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.job.adoption import may_come_back
from unicron_ctl.controller.job.candidates import (
    forming_slots,
    is_whole,
    leavers,
    may_work,
    missing_places,
    newcomers,
    of_another_size,
    waiting_elements,
)
from unicron_ctl.controller.job.modes import NO_STORE, Trigger, given_up, mode_of
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import look_again
from unicron_ctl.controller.model.state_machine import Event
from unicron_ctl.controller.model.view import View
from unicron_ctl.controller.plan.job_layouts import lost_seconds
from unicron_ctl.controller.plan.reconcile import must_end
from unicron_ctl.controller.replication.forming import formable
from unicron_ctl.controller.sense import fencing
from unicron_ctl.controller.sense.progress import ENTER_TRIES, offer_ignored, offer_taken
from unicron_detector.words import all_of, plural

FEW = 64  # elements that are checked at each turn; more are checked less often
START_SECONDS = 60.0  # of a process, on a busy file system
BEGIN_SECONDS = 600.0  # wait for all nodes of an allocation without a stated minimum; torchrun waits as long
WITH_STATE = ("stopped", "standby")  # states of ranks that have a training state


def next_event(view: View, job: JobView) -> Trigger | None:
    """The next event, the most far-reaching first; None while there is nothing to do."""
    found = (check(view, job) for check in _CHECKS[job.state.phase])
    return next((trigger for trigger in found if trigger is not None), None)


# ---------------------------------------------------------------- all phases with members
def _all_finished(view: View, job: JobView) -> Trigger | None:
    state = job.state
    if state.members and not job.unfinished and len(state.lost) < len(state.members):
        if all(job.finished(slot) for slot in state.survivors()):
            return Trigger(Event.FINISHED, "all members trained to the end")
    return None


def _fatal(view: View, job: JobView) -> Trigger | None:
    """A failure ends the job."""
    if job.state.fatal is None:
        return None
    code, reason = job.state.fatal
    return Trigger(Event.FAILED, reason, code=code)


def _losses(view: View, job: JobView) -> Trigger | None:
    return Trigger(Event.LOSS, _in_words(job.state.condemned)) if job.state.condemned else None


def _in_words(gone: Mapping[int, str]) -> str:
    first = sorted(gone.items())[:20]
    more = f" and {len(gone) - len(first)} more slots" if len(gone) > len(first) else ""
    return "; ".join(f"slot {slot} {reason}" for slot, reason in first) + more


def _regroup(view: View, job: JobView) -> Trigger | None:
    if job.state.regroup:
        return Trigger(Event.FAULT, job.state.regroup)
    return _unsound(view, job) if job.stopped else None


def _unsound(view: View, job: JobView) -> Trigger | None:
    """Members have given up their training state. All do so at the same moment, and a Break before they have heard of
    it would keep their own."""
    found = ((at, job.status(slot)) for slot, at in job.stopped.items())
    since = [at for at, status in found if status is not None and status.went_back is not None]
    if not since or (len(since) < len(job.unfinished) and view.now - min(since) < view.config.fault_grace):
        return None
    return Trigger(Event.FAULT, "the training state is unsound: all go back to one that is sound")


def _relayout(view: View, job: JobView) -> Trigger | None:
    """The plan wants another layout: the members stop for it, and all ranks start again, unless some have trained to
    the end."""
    state = job.state
    if not state.relayout or len(job.unfinished) < len(state.survivors()):
        return None
    if state.phase is Phase.RUNNING:
        return Trigger(Event.FAULT, state.relayout_why)
    return None if state.phase is Phase.FORMING and _patient(view, job) else Trigger(Event.LAYOUT, state.relayout_why)


def _patient(view: View, job: JobView) -> bool:
    """Whether to wait for missing ranks, with which the state of the others is whole: as long as it would take to
    repeat the work without them."""
    worth = min(view.config.state_wait_seconds, lost_seconds(view, job))
    kept = any(status.state in WITH_STATE or status.shards for _, _, status in job.all_ranks())
    return kept and job.seconds_in_phase(view.now) < worth


def _alike(job: JobView) -> bool:
    """Whether all have stopped with the same state, so that their checkpoint is whole. Otherwise the job goes on as it
    is and is asked again later."""
    stops = job.reports().values()
    same = {status.iteration + (status.phase == "stepped") for status in stops}
    return not job.state.lost and len(same) == 1 and all(status.phase != "synced" for status in stops)


def _any_strayed(view: View, job: JobView) -> Trigger | None:
    """Members took an offer while it was being withdrawn."""
    if not job.strayed:
        return None
    return Trigger(Event.FAULT, f"{plural(len(job.strayed), 'member')} took an offer that was withdrawn: all try again")


# ---------------------------------------------------------------- forming
def _ready(view: View, job: JobView) -> Trigger | None:
    """Enough ranks wait: all that can be expected, or the minimum, and no other came for a while."""
    state = job.state
    if _too_early(view, job):
        return None
    whole = waiting_elements(view, job, True)
    if _too_few(view, job, len(whole)):
        return None
    slots = sorted(forming_slots(view, job, whole))
    if missing_places(slots, job.replica) or not job.has_store():
        return None
    inside, full, settle = set(whole), len(whole) >= job.wanted, _settle_seconds(view, state)
    here = _all_expected(view, state, inside)
    if not (full or here) and _just_came(view, job, slots, settle):
        return None
    coming = [e for e, a in job.agents.items() if a.alive and e not in inside and may_work(view, job, e)]
    if full or (here and not coming):
        return Trigger(Event.READY, f"{_ready_nodes(state, slots)}, as are all that are to be had", tuple(slots))
    enough = len(state.elements(slots)) >= state.settings.min_nodes
    settled = view.now - _settle_from(view, job, coming, slots) >= settle
    if enough and settled and not (coming and _partial(view, job, slots)):
        reason = f"{_ready_nodes(state, slots)}, and no other came for {settle:g} s"
        return Trigger(Event.READY, reason, tuple(slots))
    return None


def _too_early(view: View, job: JobView) -> bool:
    """Whether the waiting ranks need not be looked at now, or processes of the last world may still live."""
    return not _look_now(view, job, len(job.agents)) or fencing.holds(view, job) or _still_comes(view, job)


def _still_comes(view: View, job: JobView) -> bool:
    """Whether, of fewer elements than are wanted, one has just become ready: the usual case while a large job starts,
    which need not be looked at as a whole."""
    state, settle = job.state, _settle_seconds(view, job.state)
    if len(job.ready) >= job.wanted or job.replica > 1 or state.settings.spares or state.settings.block > 1:
        return False
    if _all_expected(view, state, job.ready):
        return False
    agent = job.agents.get(job.came)
    if agent is None or job.came not in job.ready or not may_work(view, job, job.came):
        return False
    return is_whole(job, agent, True) and _just_came(view, job, agent.slots, settle)


def _all_expected(view: View, state: JobState, inside: Collection[int]) -> bool:
    """Whether these are all elements that Slurm's listing lets expect."""
    expected = view.expected_elements(state)
    return expected is not None and all(element in inside or _is_gone(state, element) for element in expected)


def _just_came(view: View, job: JobView, slots: Sequence[int], settle: float) -> bool:
    """Whether one of these slots came within the last `settle` seconds. The last ones are asked first: while a large
    job starts, it is one of them."""
    agents, per_node = job.agents, job.per_node
    return any(view.now - agents[slot // per_node].progress.get(slot, 0.0) < settle for slot in reversed(slots))


def _is_gone(state: JobState, element: int) -> bool:
    """Whether a node of an allocation has lost its agent: Slurm starts no other one there."""
    record = state.agents.get(element)
    return state.settings.allocation and record is not None and bool(record.gone)


def _too_few(view: View, job: JobView, count: int) -> bool:
    """Whether `count` elements are too few to form the job, or fewer than wanted while others move."""
    if count < job.state.least and job.replica == 1:
        return True
    return count < job.wanted and mode_of(job.state).awaits_moved(view, job.state)


def _settle_from(view: View, job: JobView, coming: Sequence[int], slots: Iterable[int]) -> float:
    """Since when no other has come. A spare may have been ready for long; the others get their time all the same."""
    agents, per_node = job.agents, job.per_node
    arrival = max([agents[slot // per_node].progress.get(slot, 0.0) for slot in slots])
    since = mode_of(job.state).settle_from(view, job, coming, arrival)
    if not job.state.settings.spares:
        return since
    return max(since, job.state.since + max((job.agents[e].longest_start for e in coming), default=0.0))


def _settle_seconds(view: View, state: JobState) -> float:
    """Seconds to wait for others. All nodes of an allocation have started together."""
    settle = view.config.forming_settle_seconds
    if not state.settings.allocation or state.generation:
        return settle
    return max(settle, START_SECONDS if state.settings.min_stated else BEGIN_SECONDS)


def _ready_nodes(state: JobState, slots: Iterable[int]) -> str:
    """The nodes that can begin, and those that the job has lost, in words."""
    count = len(state.elements(slots))
    gone = sorted({agent.node for agent in state.agents.values() if agent.lost})[:8]
    without = f" without {', '.join(gone)}" if gone else ""
    return f"{count} node{'s are' if count > 1 else ' is'} ready{without}"


def _partial(view: View, job: JobView, slots: Iterable[int]) -> bool:
    """Whether these ranks have only a part of a state, and others that may come have the rest in their nodes' memory.
    The wait for them lasts as long as a start, or as the work that would be repeated without them."""
    worth = min(view.config.state_wait_seconds, max(START_SECONDS, lost_seconds(view, job)))
    reports = {slot: status for slot in slots if (status := job.status(slot)) is not None}
    if job.seconds_in_phase(view.now) >= worth or not any(each.shards for each in reports.values()):
        return False
    found = formable(reports, job.replica)
    return found is None or found.state is None


def _look_now(view: View, job: JobView, count: int) -> bool:
    """Whether it is time to check `count` elements."""
    if view.now < job.ready_look_at:
        return False
    job.ready_look_at = look_again(view.now, max(0, count - FEW))
    return True


def _hopeless(view: View, job: JobView) -> Trigger | None:
    reason = mode_of(job.state).why_exhausted(job.state) or _never_a_replica(job) or must_end(view, job.state)
    if not reason and job.seconds_in_phase(view.now) > BEGIN_SECONDS:
        waits = any(agent.waits for agent in job.agents.values() if agent.alive)
        reason = NO_STORE if waits and job.seconds_without_store(view.now) > BEGIN_SECONDS else ""
    return Trigger(Event.FAILED, reason, code=1) if reason else None


def _never_a_replica(job: JobView) -> str:
    """Why the job's ranks, even if all come, make no replica; empty if they do."""
    nodes, size = job.state.settings.max_nodes, job.replica
    if size <= nodes * job.per_node or of_another_size(job):
        return ""
    has = f"the job has at most {nodes * job.per_node} ({plural(nodes, 'node')} of {job.per_node})"
    return f"a replica ({job.shape}) needs {size} ranks, and {has}: submit it with more nodes, or with a smaller layout"


# ---------------------------------------------------------------- running
def _change(view: View, job: JobView) -> Trigger | None:
    """Newcomers that can be taken in, and elements that the plan takes away."""
    state = job.state
    departing = bool(state.leaving or state.noticed or state.swap)
    if (not job.ready and not departing) or not job.has_store():
        return None
    if not departing and not _look_now(view, job, len(job.ready)):
        return None
    if job.room <= 0 and not departing and job.complete:
        return None  # all that wait are spares
    mode = mode_of(state)
    joiners = newcomers(view, job, mode.join_delay(view.config))
    gone = leavers(job, joiners)
    if not (joiners or gone) or len(job.unfinished) < len(state.members):
        return None
    words = " and ".join(
        f"{len(group)} rank{f's {verb}' if len(group) > 1 else f' {verb}s'}"
        for group, verb in ((joiners, "join"), (gone, "leave"))
        if group
    )
    swapped = [state.swap.reason] if state.swap is not None and spares.leaving_by_swap(job, joiners) else []
    words = "; ".join([words, *swapped, *(swap.text for swap in spares.swaps(view, job, joiners))])
    return mode.change(view, job, words, joiners, sorted(gone))


# ---------------------------------------------------------------- entering and offering
def _all_entered(view: View, job: JobView) -> Trigger | None:
    plan = job.state.offer or job.state.plan
    if plan is None or job.awaited:
        return None
    return Trigger(Event.ENTERED, f"{all_of(len(plan.members), 'member', 'run')} in generation {plan.generation}")


def _enter_timeout(view: View, job: JobView) -> Trigger | None:
    """Not all are in within the time: all try again. The last time-out is a failure of the ranks that never got in,
    unless no other rank has the training state."""
    reason, last = job.progress.overdue, job.state.tries + 1 >= ENTER_TRIES
    return Trigger(Event.TIMEOUT, reason) if reason and (not last or job.state.waits) else None


def _withdraw(view: View, job: JobView) -> Trigger | None:
    """Newcomers failed before the boundary, or no member takes the offer: the members train on."""
    state, gone = job.state, job.state.condemned
    if state.offer is None:
        return None
    if gone:
        if any(slot in state.members for slot in gone) or offer_taken(job, state.offer):
            return None
        return Trigger(Event.WITHDRAW, _in_words(gone))
    reason = offer_ignored(view, job, job.progress)
    return Trigger(Event.WITHDRAW, reason) if reason else None


# ---------------------------------------------------------------- breaking
def _all_reported(view: View, job: JobView) -> Trigger | None:
    """Every survivor is at rest, or no survivor is left."""
    if job.awaited:
        return None
    if len(job.state.lost) >= len(job.state.members):
        trigger: Trigger | None = Trigger(Event.NOBODY, "no member is left that has the training state")
    else:
        trigger = mode_of(job.state).after_stop(view, job)
    if trigger is None:
        return None
    nobody = trigger.event is Event.NOBODY
    relaid = _relayout(view, job)
    if relaid is not None and (_patient(view, job) if nobody else not _alike(job)):
        relaid = None
    if nobody and relaid is None and not given_up(job) and may_come_back(view, job):
        return None
    return None if quorum.waits_for_majority(view, job, job.progress) else relaid or trigger


_Check = Callable[[View, JobView], Trigger | None]
_CHECKS: dict[Phase, tuple[_Check, ...]] = {
    Phase.FORMING: (_fatal, _hopeless, _relayout, _ready),
    Phase.ENTERING: (_fatal, _all_finished, _losses, _regroup, _all_entered, _enter_timeout),
    Phase.RUNNING: (_fatal, _all_finished, _losses, _regroup, _any_strayed, _relayout, _change),
    Phase.OFFERING: (_fatal, _all_finished, _withdraw, _losses, _regroup, _any_strayed, _all_entered, _enter_timeout),
    Phase.BREAKING: (_fatal, _all_finished, _losses, _all_reported),
    Phase.ENDED: (),
}
