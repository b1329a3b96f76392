"""The controller's state is a fold over its event log; a restart replays it.

`fold(state, event)` is the only code that changes a :class:`ClusterState`: live and replayed events go through
it alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from detector.escalation import WHOLE_JOB, Decision, Fault, apply_failed, withhold_isolation
from detector.escalation import Event as EscalationEvent
from detector.escalation import State as EscalationState
from detector.severity import Severity
from unicron_ctl.controller import node_events
from unicron_ctl.controller.state import AgentRecord, ClusterState, HealthReport, Identity, JobState, SlotState
from unicron_ctl.controller.store import Event
from unicron_ctl.protocol.wire import Plan, Settings


def replay(events: Iterable[Event]) -> ClusterState:
    """The state after all events."""
    state = ClusterState()
    for event in events:
        fold(state, event)
    return state


def fold(state: ClusterState, event: Event) -> None:
    """Takes one event into the state. Kinds without a rule are for people only; a log of a later release may hold
    them.
    """
    state.last_event = event.id
    rule = _CLUSTER_RULES.get(event.kind)
    if rule:
        rule(state, event)
    job = state.jobs.get(event.job)
    job_rule = _JOB_RULES.get(event.kind)
    if job is not None and job_rule:
        job_rule(job, event)
    if job is not None and event.kind in _DECISIONS:
        job.decisions.append(
            {
                "time": event.time,
                "kind": event.kind,
                "generation": event.generation,
                "reason": event.payload.get("reason", ""),
            }
        )


_DECISIONS = {
    "failure_detected",
    "failure_verdict",
    "break",
    "plan",
    "offer",
    "reform",
    "allotted",
    "slurm_action",
    "slurm_error",
    "action_failed",
    "isolated",
    "isolation_withheld",
    "rank_start",
    "job_ended",
    "ledger_violation",
    "observed",
    "newcomers_wait",
}


# ---------------------------------------------------------------- the cluster
def _job_registered(state: ClusterState, event: Event) -> None:
    settings = msgspec.convert(event.payload["settings"], Settings)
    step = event.payload.get("step", 0)
    if event.job in state.jobs:  # its next step: the plan has forgotten it
        state.plan_inputs = ""
    state.jobs[event.job] = JobState(event.job, settings, event.time, since=event.time, step=step)


def _slurm_action(state: ClusterState, event: Event) -> None:
    action, node = event.payload["action"], event.payload.get("node") or ""
    key = f"{event.job}_{event.payload.get('element')}"
    if action == "pin":
        state.pins[key] = {"node": node, "at": event.time}
    elif action in ("hold", "requeue_hold", "cancel"):
        state.pins.pop(key, None)
    elif action == "down":
        record = state.node(node)
        record.downed, record.reason = True, event.payload.get("slurm_reason", "")
        record.suspicion, record.suspected_at = record.reason, event.time


def _unpinned(state: ClusterState, event: Event) -> None:
    state.pins.pop(f"{event.job}_{event.payload['element']}", None)


def _node_lost(state: ClusterState, event: Event) -> None:
    state.node(event.payload["node"]).lost_at = event.time


def _node_resumed(state: ClusterState, event: Event) -> None:
    node = state.node(event.payload["node"])
    node.downed, node.reason, node.resumed_at = False, "", event.time
    node.unverified = not event.payload.get("verified", True)
    state.history.readmitted(event.payload["node"])
    state.isolated.pop(event.payload["node"], None)
    state.withheld.pop(event.payload["node"], None)


def _isolated(state: ClusterState, event: Event) -> None:
    node = event.payload["node"]
    state.isolated[node] = {"at": event.time, "job": event.job}
    state.withheld.pop(node, None)


def _isolation_withheld(state: ClusterState, event: Event) -> None:
    p = event.payload
    state.withheld[p["node"]] = {"since": event.time, "job": event.job, "reason": p["reason"]}
    for slot in p["slots"]:
        withhold_isolation(state.history, event.time, job=event.job, slot=slot)


def _action_failed(state: ClusterState, event: Event) -> None:
    p = event.payload
    if p["slot"] < 0:
        return  # Slurm refused to set a node down: the isolation goes on
    decision = Decision(
        Severity(p["severity"]), p["action"], p["reason"], "action_failed", state=EscalationState(p["state"])
    )
    apply_failed(state.history, decision, event.time, job=event.job, slot=p["slot"])


def _node_health(state: ClusterState, event: Event) -> None:
    p = event.payload
    node = state.node(p["node"])
    report = HealthReport(p["verdict"], p["reason"], p["source"], event.time, p["checked_at"])
    if p["source"] == "pair-test":
        node.paired = report
    else:
        node.health = report
        if p["verdict"] in ("good", "warning"):
            node.unverified = False


def _replanned(state: ClusterState, event: Event) -> None:
    state.assignment = dict(event.payload["assignment"])
    state.plan_inputs = event.payload["inputs"]
    state.plan_report = {
        "time": event.time,
        **{key: event.payload[key] for key in ("reasons", "objective", "waf", "trigger")},
    }


def _history_fault(state: ClusterState, event: Event) -> None:
    """Keeps the escalation's memory: one fault per failure, under its first slot."""
    p = event.payload
    if not p.get("escalation"):
        return
    e = p["escalation"]
    fault = Fault(
        event.time,
        event.job,
        e.get("slot", p["slots"][0] if p["slots"] else WHOLE_JOB),
        e.get("node", p["node"]),
        p["cause"],
        e["scope"],
        Severity(e["severity"]),
        e["uptime"],
        e["worked"],
    )
    decision = Decision(
        Severity(p["severity"]),
        p["action"],
        p["reason"],
        p["cause"],
        EscalationEvent(e["event"]),
        EscalationState(e["state"]),
    )
    state.history.record(fault, decision)


def _history_step(state: ClusterState, event: Event) -> None:
    state.history.progressed(event.job)
    job = state.jobs.get(event.job)
    for slot in (*job.members, WHOLE_JOB) if job else ():
        if (event.job, slot) in state.history.states:
            state.history.recovered(event.job, slot, event.time)


def _history_ended(state: ClusterState, event: Event) -> None:
    state.history.forget_job(event.job)
    for key in [key for key in state.pins if key.rpartition("_")[0] == event.job]:
        state.pins.pop(key)
    state.assignment.pop(event.job, None)


_CLUSTER_RULES = {
    "node_event": node_events.fold_event,
    "node_verdict": node_events.fold_verdict,
    "job_registered": _job_registered,
    "slurm_action": _slurm_action,
    "unpinned": _unpinned,
    "node_lost": _node_lost,
    "node_resumed": _node_resumed,
    "isolated": _isolated,
    "isolation_withheld": _isolation_withheld,
    "action_failed": _action_failed,
    "node_health": _node_health,
    "replanned": _replanned,
    "failure_detected": _history_fault,
    "step": _history_step,
    "steady": _history_step,
    "job_ended": _history_ended,
}


# ---------------------------------------------------------------- one job
def _agent_registered(job: JobState, event: Event) -> None:
    p = event.payload
    old = job.agents.get(p["element"])
    if old and old.agent != p["agent"]:
        job.superseded = [*job.superseded, old.agent][-200:]
    job.agents[p["element"]] = AgentRecord(p["agent"], p["node"], p["address"], list(p["slots"]))
    if old is None or old.agent != p["agent"]:
        for slot in p[
            "slots"
        ]:  # new processes: counting starts anew, but a script that dies at once does so on every node
            job.slots[slot] = SlotState(quick_deaths=job.slot(slot).quick_deaths)


def _agent_gone(job: JobState, event: Event) -> None:
    record = job.agents.get(event.payload["element"])
    if record and record.agent == event.payload["agent"]:
        record.gone = event.payload["reason"]


def _agent_back(job: JobState, event: Event) -> None:
    record = job.agents.get(event.payload["element"])
    if record and record.agent == event.payload["agent"]:
        record.gone = ""


def _rank_ready(job: JobState, event: Event) -> None:
    slot = job.slot(event.payload["slot"])
    slot.ready = Identity(event.payload["agent"], event.payload["incarnation"])
    slot.quick_deaths = 0


def _rank_start(job: JobState, event: Event) -> None:
    slot = job.slot(event.payload["slot"])
    slot.wanted, slot.not_before, slot.why = (
        event.payload["incarnation"],
        event.payload["not_before"],
        event.payload["reason"],
    )


def _failure_detected(job: JobState, event: Event) -> None:
    p = event.payload
    job.failures.append(
        {
            "id": event.id,
            "kind": p["kind_of_failure"],
            "job": job.job,
            "slots": p["slots"],
            "slot": p["slots"][0] if p["slots"] else None,
            "node": p["node"],
            "element": p["element"],
            "severity": p["severity"],
            "cause": p["cause"],
            "action": p["action"],
            "reason": p["reason"],
            "detected_at": event.time,
            "detected_by": p["detected_by"],
            "member": p["member"],
            "broken_at": None,
            "planned_at": None,
            "resumed_at": None,
            "stepped_at": None,
            "generation": None,
            "reused_micro_batches": 0,
            "recomputed_micro_batches": 0,
            "redistributed_micro_batches": 0,
            "iteration": None,
            "actions": [],
            "restored_at": None,
            "exit_code": p.get("exit_code"),
            "pid": p.get("pid"),
            "slurm": "",
        }
    )
    if "noted" in p:
        job.slot(p["slots"][0]).noted = p["noted"]
    for mark in p.get("exits", ()):
        slot = job.slot(mark["slot"])
        slot.exit_seen = Identity(mark["agent"], mark["incarnation"])
        slot.quick_deaths = mark["quick_deaths"]


_AMENDED = ("severity", "cause", "action", "reason", "slurm")


def _failure_verdict(job: JobState, event: Event) -> None:
    for failure in job.failures:
        if failure["id"] == event.payload["failure"]:
            failure.update({key: event.payload[key] for key in _AMENDED if key in event.payload})


def _failure_action(job: JobState, event: Event) -> None:
    for failure in job.failures:
        if failure["id"] == event.payload["failure"]:
            failure["actions"].append(event.payload["text"])


def _exit_noted(job: JobState, event: Event) -> None:
    p = event.payload
    job.slot(p["slot"]).exit_seen = Identity(p["agent"], p["incarnation"])


def _phase(job: JobState, event: Event, phase: str) -> None:
    job.phase, job.since = phase, event.time


def _break(job: JobState, event: Event) -> None:
    fresh = job.phase != "breaking"
    job.why = event.payload["reason"]
    job.members.update(job.joining)
    job.joining, job.offer = {}, None
    job.broken = job.generation = max(job.generation, event.payload["number"])
    for slot in event.payload["lost"]:
        if slot in job.members and slot not in job.lost:
            job.lost[slot] = job.members[slot]
            job.banished = [*job.banished, (slot, job.members[slot])][-500:]
    for failure in job.failures:
        if failure["member"] and failure["broken_at"] is None:
            failure["broken_at"] = event.time
            failure["generation"] = event.generation
    if fresh:
        job.restarts += bool(event.payload["lost"])
        job.enter_failures = event.payload.get("enter_failures", 0)
        _phase(job, event, "breaking")


def _plan(job: JobState, event: Event) -> None:
    p = event.payload
    job.plan = msgspec.convert(p["plan"], Plan, strict=False)
    job.generation = max(job.generation, job.plan.generation)
    job.members = {int(slot): Identity(*identity) for slot, identity in p["identities"].items()}
    job.joining, job.lost, job.offer = {}, {}, None
    for failure in job.failures:
        if failure["broken_at"] is not None and failure["resumed_at"] is None:
            failure["planned_at"] = event.time
            failure["iteration"] = job.plan.iteration if job.plan.step is None else job.plan.step
            failure["reused_micro_batches"], failure["recomputed_micro_batches"] = p["reused"], p["recomputed"]
            failure["redistributed_micro_batches"] = p["redistributed"]
    _phase(job, event, "entering")


def _offer(job: JobState, event: Event) -> None:
    p = event.payload
    job.offer = msgspec.convert(p["plan"], Plan, strict=False)
    job.generation = max(job.generation, job.offer.generation)
    job.joining = {int(slot): Identity(*identity) for slot, identity in p["identities"].items()}
    _phase(job, event, "offering")


def _entered(job: JobState, event: Event) -> None:
    if job.offer is not None:
        job.members = {
            slot: identity for slot, identity in {**job.members, **job.joining}.items() if slot in job.offer.members
        }
        joined, job.joining, job.plan, job.offer = set(job.joining), {}, job.offer, None
        for failure in job.failures:
            if (
                failure["restored_at"] is None
                and failure["slots"]
                and set(failure["slots"]) <= set(job.members)
                and joined & set(failure["slots"])
            ):
                failure["restored_at"] = event.time
    elif job.plan is not None and job.plan.source is not None:  # formed anew, with all that work
        for failure in job.failures:
            if failure["restored_at"] is None and failure["slots"] and set(failure["slots"]) <= set(job.members):
                failure["restored_at"] = event.time
    job.enter_failures = 0
    for failure in job.failures:
        if failure["planned_at"] is not None and failure["resumed_at"] is None:
            failure["resumed_at"] = event.time
    _phase(job, event, "running")


def _reform(job: JobState, event: Event) -> None:
    job.plan, job.offer, job.members, job.joining, job.lost = None, None, {}, {}, {}
    for slot in job.slots.values():
        slot.worked = None
    _phase(job, event, "forming")


def _step(job: JobState, event: Event) -> None:
    p = event.payload
    job.iteration, job.loss = p["iteration"], p["loss"]
    job.iterations_wanted = p.get("train_iterations") or job.iterations_wanted
    nodes, flops = p["nodes"], p["flops"]
    job.recent.append((nodes, p["seconds"], flops))
    rates = [f / s for count, s, f in job.recent if count == nodes and s > 0 and f > 0]
    if rates:
        job.measured[nodes] = statistics.median(rates)
    for slot, identity in job.members.items():
        if job.slot(slot).worked != identity:
            job.slot(slot).worked = identity
    for failure in job.failures:
        if failure["resumed_at"] is not None and failure["stepped_at"] is None:
            failure["stepped_at"] = event.time


def _steady(job: JobState, event: Event) -> None:
    """Restart mode: the only progress that can be seen of a program that tells nothing."""
    job.steady, job.restarts = event.generation, 0
    for slot, identity in job.members.items():
        job.slot(slot).worked = identity


def _allotted(job: JobState, event: Event) -> None:
    job.allotted, job.leaving = list(event.payload["elements"]), list(event.payload["leaving"])


def _job_ended(job: JobState, event: Event) -> None:
    job.ended = {"code": event.payload["code"], "reason": event.payload["reason"], "time": event.time}
    job.offer, job.joining = None, {}
    _phase(job, event, "ended")


def _ledger_violation(job: JobState, event: Event) -> None:
    job.ledger_violations += 1


_JOB_RULES = {
    "agent_registered": _agent_registered,
    "agent_gone": _agent_gone,
    "agent_back": _agent_back,
    "rank_ready": _rank_ready,
    "rank_start": _rank_start,
    "failure_detected": _failure_detected,
    "failure_verdict": _failure_verdict,
    "failure_action": _failure_action,
    "exit_noted": _exit_noted,
    "break": _break,
    "plan": _plan,
    "offer": _offer,
    "entered": _entered,
    "reform": _reform,
    "step": _step,
    "steady": _steady,
    "allotted": _allotted,
    "job_ended": _job_ended,
    "ledger_violation": _ledger_violation,
}
