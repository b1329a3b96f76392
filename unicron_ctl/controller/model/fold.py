"""The controller's state is a fold over its event log; a restart replays it.

`fold(state, event)` is the only code that changes a :class:`ClusterState`: live and replayed events go through it
alike. Each kind of record has one rule per part of the state that it changes; kinds without a rule are for people only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from detector import escalation
from detector.escalation import WHOLE_JOB, Decision, Fault, apply_failed, withhold_isolation
from detector.severity import Severity
from unicron_ctl.controller.log import records
from unicron_ctl.controller.log.records import Event
from unicron_ctl.controller.model import asked
from unicron_ctl.controller.model import node as node_rules
from unicron_ctl.controller.model.cluster import ClusterState, Mark, PlanReport
from unicron_ctl.controller.model.job import (
    AgentRecord,
    Decided,
    Ending,
    Failure,
    Identity,
    JobState,
    Phase,
    SlotState,
)
from unicron_ctl.controller.model.node import NodeState

SUPERSEDED_KEPT = 20_000  # of one job: several times as many as it can have elements
ENDED_KEPT = 100  # jobs


class Unfoldable(Exception):
    """A record does not fit the state that it is folded into."""


def replay(events: Iterable[Event], state: ClusterState | None = None) -> ClusterState:
    """The state after all events. A record that cannot be folded sets its job aside; the start never fails on it."""
    state = state or ClusterState()
    for event in events:
        try:
            fold(state, event)
        except Exception as error:  # whatever is in a log, the controller starts
            leave_alone(state, event, f"its log cannot be read at event {event.id} ({event.kind}): {error!r}")
    return state


def leave_alone(state: ClusterState, event: Event, reason: str) -> None:
    """The job of this event is set aside."""
    state.last_event = event.id
    job = state.jobs.get(event.job)
    if job is not None and not job.set_aside:
        job.set_aside = reason


def fold(state: ClusterState, event: Event) -> None:
    """Takes one event into the state. Raises :class:`Unfoldable` for a record that stands for an unreadable one."""
    state.last_event = event.id
    kind = type(event.record)
    if kind is records.Unreadable:
        raise Unfoldable(event.record.reason)
    if rule := _CLUSTER.get(kind):
        rule(state, event, event.record)
    if node_rule := _NODE.get(kind):
        _fold_node(state, event, node_rule)
    job = state.jobs.get(event.job)
    if job is None:
        return
    if job_rule := _JOB.get(kind):
        job_rule(job, event, event.record)
    if kind in _DECISIONS:
        job.decisions.append(Decided(event.time, event.kind, event.generation, event.record.reason))


def _fold_node(state: ClusterState, event: Event, rule: Callable[[NodeState, Event, Any], None]) -> None:
    name = getattr(event.record, "node", "")
    if not name:
        return
    node = state.nodes.setdefault(name, NodeState())
    rule(node, event, event.record)
    if node.downed or node.going_down:
        state.out_of_service.add(name)
    else:
        state.out_of_service.discard(name)


# ---------------------------------------------------------------- the cluster
def _job_registered(state: ClusterState, event: Event, record: records.JobRegistered) -> None:
    if event.job in state.jobs:  # its next step: the plan has forgotten it
        state.plan_inputs = ""
    state.jobs[event.job] = JobState(
        event.job, record.settings, event.time, since=event.time, step=record.step, uid=record.uid
    )
    state.jobs[event.job].submitted = record.submitted


def _started(state: ClusterState, event: Event, record: records.AgentRegistered) -> None:
    """An element that runs is held no more, whoever released it."""
    state.held.discard((event.job, record.element))


def _node_resumed(state: ClusterState, event: Event, record: records.NodeResumed) -> None:
    state.history.readmitted(record.node)
    if record.by_others:
        state.isolated.pop(record.node, None)
    state.withheld.pop(record.node, None)
    asked.settled(state, "", "resume", -1, record.node)


def _isolated(state: ClusterState, event: Event, record: records.Isolated) -> None:
    state.isolated[record.node] = Mark(event.time, event.job)
    state.withheld.pop(record.node, None)


def _isolation_withheld(state: ClusterState, event: Event, record: records.IsolationWithheld) -> None:
    state.withheld[record.node] = Mark(event.time, event.job, record.reason)
    for slot in record.slots:
        withhold_isolation(state.history, event.time, job=event.job, slot=slot)


def _action_failed(state: ClusterState, event: Event, record: records.ActionFailed) -> None:
    if record.slot < 0:
        return  # Slurm refused to take a node out of service: it is asked again
    severity, after = Severity(record.severity), escalation.State(record.state)
    decision = Decision(severity, record.action, record.reason, "action_failed", state=after)
    apply_failed(state.history, decision, event.time, job=event.job, slot=record.slot)


def _replanned(state: ClusterState, event: Event, record: records.Replanned) -> None:
    state.assignment, state.plan_inputs = dict(record.assignment), record.inputs
    state.plan_report = PlanReport(event.time, record.reasons, record.objective, record.waf, record.trigger)


def _remember_fault(state: ClusterState, event: Event, record: records.FailureDetected) -> None:
    """Keeps the escalation's memory: one fault per failure."""
    e = record.escalation
    if e is None:
        return
    fault = Fault(
        event.time, event.job, e.slot, e.node, record.cause, e.scope, Severity(e.severity), e.uptime, e.worked
    )
    after = escalation.State(e.state)
    decision = Decision(
        Severity(record.severity), record.action, record.reason, record.cause, escalation.Event(e.event), after
    )
    state.history.record(fault, decision)


def _remember_progress(state: ClusterState, event: Event, record: records.Record) -> None:
    state.history.progressed(event.job)
    job = state.jobs.get(event.job)
    for slot in state.history.slots(event.job) if job else ():
        if slot == WHOLE_JOB or (job and slot in job.members):
            state.history.recovered(event.job, slot, event.time)


def _observed(state: ClusterState, event: Event, record: records.Observed) -> None:
    if not state.observed_since:
        state.observed_since, state.observed_after = event.time, event.id - 1


def _observed_week(state: ClusterState, event: Event, record: records.ObservedWeek) -> None:
    """The next week begins; with the next thing that is not done, if nothing is observed any more."""
    state.observed_week = record
    state.observed_since, state.observed_after = (event.time, event.id) if record.planned else (0.0, 0)


def _forget(state: ClusterState, event: Event, record: records.JobEnded) -> None:
    state.history.forget_job(event.job)
    for key in [key for key in state.pins if key[0] == event.job]:
        state.pins.pop(key)
    for intent in [key for key in state.intents if key[1] == event.job and key[2] >= 0]:
        state.intents.pop(intent)
    state.assignment.pop(event.job, None)
    state.ended.append(event.job)
    while len(state.ended) > ENDED_KEPT:
        oldest = state.jobs.get(name := state.ended.pop(0))
        if oldest is not None and oldest.ended and name not in state.ended:
            del state.jobs[name]
            state.held = {key for key in state.held if key[0] != name}


_Rule = Callable[[Any, Event, Any], None]
_CLUSTER: dict[type[records.Record], _Rule] = {
    records.JobRegistered: _job_registered,
    records.SlurmAction: asked.action,
    records.SlurmDone: asked.done,
    records.SlurmFailed: asked.failed,
    records.TakeWithheld: asked.withheld,
    records.Unpinned: asked.unpinned,
    records.AgentRegistered: _started,
    records.NodeResumed: _node_resumed,
    records.Isolated: _isolated,
    records.IsolationWithheld: _isolation_withheld,
    records.ActionFailed: _action_failed,
    records.Replanned: _replanned,
    records.Observed: _observed,
    records.ObservedWeek: _observed_week,
    records.FailureDetected: _remember_fault,
    records.Step: _remember_progress,
    records.Steady: _remember_progress,
    records.JobEnded: _forget,
}
_NODE: dict[type[records.Record], _Rule] = {
    records.SlurmAction: node_rules.slurm_action,
    records.SlurmDone: node_rules.slurm_done,
    records.ActionFailed: node_rules.refused,
    records.NodeLost: node_rules.lost,
    records.NodeResumed: node_rules.resumed,
    records.NodeHealth: node_rules.health,
    records.NodeEvent: node_rules.said,
    records.NodeVerdict: node_rules.judged,
    records.Avoided: node_rules.avoided,
}


# ---------------------------------------------------------------- one job: agents and processes
def _slot(job: JobState, slot: int) -> SlotState:
    return job.slots.setdefault(slot, SlotState())


def _agent_registered(job: JobState, event: Event, record: records.AgentRegistered) -> None:
    old = job.agents.get(record.element)
    if old and old.agent != record.agent:
        job.superseded[old.agent] = old.node
        while len(job.superseded) > SUPERSEDED_KEPT:
            job.superseded.pop(next(iter(job.superseded)))
    slots = list(record.slots)
    agent = AgentRecord(record.agent, record.node, record.address, slots, door=record.door, key=record.key)
    agent.confirmed, agent.peer, agent.peer_key = record.confirmed, record.peer, record.peer_key
    job.agents[record.element] = agent
    job.requeued.pop(record.element, None)
    if old is None or old.agent != record.agent:
        # New processes: counting starts again, but a script that dies at once does so on every node.
        job.parted.pop(record.element, None)  # it may be another node
        for slot in record.slots:
            job.slots[slot] = SlotState(quick_deaths=job.slot(slot).quick_deaths)


def _job_confirmed(job: JobState, event: Event, record: records.JobConfirmed) -> None:
    most = max(1, min(job.settings.max_nodes, record.most))
    job.settings = msgspec.structs.replace(job.settings, user=record.user, max_nodes=most)
    job.uid, job.submitted = record.uid, record.submitted


def _agent_confirmed(job: JobState, event: Event, record: records.AgentConfirmed) -> None:
    agent = job.agents.get(record.element)
    if agent and agent.agent == record.agent:
        agent.confirmed = True


def _agent_gone(job: JobState, event: Event, record: records.AgentGone) -> None:
    agent = job.agents.get(record.element)
    if agent and agent.agent == record.agent:
        agent.gone = record.reason


def _agent_back(job: JobState, event: Event, record: records.AgentBack) -> None:
    agent = job.agents.get(record.element)
    if agent and agent.agent == record.agent:
        agent.gone = ""


def _ranks_ready(job: JobState, event: Event, record: records.RanksReady) -> None:
    for number, incarnation in record.incarnations.items():
        slot = _slot(job, number)
        slot.ready, slot.quick_deaths = Identity(record.agent, incarnation), 0


def _rank_start(job: JobState, event: Event, record: records.RankStart) -> None:
    slot = _slot(job, record.slot)
    slot.wanted, slot.not_before, slot.why = record.incarnation, record.not_before, record.reason


def _exit_noted(job: JobState, event: Event, record: records.ExitNoted) -> None:
    _slot(job, record.slot).exit_seen = Identity(record.agent, record.incarnation)


# ---------------------------------------------------------------- one job: failures
def _failure_detected(job: JobState, event: Event, record: records.FailureDetected) -> None:
    job.failures.append(
        Failure(
            id=event.id,
            kind=record.kind_of_failure,
            job=event.job,
            slots=list(record.slots),
            node=record.node,
            element=record.element,
            severity=record.severity,
            cause=record.cause,
            action=record.action,
            reason=record.reason,
            detected_at=event.time,
            detected_by=record.detected_by,
            source=record.source,
            member=record.member,
            exit_code=record.exit_code,
            pid=record.pid,
        )
    )
    if record.noted is not None:
        _slot(job, record.slots[0]).noted = record.noted
    for seen in record.exits:
        slot = _slot(job, seen.slot)
        slot.exit_seen, slot.quick_deaths = Identity(seen.agent, seen.incarnation), seen.quick_deaths
    _condemn(job, record.leave_out)
    job.regroup = job.regroup or record.regroup
    if record.action == escalation.END_JOB:
        code = record.exit_code or 0
        last = f"; last line: {record.last_line}" if record.last_line else ""
        job.fatal = code if 0 < code < 256 else 1, record.reason + last


def _condemn(job: JobState, slots: dict[int, str]) -> None:
    for slot, why in slots.items():
        if (slot in job.members or slot in job.joining) and slot not in job.lost:
            job.condemned.setdefault(slot, why)


def _leave_out(job: JobState, event: Event, record: records.LeaveOut) -> None:
    _condemn(job, record.slots)


def _failure_verdict(job: JobState, event: Event, record: records.FailureVerdict) -> None:
    failure = job.failure(record.failure)
    if failure is None:
        return
    failure.severity = failure.severity if record.severity is None else record.severity
    failure.cause = failure.cause if record.cause is None else record.cause
    failure.action = failure.action if record.action is None else record.action
    failure.slurm = failure.slurm if record.slurm is None else record.slurm
    failure.reason = record.reason or failure.reason


def _failure_action(job: JobState, event: Event, record: records.FailureAction) -> None:
    if failure := job.failure(record.failure):
        failure.actions.append(record.text)


# ---------------------------------------------------------------- one job: generations
def _phase(job: JobState, event: Event, phase: Phase) -> None:
    job.phase, job.since, job.waits = phase, event.time, ""


def _break(job: JobState, event: Event, record: records.Break) -> None:
    fresh = job.phase is not Phase.BREAKING
    job.why, job.regroup, job.condemned = record.reason, "", {}
    if job.joining:
        job.members = {**job.members, **job.joining}
    job.joining, job.offer = {}, None
    job.broken = job.generation = max(job.generation, record.number)
    for one in record.lost:
        identity = Identity(one.agent, one.incarnation)
        if job.members.get(one.slot) == identity:
            job.lost[one.slot] = job.banished[one.slot] = identity
    for failure in job.failures:
        if failure.member and failure.broken_at is None:
            failure.broken_at, failure.generation = event.time, event.generation
    if fresh:
        job.restarts += bool(record.lost)
        job.tries = record.tries
        _phase(job, event, Phase.BREAKING)


def _identities(crews: Iterable[records.Crew]) -> dict[int, Identity]:
    return {
        slot: Identity(crew.agent, incarnation)
        for crew in crews
        for slot, incarnation in zip(crew.slots, crew.incarnations, strict=True)
    }


def _plan(job: JobState, event: Event, record: records.PlanMade) -> None:
    job.plan = record.plan
    job.generation = max(job.generation, record.plan.generation)
    job.members = _identities(record.crews)
    job.joining, job.lost, job.condemned, job.offer, job.regroup = {}, {}, {}, None, ""
    for failure in job.failures:
        if failure.broken_at is not None and failure.resumed_at is None:
            failure.planned_at = event.time
            failure.iteration = record.plan.iteration if record.plan.step is None else record.plan.step
            failure.reused_micro_batches, failure.recomputed_micro_batches = record.reused, record.recomputed
            failure.redistributed_micro_batches = record.redistributed
    _phase(job, event, Phase.ENTERING)


def _adopted(job: JobState, event: Event, record: records.Adopted) -> None:
    job.plan, job.generation = record.plan, max(job.generation, record.plan.generation)
    job.broken = max(job.broken, record.plan.generation - 1)
    job.members = _identities(record.crews)
    job.joining, job.lost, job.condemned, job.offer = {}, {}, {}, None
    job.banished = {slot: who for slot, who in job.banished.items() if job.members.get(slot) != who}
    job.regroup = "" if record.whole else record.reason
    _phase(job, event, Phase.ENTERING)


def _number_used(job: JobState, event: Event, record: records.NumberUsed) -> None:
    job.generation = max(job.generation, event.generation)
    if job.phase is Phase.BREAKING:
        job.broken = job.generation
    elif job.members:
        job.regroup = record.reason


def _parted(job: JobState, event: Event, record: records.Parted) -> None:
    agent = job.agents.get(record.element)
    job.parted[record.element] = agent.agent if agent else ""


def _rejoined(job: JobState, event: Event, record: records.Rejoined) -> None:
    job.parted.pop(record.element, None)


def _reinstated(job: JobState, event: Event, record: records.Reinstated) -> None:
    for slot in record.slots:
        job.lost.pop(slot, None)
        job.banished.pop(slot, None)


def _offer(job: JobState, event: Event, record: records.Offer) -> None:
    job.offer = record.plan
    job.generation = max(job.generation, record.plan.generation)
    job.joining = _identities(record.crews)
    _phase(job, event, Phase.OFFERING)


def _offer_withdrawn(job: JobState, event: Event, record: records.OfferWithdrawn) -> None:
    if job.offer is None or job.offer.generation != record.number:
        return
    for one in record.lost:
        if job.joining.get(one.slot) == Identity(one.agent, one.incarnation):
            job.banished[one.slot] = job.joining[one.slot]
    for failure in job.failures:
        if failure.member and failure.broken_at is None and not any(slot in job.members for slot in failure.slots):
            failure.member = False  # nobody stopped for it
    job.condemned = {slot: why for slot, why in job.condemned.items() if slot in job.members}
    job.offer, job.joining = None, {}
    _phase(job, event, Phase.RUNNING)


def _last_copy(job: JobState, event: Event, record: records.LastCopy | records.StateAwaited) -> None:
    job.waits = record.reason


def _entered(job: JobState, event: Event, record: records.Entered) -> None:
    if job.offer is not None:
        inside = set(job.offer.members)
        job.members = {slot: who for slot, who in {**job.members, **job.joining}.items() if slot in inside}
        joined, job.joining, job.plan, job.offer = set(job.joining), {}, job.offer, None
        _restored(job, event, joined)
    elif job.plan is not None and job.plan.source is not None:  # formed again, with all that work
        _restored(job, event, set(job.members))
    job.condemned = {slot: why for slot, why in job.condemned.items() if slot in job.members}
    job.tries = 0
    for failure in job.failures:
        if failure.planned_at is not None and failure.resumed_at is None:
            failure.resumed_at = event.time
    _phase(job, event, Phase.RUNNING)


def _restored(job: JobState, event: Event, came: set[int]) -> None:
    """Failures all of whose slots are members again, some of them just now."""
    for failure in job.failures:
        slots = failure.slots
        if failure.restored_at is None and slots and came & set(slots) and all(slot in job.members for slot in slots):
            failure.restored_at = event.time


def _reform(job: JobState, event: Event, record: records.Reform) -> None:
    job.plan = job.offer = None
    job.members, job.joining, job.lost, job.condemned, job.worked = {}, {}, {}, {}, {}
    job.regroup = ""
    _phase(job, event, Phase.FORMING)


def _step(job: JobState, event: Event, record: records.Step) -> None:
    job.iteration, job.loss = record.iteration, record.loss
    job.iterations_wanted = record.train_iterations or job.iterations_wanted
    job.recent.append((record.nodes, record.seconds, record.flops))
    rates = [f / s for count, s, f in job.recent if count == record.nodes and s > 0 and f > 0]
    if rates:
        job.measured[record.nodes] = statistics.median(rates)
    job.worked = job.members
    for failure in job.failures:
        if failure.resumed_at is not None and failure.stepped_at is None:
            failure.stepped_at = event.time


def _steady(job: JobState, event: Event, record: records.Steady) -> None:
    """Restart mode: the only progress that can be seen of a program that tells nothing."""
    job.steady, job.restarts, job.worked = event.generation, 0, job.members


def _allotted(job: JobState, event: Event, record: records.Allotted) -> None:
    job.allotted, job.leaving = list(record.elements), list(record.leaving)


def _job_ended(job: JobState, event: Event, record: records.JobEnded) -> None:
    job.ended = Ending(record.code, record.reason, event.time)
    job.offer, job.joining, job.condemned, job.fatal, job.regroup = None, {}, {}, None, ""
    job.slots, job.banished, job.worked = {}, {}, {}
    _phase(job, event, Phase.ENDED)


def _ledger_violation(job: JobState, event: Event, record: records.LedgerViolation) -> None:
    job.ledger_violations += 1


def _set_aside(job: JobState, event: Event, record: records.JobSetAside) -> None:
    job.set_aside = record.reason


_JOB: dict[type[records.Record], _Rule] = {
    records.AgentRegistered: _agent_registered,
    records.JobConfirmed: _job_confirmed,
    records.AgentConfirmed: _agent_confirmed,
    records.AgentGone: _agent_gone,
    records.AgentBack: _agent_back,
    records.Avoided: asked.avoided,
    records.SlurmAction: asked.of_element,
    records.SlurmFailed: asked.of_element_failed,
    records.RanksReady: _ranks_ready,
    records.RankStart: _rank_start,
    records.ExitNoted: _exit_noted,
    records.FailureDetected: _failure_detected,
    records.FailureVerdict: _failure_verdict,
    records.FailureAction: _failure_action,
    records.LeaveOut: _leave_out,
    records.Break: _break,
    records.PlanMade: _plan,
    records.Adopted: _adopted,
    records.NumberUsed: _number_used,
    records.Reinstated: _reinstated,
    records.Parted: _parted,
    records.Rejoined: _rejoined,
    records.Offer: _offer,
    records.OfferWithdrawn: _offer_withdrawn,
    records.LastCopy: _last_copy,
    records.StateAwaited: _last_copy,
    records.Entered: _entered,
    records.Reform: _reform,
    records.Step: _step,
    records.Steady: _steady,
    records.Allotted: _allotted,
    records.JobEnded: _job_ended,
    records.JobSetAside: _set_aside,
    records.LedgerViolation: _ledger_violation,
}
_DECISIONS = frozenset(
    {
        records.FailureDetected,
        records.FailureVerdict,
        records.Break,
        records.PlanMade,
        records.Offer,
        records.OfferWithdrawn,
        records.LastCopy,
        records.Reform,
        records.Allotted,
        records.SlurmAction,
        records.SlurmFailed,
        records.ActionFailed,
        records.Isolated,
        records.IsolationWithheld,
        records.Avoided,
        records.TakeWithheld,
        records.RankStart,
        records.JobEnded,
        records.JobSetAside,
        records.LedgerViolation,
        records.Observed,
        records.NewcomersWait,
    }
)
