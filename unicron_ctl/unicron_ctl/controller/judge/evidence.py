"""Verdicts on a text, an exit or a node's log, by the severity table (unicron_detector.failures.classify)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace

from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.node_state import NodeState, SeenEvent
from unicron_ctl.controller.model.view import View
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol.structs import Fault
from unicron_ctl.shared.protocol.wire import NodeEvent
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.states import OVER
from unicron_detector.failures.classify import Classifier
from unicron_detector.failures.escalation_table import ISOLATE
from unicron_detector.failures.fault_history import Policy
from unicron_detector.failures.severity import REPORT, Severity, Verdict
from unicron_detector.health.oom_kills import KILL_CODES

BEFORE_SECONDS, AFTER_SECONDS = 10.0, 3.0  # a rank that ends within these of an event may have ended by it
LINK_SECONDS = 60.0  # a collective that breaks so long after a flap may have broken by it
CRASH_CODES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE, -signal.SIGABRT, 139, 135, 134)
# Rules that describe how a process ended rather than why.
ENDINGS = (
    *("exit-", "signal-", "python", "segfault", "cuda-generic"),
    *("unspecified-launch", "dataloader-child", "guess-", "default"),
)
WAIT, SHARED = "wait", "shared"  # actions for node events, in addition to those of the severity table


# ---------------------------------------------------------------- ranks
def known_fault(classifier: Classifier, fault: Fault) -> Verdict | None:
    """Return a rule's verdict on a rank's own words; None if no rule knows the text."""
    return classifier.match(f"{fault.type}: {fault.text}")


# ---------------------------------------------------------------- a node's own words
def classify(classifier: Classifier, event: NodeEvent) -> Verdict:
    """Return the verdict on a line of a node. A line that this side's table does not know is only reported."""
    if event.source == "link":
        return classifier.cause("link_flapping", event.text)
    if event.source == "memory":
        return classifier.cause("host_out_of_memory", event.text)
    verdict, note = classifier.judge(event.text, event.source)
    if verdict is not None:
        return verdict
    text = f"no rule of the controller knows {event.text[:90]!r}" + (f"; {note}" if note else "")
    return Verdict("others", Severity.SEV3, REPORT, text, "default", "none")


def first_action(verdict: Verdict, act: bool, aside: str) -> tuple[str, str]:
    """Return the immediate action on an event, and why.

    act: jobs may leave nodes on their kernel's word. aside: why there is nothing to leave any more, or empty.
    """
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
    return WAIT, f"{verdict.reason}; the job leaves the node unless others say the same"


def after_waiting(
    event: records.NodeEvent, since: float, nodes: Mapping[str, NodeState], aside: str, policy: Policy
) -> tuple[str, str]:
    """Return the action on an event that waited: isolate, or shared if several of the job's nodes report the same."""
    if aside:
        return REPORT, f"only recorded: {aside}"
    same = sorted(others_with(event, since, nodes, policy))
    if len(same) + 1 >= policy.shared_nodes:
        shown = ", ".join(same[:5]) + (", ..." if len(same) > 5 else "")
        within = f"within {policy.shared_seconds:g} s"
        return SHARED, f"{shown} reported {event.cause} too {within}: no single node is to blame, none is left for it"
    return ISOLATE, "its kernel calls it fatal"


def others_with(event: records.NodeEvent, at: float, nodes: Mapping[str, NodeState], policy: Policy) -> Iterable[str]:
    """Yield other nodes on which the same job reported the same cause about that time."""
    kind = event.of_job, event.cause
    for name, state in nodes.items():
        if name != event.node and any(
            (seen.said.of_job, seen.said.cause) == kind and abs(seen.time - at) <= policy.shared_seconds
            for seen in state.events
        ):
            yield name


def explains(event: records.NodeEvent, code: int, pid: int, own: Verdict, pids: Iterable[int]) -> bool:
    """Whether an event can explain that a process ended with this code.

    pids: of all ranks on the node; a line that names one of them explains only that one.
    """
    if event.action == REPORT and event.scope in ("none", "network"):
        return False
    if event.pid is not None and event.pid != pid and event.pid in set(pids):
        return False
    if event.cause == "host_out_of_memory":  # a rank's agent knows from the cgroup whether it was killed for that
        return event.pid == pid if code in KILL_CODES else own.rule == "dataloader-child"
    if event.cause == "exited_abnormally":  # the kernel's line about a crash
        return code in CRASH_CODES
    if code in KILL_CODES:
        return event.pid == pid
    return event.scope in ("hardware", "unknown", "storage") and event.cause != "task_hang"


def merge_verdicts(own: Verdict, event: records.NodeEvent, seconds: float, action: str | None = None) -> Verdict:
    """Return the verdict on a process that ended, together with what its node reported about that time.

    The worse verdict leads; of two equal ones the node's, if the process's own words only describe how it ended.
    action: in place of the event's own.
    """
    when = f"{abs(seconds):.1f} s {'before' if seconds >= 0 else 'after'}"
    reason = f'{own.reason}; {event.node} said {when}: "{event.text}"'
    severity = Severity(event.severity)
    if severity is Severity.SEV1 and (action or event.action) in (SHARED, REPORT):
        return replace(own, reason=reason)  # not this node's fault, or not to be acted upon
    vague = own.rule.startswith(ENDINGS) or own.rule in ("xid-default", "exit-default")
    if severity < own.severity or (severity == own.severity and vague):
        then = ISOLATE if severity is Severity.SEV1 else own.action
        if severity > Severity.SEV2:
            severity = own.severity
        return Verdict(event.cause, severity, then, f"{event.reason}; {reason}", event.rule, event.scope)
    return replace(own, reason=reason)


def is_shared(view: View, seen: SeenEvent) -> bool:
    """Whether other nodes report the same, so that none of them is to blame."""
    policy = view.state.history.policy
    return after_waiting(seen.said, seen.time, view.state.nodes, "", policy)[0] == SHARED


def pids_on(view: View, node: str) -> list[int]:
    """Return the processes of all living agents on the node."""
    agents = [agent for agent in view.live.on_node(node) if agent.alive]
    return [rank.pid for agent in agents for rank in agent.ranks.values() if rank.pid]


def with_node(view: View, job: JobState, node: str, code: int, at: float, pid: int, own: Verdict) -> Verdict:
    """Return the verdict on a rank that ended, together with what the job's own agents reported of its node about that
    time (both by the node's clock)."""
    state = view.state.nodes.get(node)
    if state is None or not state.events:
        return own
    pids, best = pids_on(view, node), None
    for seen in state.events:
        event, before = seen.said, at - seen.said.at
        if event.of_job != job.job:
            continue
        if -AFTER_SECONDS <= before <= BEFORE_SECONDS and explains(event, code, pid, own, pids):
            if best is None or (event.severity, abs(before)) < (best.said.severity, abs(at - best.said.at)):
                best = seen
    if best is None:
        return own
    shared = best.said.action == WAIT and is_shared(view, best)
    return merge_verdicts(own, best.said, at - best.said.at, SHARED if shared else None)


def with_links(view: View, job: JobState, node: str, own: Verdict) -> Verdict:
    """Return the verdict on a network fault, together with links of the job's nodes that flapped shortly before. A flap
    of the node's own link is the cause."""
    if own.scope != "network":
        return own
    flapped: list[SeenEvent] = []
    for name in sorted({agent.node for agent in job.agents.values() if not agent.gone} | {node}):
        state = view.state.nodes.get(name)
        flaps = [
            seen
            for seen in (state.events if state else ())
            if seen.said.of_job == job.job
            and seen.said.cause == "link_flapping"
            and view.now - seen.time <= LINK_SECONDS
        ]
        flapped += flaps[-1:]
    if not flapped:
        return own
    flaps_before = "; ".join(
        f'{seen.said.node} {view.now - seen.time:.0f} s before: "{seen.said.text}"' for seen in flapped
    )
    mine = any(seen.said.node == node for seen in flapped)
    return replace(own, reason=f"{own.reason}; {flaps_before}", cause="link_flapping" if mine else own.cause)


# ---------------------------------------------------------------- Slurm's reports
def task_end(classifier: Classifier, status: int | None) -> Verdict | None:
    """Return the verdict on a task's wait status (wait(2)), as the plugin reports it; None for exit 0 or no status."""
    if not status:
        return None
    try:
        return classifier.exit(os.waitstatus_to_exitcode(status))
    except ValueError:  # a status of a stopped process, or no status at all: the datagram is not to be trusted
        return None


def element_end(classifier: Classifier, element: ElementInfo) -> Verdict | None:
    """Return the verdict on an element by its state and exit code; None while it is not over, or if it ended well."""
    if element.state not in OVER or element.state == "COMPLETED":
        return None
    verdict = classifier.slurm(element.state)
    if element.state == "FAILED" and element.exit_code not in ("", "0:0", "0"):
        try:
            return classifier.exit(element.exit_code)
        except ValueError:
            return verdict
    return verdict
