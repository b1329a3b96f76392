"""Fold rules for the cluster: nodes, the plan, the escalation's history, and what goes with a job."""

from __future__ import annotations

from collections import deque

from unicron_ctl.controller.model import node_state, slurm_rules
from unicron_ctl.controller.model.cluster_state import ClusterState, DeferredTake, Mark, PairResults, PlanReport
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_detector.failures import escalation_table
from unicron_detector.failures.fault_history import WHOLE_JOB, Fault
from unicron_detector.failures.severity import Severity

ENDED_KEPT = 100  # jobs
PAIRS_KEPT = 200  # times of pairs of one kind


def on_job_registered(state: ClusterState, event: Event, record: records.JobRegistered) -> None:
    if event.job in state.jobs:  # its next step: the plan has forgotten it
        state.plan_inputs = ""
    began = record.runs.get(record.step, event.time)
    job = JobState(event.job, record.settings, began, since=event.time, step=record.step, uid=record.uid)
    job.submitted, job.trains, job.runs = record.submitted, record.trains, dict(record.runs)
    job.nodes, job.nodes_of_restart = record.nodes, record.restarts
    state.jobs[event.job] = job


def on_started(state: ClusterState, event: Event, record: records.AgentRegistered) -> None:
    """An element that runs is held no more, even if an admin released it."""
    if (job := state.jobs.get(event.job)) is not None:
        state.held.discard((event.job, job.block_of(record.element)))


def on_node_resumed(state: ClusterState, event: Event, record: records.NodeResumed) -> None:
    state.history.forget_node(record.node)
    state.withheld.pop(record.node, None)
    slurm_rules.settle_intents(state, "", "resume", -1, record.node)


def on_isolated(state: ClusterState, event: Event, record: records.NodeIsolated) -> None:
    state.isolated[record.node] = Mark(event.time, event.job)
    state.withheld.pop(record.node, None)


def on_take_deferred(state: ClusterState, event: Event, record: records.TakeDeferred) -> None:
    key = record.node, event.job, record.element
    if record.over:
        state.deferred.pop(key, None)
    else:
        state.deferred[key] = DeferredTake(record.failure, record.text)


def on_isolation_withheld(state: ClusterState, event: Event, record: records.IsolationWithheld) -> None:
    state.withheld[record.node] = Mark(event.time, event.job, record.reason)
    for slot in record.slots:  # its process is started again in place instead
        state.history.set_state(event.job, slot, escalation_table.State.RESTARTING, event.time)


def on_action_failed(state: ClusterState, event: Event, record: records.ActionFailed) -> None:
    if record.slot < 0:
        return  # Slurm refused to take a node out of service: it is asked again
    state.history.set_state(event.job, record.slot, escalation_table.State(record.state), event.time)


def on_replanned(state: ClusterState, event: Event, record: records.ClusterReplanned) -> None:
    state.assignment, state.plan_inputs = dict(record.assignment), record.inputs
    state.layouts = dict(record.layouts)
    state.plan_report = PlanReport(event.time, record.reasons, record.objective, record.waf, record.trigger)


def on_remember_fault(state: ClusterState, event: Event, record: records.FailureDetected) -> None:
    """Keeps the escalation's history: one fault per failure and slot."""
    e = record.escalation
    if e is None:
        return
    after, what = escalation_table.State(e.state), (e.node, record.cause, e.scope, Severity(e.severity))
    for slot in (e.slot, *e.others):
        state.history.record(Fault(event.time, event.job, slot, *what, e.uptime, e.worked), after)


def on_remember_progress(state: ClusterState, event: Event, record: records.Record) -> None:
    job = state.jobs.get(event.job)
    if job and not job.mode.keeps_state and isinstance(record, records.Step):
        return  # a plain program may make the same few steps again and again
    state.history.note_progress(event.job)
    for slot in state.history.acting(event.job) if job else ():
        if slot == WHOLE_JOB or (job and slot in job.members):
            state.history.note_recovery(event.job, slot, event.time)


def on_pair_test(state: ClusterState, event: Event, record: records.PairTest) -> None:
    """Learns from a pair test."""
    if record.state in ("good", "slow", "bad"):
        results = state.pair_results.get(record.evidence, PairResults()).of(event.time)
        results.tested += 1
        results.confirmed += record.state != "good"
        state.pair_results[record.evidence] = results
    if record.seconds:
        state.pair_seconds.setdefault(record.alike, deque(maxlen=PAIRS_KEPT)).extend(record.seconds)


def on_observed(state: ClusterState, event: Event, record: records.ActionObserved) -> None:
    if not state.observed_since:
        state.observed_since, state.observed_after = event.time, event.id - 1


def on_observed_week(state: ClusterState, event: Event, record: records.ObservedWeek) -> None:
    """Begins the next week; if nothing is observed any more, it begins with the next action that is not done."""
    state.observed_week = record
    state.observed_since, state.observed_after = (event.time, event.id) if record.planned else (0.0, 0)


def on_paused(state: ClusterState, event: Event, record: records.ActionsPaused) -> None:
    state.paused[record.partition] = record.until


def on_unpaused(state: ClusterState, event: Event, record: records.ActionsResumed) -> None:
    """Ending the pause for all partitions ends it for each."""
    if record.partition:
        state.paused.pop(record.partition, None)
    else:
        state.paused.clear()


def on_needs_admin(state: ClusterState, event: Event, record: records.NeedsAdmin) -> None:
    if record.over:
        state.attention.pop(record.key, None)
    else:
        state.attention[record.key] = event.time


def on_told(state: ClusterState, event: Event, record: records.NoticesSent) -> None:
    state.told[record.target] = max(record.upto, state.told.get(record.target, 0))


def on_restored(state: ClusterState, event: Event, record: records.LogRestored) -> None:
    """Drops requests to Slurm that were open when the backup was taken: they may be wrong by now. An admin checks the
    nodes first, and ends the pause."""
    state.intents.clear()
    state.pins.clear()
    state.deferred.clear()
    for name, node in state.nodes.items():
        if node.going_down:
            node_state.on_resumed(node, event, records.NodeResumed(node=name, verified=False))
            state.out_of_service.discard(name)
    state.paused[""] = 0.0


def on_forget(state: ClusterState, event: Event, record: records.JobEnded) -> None:
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
            state.once_held = {key: at for key, at in state.once_held.items() if key[0] != name}
