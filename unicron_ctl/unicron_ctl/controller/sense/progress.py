"""Members that the others wait for: they stopped by themselves, are late to stop, or late to enter."""

from __future__ import annotations

from collections.abc import Collection

from unicron_ctl.controller.failure_detector import quorum
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import Phase
from unicron_ctl.controller.model.job_view import AT_REST, JobView
from unicron_ctl.controller.model.live import ProgressWatch, look_again
from unicron_ctl.controller.model.view import Order, Outcome, View
from unicron_ctl.controller.sense import fencing
from unicron_ctl.controller.sense.findings import slot_finding
from unicron_ctl.controller.sense.patience import STOPPED_BY_SIGNAL, outside
from unicron_ctl.controller.sense.timing import JobTimes
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_ctl.shared.protocol.wire import Plan
from unicron_transition.generations.layout import deal

WITNESS_SECONDS = 0.05  # after a rank stopped; what is heard later was sent after its peers' connections broke
ENTER_TRIES = 3  # in a row; then members that never entered count as lost
ITERATIONS_TO_TAKE_AN_OFFER = 4
ITERATIONS_TO_STOP = 3.0
BLOCKED_SECONDS = 0.1  # between two checks for members that wait for a stopped rank of their replica
MOST_NAMED = 16  # of the members that stopped at once


def _finding(view: View, job: JobView, what: What, slots: tuple[int, ...], evidence: str, by: str) -> Finding:
    source, status = Source.CLOCK if what is What.LATE else Source.RANK, job.status(slots[0])
    identity = job.state.members.get(slots[0]) or job.state.joining.get(slots[0])
    fault = status.fault if status else None
    return slot_finding(view, job, what, slots, source, evidence, by, identity=identity, fault=fault)


# ---------------------------------------------------------------- stopped by themselves
def check_stopped(view: View, job: JobView) -> Outcome:
    """Report members that stopped by themselves although all agents have spoken since and none is gone: all try again.

    A rank's connections also break because a peer's node died, which only the lease shows. So this is no fault until
    every agent has been heard again (`ping_unheard`).
    """
    out, state = Outcome(), job.state
    if not job.stopped or state.phase is Phase.BREAKING or state.regroup or state.condemned:
        return out
    grace = view.config.fault_grace
    latest = max((since for since in job.stopped.values() if view.now - since >= grace), default=None)
    if latest is None or unheard_since(job, latest):
        return out
    if any((status := job.status(slot)) is not None and status.went_back is not None for slot in job.stopped):
        return out  # all stop, by agreement
    found = _spread(job, [s for s, since in job.stopped.items() if view.now - since >= grace])
    out.findings.append(_finding(view, job, What.STOPPED, found, "stopped by itself", "exception"))
    return out


def ping_unheard(view: View, job: JobView) -> Outcome:
    """Ping every agent that has not spoken since a rank stopped by itself."""
    out = Outcome()
    if job.state.phase is Phase.BREAKING:
        return out
    latest = view.now - WITNESS_SECONDS
    since = max((at for at in job.stopped.values() if at <= latest), default=None)
    if since is not None:
        out.orders += [Order(agent, f"ping {since}", wire.Ping()) for agent in unheard_since(job, since)]
    return out


def _spread(job: JobView, slots: list[int]) -> tuple[int, ...]:
    """Return the first few slots, on as many nodes as possible: if thousands stop at once, more add nothing."""
    return tuple(sorted(sorted(slots, key=lambda slot: (slot % job.per_node, slot))[:MOST_NAMED]))


def unheard_since(job: JobView, since: float) -> list[AgentView]:
    """Return agents with members that have not spoken since a moment after `since`."""
    silent = [agent for agent in job.alive() if agent.last_heard < since + WITNESS_SECONDS]
    inside = (job.state.members, job.state.joining)
    return [agent for agent in silent if any(slot in those for slot in agent.slots for those in inside)]


# ---------------------------------------------------------------- late to stop
def check_late_to_stop(view: View, job: JobView, times: JobTimes, progress: ProgressWatch) -> Outcome:
    """Report survivors that did not stop in time; the job goes on without them.

    It waits for a member that holds the last copy of the training state, as long as no other survivor has reported, and
    records that once.
    """
    out, state = Outcome(), job.state
    limit = max(view.config.report_timeout, fencing.stop_limit(view, job))
    if state.phase is not Phase.BREAKING or job.seconds_in_phase(view.now) <= limit:
        return out
    if view.now < progress.majority_until:
        return out
    awaited = [slot for slot in sorted(job.awaited) if slot not in state.lost and slot not in state.condemned]
    hit = state.hit() if job.replica > 1 else frozenset(awaited)  # all others finish what they have begun
    late = {slot: reason for slot in awaited if (reason := _late(view, job, slot, times, slot in hit))}
    if late and quorum.waits_for_majority(view, job, progress):  # missing members may still go on by themselves
        gone = quorum.missing_elements(view, state)
        late = {slot: reason for slot, reason in late.items() if state.element(slot) not in gone}
    if not late:
        return out
    last = _last_copies(job, awaited)
    for slot, reason in late.items():
        if slot not in last:
            out.findings.append(_finding(view, job, What.LATE, (slot,), reason, "time-out"))
    if last and last <= late.keys():
        _wait_for(job, last, "have not stopped", out)
    return out


def check_blocked(view: View, job: JobView, progress: ProgressWatch) -> Outcome:
    """Note, in replicas that no Break hits, ranks that have stopped although the rest of their replica cannot finish
    its schedule without them. Then the whole replica is told to stop."""
    out, state = Outcome(), job.state
    if state.phase is not Phase.BREAKING or job.replica == 1 or not job.awaited:
        return out
    if view.now < progress.blocked_check_at:
        return out
    progress.blocked_check_at = look_again(view.now, len(state.members), BLOCKED_SECONDS)
    found: set[int] = set()
    for place, replica in enumerate(state.groups()):
        runs = [s for s in replica if s in job.awaited]
        begun = max((status.iteration for slot in runs if (status := job.status(slot)) is not None), default=-1)
        if runs and begun >= 0:
            share = _share(job, place, replica, begun)
            found.update(s for s in replica if s not in job.awaited and _falls_short(job, s, begun, share))
    if not found <= progress.blocked:
        progress.blocked |= found
    return out


def _share(job: JobView, place: int, replica: list[int], iteration: int) -> int:
    """Return how many micro-batches the replica has of that iteration: by the plan, by its speed, or as all others."""
    head = replica[0]
    plan, status = job.state.plan, job.status(head)
    if plan is not None and plan.iteration == iteration and head in plan.assignment:
        return len(plan.assignment[head])
    found = (each for slot in replica if (each := job.status(slot)) is not None and each.iteration == iteration)
    if share := max((each.share for each in found), default=0):
        return share
    count = len(job.state.order) // job.replica
    return len(deal(status.micro_batches, count, place, status.lanes)) if status is not None and count else 0


def _falls_short(job: JobView, slot: int, iteration: int, share: int) -> bool:
    """Whether the rank is at rest and has not finished the schedule of that iteration."""
    status = job.status(slot)
    if status is None or status.state not in AT_REST or slot in job.state.lost:
        return False
    short = status.iteration == iteration and status.phase == "computing" and len(status.done) < share
    return status.state != "stopped" or status.iteration < iteration or short


def _late(view: View, job: JobView, slot: int, times: JobTimes, hit: bool) -> str:
    """Return why a survivor should have stopped by now; empty while it may take longer.

    hit: its replica has lost a rank. Another replica finishes its schedule first, and does not show its progress.
    """
    status, agent, config = job.status(slot), job.agent(slot), view.config
    if status is None or agent is None:
        return ""
    unchanged, least = view.now - agent.progress.get(slot, 0.0), config.report_timeout
    if outside(status):
        limit, why = times.patience.between(slot, status, unchanged, least, config)
        text = f"did not come back from the script's own code after iteration {status.iteration} within {limit:g} s"
        return f"{text}{why and ', '}{why}" if unchanged > limit else ""
    limit = max(least, ITERATIONS_TO_STOP * status.iteration_seconds)
    first = job.state.mode.reports and _first_iteration(status)
    if first or (status.state == "running" and not hit):
        limit = max(limit, times.within(slot, times.limit(job.state, config), config))
    return f"did not stop within {limit:g} s" if min(unchanged, job.seconds_in_phase(view.now)) > limit else ""


def _first_iteration(status: RankStatus) -> bool:
    """Whether the rank computes its first iteration, in which a micro-batch may take minutes because it compiles."""
    computes = status.state == "running" and status.micro_batches > 0 and status.phase == "computing"
    return computes and not status.iteration_seconds and status.process != STOPPED_BY_SIGNAL


def _last_copies(job: JobView, awaited: Collection[int]) -> set[int]:
    """Return awaited members that hold the last copy of the training state of their place: no other rank of that place
    has stopped or finished, so the job can neither go on nor end without them."""
    state, size = job.state, job.replica
    at_rest = (s for s in state.survivors() if s not in job.awaited and s not in state.condemned)
    covered = {
        slot % size
        for slot in at_rest
        if job.finished(slot) or ((status := job.status(slot)) and status.state in ("stopped", "standby"))
    }
    if len(covered) == size:
        return set()
    return {slot for slot in awaited if slot % size not in covered and _holds(job, slot)}


def _holds(job: JobView, slot: int) -> bool:
    """Whether the member's process has been in a generation, so that it holds the training state."""
    state, status = job.state, job.status(slot)
    if not state.mode.keeps_state or status is None or job.identity(slot) != state.members.get(slot):
        return False
    return status.generation > 0 and status.state in ("running", "entering", "stopped", "standby")


def last_copy(job: JobView, slot: int) -> bool:
    """Whether no other member holds the training state of this one's place."""
    state, size = job.state, job.replica
    if slot not in state.members or not _holds(job, slot):
        return False
    mates = (s for s in state.members if s != slot and (s - slot) % size == 0)
    return not any(_holds(job, s) for s in mates if s not in state.lost and s not in state.condemned)


def _wait_for(job: JobView, slots: set[int], what: str, out: Outcome) -> None:
    shown = f"{sorted(slots)[:MOST_NAMED]}{' and more' if len(slots) > MOST_NAMED else ''}"
    reason = f"slots {shown} hold the last copy of the training state and {what}: the job waits for them"
    if job.state.waits != reason:
        out.record(job.state, records.LastCopy(slots=sorted(slots), reason=reason))


# ---------------------------------------------------------------- late to enter
def check_late_to_enter(view: View, job: JobView, times: JobTimes, progress: ProgressWatch) -> Outcome:
    """Note in `progress.overdue` why the time to enter the plan or the offer is over, and report members that have not
    entered in ENTER_TRIES tries in a row.

    The time restarts whenever a member enters or moves bytes of the transfer. It does not run while a member is in the
    script's own code before the boundary, nor for an offer that no member has taken yet.
    """
    progress.overdue = _overdue(view, job, times, progress)
    return _never_entered(view, job, progress)


def _overdue(view: View, job: JobView, times: JobTimes, progress: ProgressWatch) -> str:
    state, limit = job.state, view.config.enter_timeout
    plan, waited = state.offer or state.plan, job.seconds_in_phase(view.now)
    if plan is None or state.phase not in (Phase.ENTERING, Phase.OFFERING) or not job.awaited or waited < limit:
        return ""
    if view.now < progress.enter_check_at or (state.offer is not None and not offer_taken(job, plan)):
        return ""
    progress.enter_check_at = look_again(view.now, len(plan.members))
    last = view.now - waited
    for slot in plan.members:
        status, agent = job.status(slot), job.agent(slot)
        if status is None or agent is None:
            continue
        at = agent.progress.get(slot, last)
        if slot not in job.awaited or (status.state == "entering" and status.entering == plan.generation):
            last = max(last, at)
        elif outside(status):
            patience, _ = times.patience.between(slot, status, view.now - at, limit, view.config)
            if view.now - at <= patience:
                return ""
    if view.now - last < limit:
        return ""
    missing = sorted(job.awaited)
    shown = f"{missing[:20]}{' and more' if len(missing) > 20 else ''}"
    return f"slots {shown} did not enter generation {plan.generation}, and nothing has moved for {limit:g} s"


def offer_taken(job: JobView, offer: Plan) -> bool:
    """Whether a member enters the offer at the boundary. Then all will, since they have agreed on it."""
    return any(
        status.generation == offer.generation or (status.state == "entering" and status.entering == offer.generation)
        for slot in job.state.members
        if (status := job.status(slot)) is not None
    )


def offer_ignored(view: View, job: JobView, progress: ProgressWatch) -> str:
    """Return why the offer must be renewed: it was made long ago, and the members train on without it."""
    state = job.state
    waited, limit = job.seconds_in_phase(view.now), view.config.enter_timeout
    if state.offer is None or waited < limit or view.now < progress.enter_check_at:
        return ""
    limit = max(limit, ITERATIONS_TO_TAKE_AN_OFFER * (state.seconds or 0.0))
    if waited < limit:
        return ""
    progress.enter_check_at = look_again(view.now, len(state.members))
    busy = any(outside(status) for slot in state.members if (status := job.status(slot)) is not None)
    if busy or offer_taken(job, state.offer):
        return ""
    return f"generation {state.offer.generation} was not taken within {limit:g} s"


def _never_entered(view: View, job: JobView, progress: ProgressWatch) -> Outcome:
    """Report members that never entered, the third time in a row; before that all try again. If only they hold the
    training state, all try for ever."""
    out, state = Outcome(), job.state
    if not progress.overdue or state.tries + 1 < ENTER_TRIES:
        return out
    plan, joiners = state.offer or state.plan, set(state.joining)
    if plan is not None:
        joiners.update(plan.joiners)
    holders = {slot for slot in state.members if slot not in joiners and _holds(job, slot)}
    missing = {slot for slot in job.awaited if slot not in state.condemned}
    inside = {slot % job.replica for slot in holders - missing}
    if last := {slot for slot in holders & missing if slot % job.replica not in inside}:
        _wait_for(job, last, f"did not enter in {ENTER_TRIES} tries", out)
        missing -= last
    if missing and quorum.waits_for_majority(view, job, progress):
        gone = quorum.missing_elements(view, state)
        missing = {slot for slot in missing if state.element(slot) not in gone}
    for slot in sorted(missing):
        out.findings.append(
            _finding(view, job, What.LATE, (slot,), f"never entered in {ENTER_TRIES} tries", "time-out")
        )
    return out
