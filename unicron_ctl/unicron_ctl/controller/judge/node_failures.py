"""Reports of nodes about themselves (kernel log, memory cgroup, links), and their consequences.

An agent is its user's process, so its word concerns its own job alone. After a node-fatal line the job leaves the node,
unless others say the same within a moment. A line about a process explains the end of the rank that it hit. A link that
flaps is kept in mind for collectives that break soon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from unicron_ctl.controller.judge.evidence import (
    AFTER_SECONDS,
    BEFORE_SECONDS,
    WAIT,
    after_waiting,
    classify,
    explains,
    first_action,
    merge_verdicts,
    pids_on,
)
from unicron_ctl.controller.judge.remedies import inside_of
from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import Failure, JobState
from unicron_ctl.controller.model.node_state import NodeState, SeenEvent
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.protocol.wire import NodeEvent
from unicron_ctl.shared.system.errors import one_line
from unicron_ctl.shared.system.throttle import NAMES, Throttle
from unicron_detector.failures.escalation_table import ISOLATE
from unicron_detector.failures.severity import REPORT, Severity, Verdict
from unicron_detector.health.kernel_log import pid_in

HOLD_SECONDS = 1.0  # before a job leaves a node because of its kernel log: others may say the same
PER_MINUTE = 60  # recorded events of one node that one job's agents report
TEXT_KEPT = 400


@dataclass
class NodeEventQueue:
    """Nodes that report too much, and their events that still wait for others; lost with the process."""

    waiting: set[tuple[str, int]] = field(default_factory=set)
    """Node, and number of its event."""
    throttle: Throttle = field(default_factory=lambda: Throttle(PER_MINUTE / 60, PER_MINUTE))
    silenced: set[str] = field(default_factory=set)
    """Nodes and jobs whose events are not recorded at present."""

    def note(self, event: Event) -> None:
        """Take in a recorded event."""
        if isinstance(event.record, records.NodeEvent) and event.record.action == WAIT:
            self.waiting.add((event.record.node, event.id))

    def may_record(self, node: str, job: str, now: float, room: bool, out: Outcome) -> bool:
        """Return whether one more event is recorded: a node that does not stop talking must not fill the log.

        room: the log may hold more of the job's events.
        """
        who = f"{node} {job}"
        if room and self.throttle.allows(who, now):
            self.silenced.discard(who)
            return True
        if who not in self.silenced:
            if len(self.silenced) >= NAMES:
                self.silenced.clear()
            self.silenced.add(who)
            much = f"{PER_MINUTE} events a minute" if room else f"the log has room for of job {job}"
            reason = f"{node} reports more than {much}: the others are not recorded"
            out.record(None, records.NodeEventsDropped(node=node, of_job=job, reason=reason))
        return False


def undecided_events(nodes: dict[str, NodeState]) -> set[tuple[str, int]]:
    """Return events that the previous controller had not decided yet."""
    return {(name, seen.id) for name, known in nodes.items() for seen in known.events if seen.said.action == WAIT}


def record_node_event(view: View, agent: AgentView, message: NodeEvent, queue: NodeEventQueue, room: bool) -> Outcome:
    """Record an agent's report of its node's event, once. room: the log may hold more of its job's events."""
    out, state = Outcome(), view.state.node(agent.node)
    mark = f"{message.agent[:12]}:{message.number}"
    if (
        mark in state.heard
        or _same_line(state, message)
        or not queue.may_record(agent.node, agent.job, view.now, room, out)
    ):
        return out
    verdict = classify(view.classifier, message)
    action, reason = first_action(verdict, view.config.act_on_node_events, _nothing_to_leave(view, agent))
    record = records.NodeEvent(
        node=agent.node,
        source=message.source,
        text=one_line(message.text)[:TEXT_KEPT],
        code=message.code[:100],
        count=message.count,
        at=message.at if math.isfinite(message.at) else view.now,
        pid=pid_in(message.text) if message.source == "kernel" else None,
        mark=mark,
        cause=verdict.cause,
        severity=int(verdict.severity),
        scope=verdict.scope,
        rule=verdict.rule,
        action=action,
        of_job=agent.job,
        reason=f"{agent.node}: {reason}"[:TEXT_KEPT],
    )
    out.record(None, record)
    if action != WAIT:
        _explain_late(view, record, out)
    return out


def settle_node_events(view: View, queue: NodeEventQueue) -> Iterator[Outcome]:
    """Yield outcomes of events that have waited long enough. Each has to be applied before the next is requested."""
    for name, number in sorted(queue.waiting):
        seen = view.state.node(name).event(number)
        if seen is None:
            queue.waiting.discard((name, number))
        elif view.now - seen.time >= HOLD_SECONDS and (out := _settle_event(view, seen)) is not None:
            queue.waiting.discard((name, number))
            yield out


def _settle_event(view: View, seen: SeenEvent) -> Outcome | None:
    """Judge an event that waited; None while agents may still come back after this controller's restart."""
    out, node = Outcome(), seen.said.node
    job = view.state.jobs.get(seen.said.of_job)
    agents = [a for a in view.live.on_node(node) if job is not None and not job.over and a.alive and a.job == job.job]
    aside = _nothing_to_leave(view, agents[0]) if agents else ""
    action, why = after_waiting(seen.said, seen.time, view.state.nodes, aside, view.state.history.policy)
    if action == ISOLATE and not agents:
        if view.now - view.started_at < view.config.restart_grace:
            return None
        action, why = REPORT, "only recorded: the job does not run there any more"
    elif action == ISOLATE and (not view.slurm.used or view.slurm.node(node) is None):
        action, why = REPORT, "only recorded: there is no Slurm here to move the job with"
    verdict, rules = f'{node}: {action}: "{seen.said.text}": {why}', permission.of_job(view, seen.said.of_job)
    if action == ISOLATE and not rules.may("requeue_hold"):  # its ranks train on until they die
        action, verdict = REPORT, f"would leave {node}, but {rules.refusal('requeue_hold')}: {verdict}"
    out.record(
        None, records.NodeVerdict(node=node, event=seen.id, action=action, of_job=seen.said.of_job, reason=verdict)
    )
    if action == ISOLATE and job is not None:
        out.findings += [_unfit(view, job, agent, seen) for agent in agents]
    return out


def _unfit(view: View, job: JobState, agent: AgentView, seen: SeenEvent) -> Finding:
    reason = f'{agent.node} is not fit for work: "{seen.said.text}" ({seen.said.cause})'
    inside, where = tuple(inside_of(job, agent.slots)), (agent.element, agent.node)
    return Finding(What.NODE, job.job, inside, view.now, Source.AGENT, reason, *where, by="kernel log", seen=seen.id)


def _same_line(state: NodeState, message: NodeEvent) -> bool:
    """Whether another agent of the job on this node has sent the event."""
    text = one_line(message.text)[:TEXT_KEPT]
    return any(
        seen.said.of_job == message.job
        and seen.said.source == message.source
        and seen.said.text == text
        and abs(seen.said.at - message.at) < 2.0
        and not seen.said.mark.startswith(f"{message.agent[:12]}:")
        for seen in state.events
    )


def _nothing_to_leave(view: View, agent: AgentView) -> str:
    job, info = view.state.jobs.get(agent.job), view.slurm.node(agent.node)
    if job is not None and job.moves(agent.element):
        return f"the job leaves {agent.node} already"
    return f"{agent.node} is down ({info.reason})" if info is not None and "DOWN" in info.states else ""


def _explain_late(view: View, event: records.NodeEvent, out: Outcome) -> None:
    """Amend failures of ranks whose ends were reported before the node's event."""
    job = view.state.jobs.get(event.of_job)
    failures = job.failures if job is not None else ()
    # Those of processes that have ended, too: their successors are in their places.
    pids = {*pids_on(view, event.node), *(seen.pid for failure in failures for seen in failure.record.exits)}
    for failure in failures:
        if _may_explain(failure, event, view.now):
            record = failure.record
            cause = view.classifier.table.causes.get(record.cause)
            scope = cause.scope if cause else "unknown"
            rule = "exit-default" if scope == "unknown" else ""
            own = Verdict(record.cause, Severity(record.severity), "", record.reason, rule, scope)
            ended = {seen.slot: seen.pid for seen in record.exits if seen.pid}
            ended = ended or dict.fromkeys(record.slots, record.pid or 0)  # a record of release 0.2
            hit = [slot for slot, pid in ended.items() if explains(event, record.exit_code or 0, pid, own, pids)]
            if hit:
                full = merge_verdicts(own, event, failure.detected_at - event.at)
                some = hit if len(hit) < len(record.slots) else []
                verdict = records.FailureVerdict(failure=failure.id, slots=some, cause=full.cause, reason=full.reason)
                out.record(job, verdict)


def _may_explain(failure: Failure, event: records.NodeEvent, now: float) -> bool:
    record = failure.record
    return (
        record.node == event.node
        and record.kind_of_failure == "rank"
        and record.exit_code is not None
        and now - failure.detected_at <= AFTER_SECONDS
        and failure.detected_at - event.at <= BEFORE_SECONDS
        and event.text not in record.reason
    )
