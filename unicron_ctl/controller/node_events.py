"""What nodes say of themselves: their kernel's log, their memory cgroup, their links.

A node-fatal line puts its node aside; a line about a process explains the end of the rank that it hit; a link that
flaps is kept in mind for the collectives that break soon after. Deciders are pure; what they decide becomes events, and
the node's memory (`NodeState.events`) is a fold over them.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from detector.classify import Classifier
from detector.escalation import ISOLATE, Policy
from detector.kernel_log import pid_in
from detector.memory_events import KILLED
from detector.severity import REPORT, Severity, Verdict
from unicron_ctl.controller import failures
from unicron_ctl.controller.machine import Event as Happening
from unicron_ctl.controller.signals import Signal
from unicron_ctl.controller.soft import AgentView
from unicron_ctl.controller.state import JobState, NodeState
from unicron_ctl.controller.store import Event
from unicron_ctl.errors import one_line
from unicron_ctl.protocol.wire import NodeEvent

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine

HOLD_SECONDS = 1.0  # before a node is put aside on its kernel's word: do others say the same?
BEFORE_SECONDS, AFTER_SECONDS = 10.0, 3.0  # a rank that ends within these of an event may have ended by it
LINK_SECONDS = 60.0  # a collective that breaks so long after a flap may have broken by it
PER_MINUTE = 60  # events of one node that are recorded
TEXT_KEPT = 400
CRASHED = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE, -signal.SIGABRT, 139, 135, 134)
# Rules that tell how a process ended rather than why.
ENDINGS = (
    "exit-",
    "signal-",
    "python",
    "segfault",
    "cuda-generic",
    "unspecified-launch",
    "dataloader-child",
    "default",
)
WAIT, SHARED = "wait", "shared"  # beside the severity table's own actions


# ---------------------------------------------------------------- what an event means (pure)
def classify(classifier: Classifier, event: NodeEvent) -> Verdict:
    """The verdict on what a node says; what this side's table does not know is only reported."""
    if event.source == "link":
        return classifier.cause("link_flapping", event.text)
    if event.source == "memory":
        return classifier.cause("host_out_of_memory", event.text)
    verdict = classifier.match(event.text, event.source)
    if verdict is not None:
        return verdict
    text = f"no rule of the controller knows {event.text[:90]!r}"
    return Verdict("others", Severity.SEV3, REPORT, text, "default", "none")


def first_action(verdict: Verdict, act: bool, aside: str) -> tuple[str, str]:
    """What is done about an event at once, and why. `act`: nodes may be put aside on their kernel's word; `aside`: why
    this one is out of service already, or empty."""
    if verdict.action == REPORT:
        return REPORT, f"{verdict.reason}; only recorded"
    if verdict.scope == "network":
        return REPORT, f"{verdict.reason}; only recorded: whoever suffers from it regroups"
    if verdict.action != ISOLATE:
        return REPORT, f"{verdict.reason}; kept in mind for ranks of this node that end"
    if aside:
        return REPORT, f"{verdict.reason}; only recorded: {aside}"
    if not act:
        return REPORT, f"{verdict.reason}; only recorded (act_on_node_events = false)"
    return WAIT, f"{verdict.reason}; the node is put aside unless others say the same"


def after_waiting(
    cause: str, node: str, since: float, nodes: Mapping[str, NodeState], aside: str, policy: Policy
) -> tuple[str, str]:
    """What becomes of an event that waited: isolate, or shared with so many nodes that none of them is to blame."""
    if aside:
        return REPORT, f"only recorded: {aside}"
    same = sorted(others_with(cause, node, since, nodes, policy))
    if len(same) + 1 >= policy.shared_nodes:
        shown = ", ".join(same[:5]) + (", ..." if len(same) > 5 else "")
        within = f"within {policy.shared_seconds:g} s"
        return SHARED, f"{shown} reported {cause} too {within}: no single node is to blame, none is put aside for it"
    return ISOLATE, "its kernel calls it fatal"


def others_with(cause: str, node: str, at: float, nodes: Mapping[str, NodeState], policy: Policy) -> Iterable[str]:
    """Other nodes that reported the same cause about that time."""
    for name, known in nodes.items():
        if name != node and any(
            seen["cause"] == cause and abs(seen["time"] - at) <= policy.shared_seconds for seen in known.events
        ):
            yield name


def explains(seen: Mapping[str, Any], code: int, pid: int, own: Verdict, pids: Iterable[int]) -> bool:
    """Whether an event can be why a process ended with this code. pids: of all ranks on the node: a line that names one
    of them explains that one only."""
    if seen["action"] == REPORT and seen["scope"] in ("none", "network"):
        return False
    if seen["pid"] is not None and seen["pid"] != pid and seen["pid"] in set(pids):
        return False
    if seen["cause"] == "host_out_of_memory":  # whether a rank was killed for it, its agent knows from the cgroup
        return seen["pid"] == pid if code in KILLED else own.rule == "dataloader-child"
    if seen["cause"] == "exited_abnormally":  # the kernel's line about a crash
        return code in CRASHED
    if code in KILLED:
        return seen["pid"] == pid
    return seen["scope"] in ("hardware", "unknown", "storage") and seen["cause"] != "task_hang"


def merged(own: Verdict, seen: Mapping[str, Any], seconds: float) -> Verdict:
    """The verdict on a process that ended, with what its node said about that time. The worse one leads; of two equals
    the node's where the process's own words only tell how it ended."""
    when = f"{abs(seconds):.1f} s {'before' if seconds >= 0 else 'after'}"
    reason = f'{own.reason}; {seen["node"]} said {when}: "{seen["text"]}"'
    severity = Severity(seen["severity"])
    if severity is Severity.SEV1 and seen["action"] in (SHARED, REPORT):
        return replace(own, reason=reason)  # not this node's fault, or not to be acted upon
    vague = own.rule.startswith(ENDINGS) or own.rule in ("xid-default", "exit-default")
    if severity < own.severity or (severity == own.severity and vague):
        action = ISOLATE if severity is Severity.SEV1 else own.action
        if severity > Severity.SEV2:
            severity = own.severity
        return Verdict(seen["cause"], severity, action, f"{seen['reason']}; {reason}", seen["rule"], seen["scope"])
    return replace(own, reason=reason)


# ---------------------------------------------------------------- the node's memory (fold)
def fold_event(state: Any, event: Event) -> None:
    """`node_event` into the state."""
    p = event.payload
    node = state.node(p["node"])
    node.events.append({**p, "id": event.id, "time": event.time})
    node.heard.append(p["mark"])


def fold_verdict(state: Any, event: Event) -> None:
    """`node_verdict`: what became of an event that waited."""
    p = event.payload
    for seen in state.node(p["node"]).events:
        if seen["id"] == p["event"]:
            seen["action"] = p["action"]


# ---------------------------------------------------------------- in the engine
class NodeEvents:
    """One per engine; holds only what may be lost with the process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recent: dict[str, deque[float]] = {}  # node -> when its last events were recorded
        self._dropped: dict[str, int] = {}
        waiting = ((name, seen) for name, known in engine.state.nodes.items() for seen in known.events)
        self._waiting = {(name, seen["id"]) for name, seen in waiting if seen["action"] == WAIT}

    def receive(self, route: tuple[bytes, ...], message: NodeEvent) -> None:
        """An agent tells what its node said."""
        engine = self._engine
        view = engine.agents.get((message.job, message.element))
        if view is None or view.agent != message.agent or view.route != route:
            return
        view.last_heard = engine.now
        known, mark = engine.state.nodes.get(view.node, NodeState()), f"{message.agent[:12]}:{message.number}"
        if mark in known.heard or self._same_line(known, message) or not self._may(view.node):
            return
        message.at = message.at if math.isfinite(message.at) else engine.now
        verdict = classify(engine.classifier, message)
        action, reason = first_action(verdict, engine.config.act_on_node_events, self._aside(view.node))
        event = engine.emit(
            "node_event",
            node=view.node,
            source=message.source,
            text=one_line(message.text)[:TEXT_KEPT],
            code=message.code[:100],
            count=message.count,
            at=message.at,
            pid=pid_in(message.text) if message.source == "kernel" else None,
            mark=mark,
            cause=verdict.cause,
            severity=int(verdict.severity),
            scope=verdict.scope,
            rule=verdict.rule,
            action=action,
            reason=f"{view.node}: {reason}",
        )
        if action == WAIT:
            self._waiting.add((view.node, event.id))
        else:
            self._explain_late(engine.state.node(view.node).events[-1], event.time)

    def tick(self) -> None:
        """Events that have waited long enough."""
        engine = self._engine
        for name, number in sorted(self._waiting):
            seen = next((each for each in engine.state.node(name).events if each["id"] == number), None)
            if seen is None or (engine.now - seen["time"] >= HOLD_SECONDS and self._settle(name, seen)):
                self._waiting.discard((name, number))

    def note(self, view: AgentView, code: int, at: float, pid: int, own: Verdict) -> Verdict:
        """The verdict on a rank that ended, with what its node said about that time (both by the node's clock)."""
        pids = self._pids(view.node)
        best = None
        known = self._engine.state.nodes.get(view.node)
        for seen in known.events if known else ():
            before = at - seen["at"]
            if -AFTER_SECONDS <= before <= BEFORE_SECONDS and explains(seen, code, pid, own, pids):
                if best is None or (seen["severity"], abs(before)) < (best["severity"], abs(at - best["at"])):
                    best = seen
        if best is None:
            return own
        if best["action"] == WAIT and self._is_shared(best):
            best = {**best, "action": SHARED}
        return merged(own, best, at - best["at"])

    def links(self, job: JobState, node: str, own: Verdict) -> Verdict:
        """A network fault of a job, with the links of its nodes that flapped shortly before; at the node itself that is
        the cause."""
        if own.scope != "network":
            return own
        engine, found = self._engine, []
        for name in sorted({agent.node for agent in job.agents.values() if not agent.gone} | {node}):
            known = engine.state.nodes.get(name)
            flaps = [
                seen
                for seen in (known.events if known else ())
                if seen["cause"] == "link_flapping" and engine.now - seen["time"] <= LINK_SECONDS
            ]
            found += flaps[-1:]
        if not found:
            return own
        said = "; ".join(f'{seen["node"]} {engine.now - seen["time"]:.0f} s before: "{seen["text"]}"' for seen in found)
        mine = any(seen["node"] == node for seen in found)
        return replace(own, reason=f"{own.reason}; {said}", cause="link_flapping" if mine else own.cause)

    # ------------------------------------------------------------ helpers
    def _same_line(self, known: NodeState, message: NodeEvent) -> bool:
        """Another agent on the node has sent it: two jobs share the node."""
        return any(
            seen["source"] == message.source
            and seen["text"] == one_line(message.text)[:TEXT_KEPT]
            and abs(seen["at"] - message.at) < 2.0
            and not seen["mark"].startswith(f"{message.agent[:12]}:")
            for seen in known.events
        )

    def _may(self, node: str) -> bool:
        """A node that will not stop talking must not fill the log."""
        now, recent = self._engine.now, self._recent.setdefault(node, deque(maxlen=PER_MINUTE))
        if len(recent) == PER_MINUTE and now - recent[0] < 60.0:
            self._dropped[node] = self._dropped.get(node, 0) + 1
            if self._dropped[node] == 1:
                reason = f"{node} reports more than {PER_MINUTE} events a minute: the others are not recorded"
                self._engine.emit("node_events_dropped", node=node, reason=reason)
            return False
        self._dropped.pop(node, None)
        recent.append(now)
        return True

    def _aside(self, node: str) -> str:
        if node in self._engine.cluster.put_aside():
            return f"{node} is out of service already"
        info = self._engine.cluster.node_info(node)
        return f"{node} is out of service already ({info.reason})" if info and not info.healthy else ""

    def _is_shared(self, seen: Mapping[str, Any]) -> bool:
        nodes, policy = self._engine.state.nodes, self._engine.state.history.policy
        return after_waiting(seen["cause"], seen["node"], seen["time"], nodes, "", policy)[0] == SHARED

    def _pids(self, node: str) -> list[int]:
        views = [view for view in self._engine.agents.values() if view.node == node and view.alive]
        return [rank.pid for view in views for rank in view.ranks.values() if rank.pid]

    def _settle(self, node: str, seen: Mapping[str, Any]) -> bool:
        """What becomes of an event that waited; False while agents may still come back after a restart of this
        process."""
        engine, state = self._engine, self._engine.state
        action, why = after_waiting(
            seen["cause"], node, seen["time"], state.nodes, self._aside(node), state.history.policy
        )
        jobs = [
            (job, view)
            for (name, _), view in sorted(engine.agents.items())
            if view.node == node and view.alive and (job := state.jobs.get(name)) is not None and not job.ended
        ]
        if action == ISOLATE and not jobs and engine.now - engine.started_at < engine.config.restart_grace:
            return False
        if action == ISOLATE and not jobs:
            action, why = REPORT, "only recorded: no job of ours runs there any more"
        elif action == ISOLATE and (not engine.has_slurm or engine.cluster.node_info(node) is None):
            action, why = REPORT, "only recorded: there is no Slurm here to put the node aside with"
        what = f"{node}: {action}"
        if action == ISOLATE and engine.config.observe:
            action, what = REPORT, f"observe mode: would put {node} aside"
        reason = f'{what}: "{seen["text"]}": {why}'
        engine.emit("node_verdict", node=node, event=seen["id"], action=action, reason=reason)
        if action == ISOLATE:
            for job, view in jobs:
                self._isolate(job, view, seen)
        return True

    def _isolate(self, job: JobState, view: AgentView, seen: Mapping[str, Any]) -> None:
        """The node's ranks of one job are given up, and the node is set down."""
        engine = self._engine
        reason = f'{view.node} is not fit for work: "{seen["text"]}" ({seen["cause"]})'
        verdict = Verdict(seen["cause"], Severity.SEV1, ISOLATE, reason, seen["rule"], seen["scope"])
        inside = {*job.members, *job.joining} - set(job.lost)
        earlier = self._amend_earlier(job, view, seen)
        slots = [slot for slot in view.slots if slot in inside and (not earlier or slot not in earlier["slots"])]
        if earlier and not slots:
            engine.cluster.isolate(job, view, earlier["id"], reason)
            return
        slots = slots or list(view.slots)
        decision, memory = failures.judge(engine, job, slots[0], verdict, None)
        failure = failures.record(
            engine,
            job,
            "node",
            slots,
            verdict,
            decision,
            "kernel log",
            element=view.element,
            node=view.node,
            escalation=memory,
        )
        if not engine.cluster.isolate(job, view, failure, reason):
            return  # the event log says why; its ranks go on as long as they can
        lost = {slot: f"is on a node that was put aside: {seen['cause']}" for slot in slots if slot in inside}
        if lost:
            engine.drive(job, Signal(Happening.LOSS, reason, lost))

    def _amend_earlier(self, job: JobState, view: AgentView, seen: Mapping[str, Any]) -> dict[str, Any] | None:
        """The failure of a rank that has just died of what its node says now: one fault is judged once."""
        engine = self._engine
        for failure in reversed(job.failures):
            if (
                failure["node"] == view.node
                and failure["kind"] == "rank"
                and failure["action"] != ISOLATE
                and abs(failure["detected_at"] - seen["time"]) <= AFTER_SECONDS
            ):
                severity, reason = int(Severity.SEV1), f'{failure["reason"]}; {view.node} said: "{seen["text"]}"'
                changes = {"cause": seen["cause"], "severity": severity, "action": ISOLATE, "reason": reason}
                engine.emit("failure_verdict", job.job, failure=failure["id"], **changes)
                return failure
        return None

    def _explain_late(self, seen: Mapping[str, Any], now: float) -> None:
        """The rank's end was quicker than the word of its node's kernel."""
        engine = self._engine
        for job in engine.state.jobs.values():
            for failure in job.failures:
                if (
                    failure["node"] != seen["node"]
                    or failure["kind"] != "rank"
                    or failure["exit_code"] is None
                    or now - failure["detected_at"] > AFTER_SECONDS
                    or failure["detected_at"] - seen["at"] > BEFORE_SECONDS
                    or seen["text"] in failure["reason"]
                ):
                    continue
                cause = engine.classifier.table.causes.get(failure["cause"])
                scope = cause.scope if cause else "unknown"
                rule = "exit-default" if scope == "unknown" else ""
                own = Verdict(failure["cause"], Severity(failure["severity"]), "", failure["reason"], rule, scope)
                if explains(seen, failure["exit_code"], failure["pid"] or 0, own, self._pids(seen["node"])):
                    full = merged(own, seen, failure["detected_at"] - seen["at"])
                    engine.emit("failure_verdict", job.job, failure=failure["id"], cause=full.cause, reason=full.reason)
