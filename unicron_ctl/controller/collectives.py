"""Collectives that nobody finishes although nobody is behind: no rank and no node can be named.

The first time all regroup in place (SEV3). When it comes back within the window, processes are started anew (SEV2): all
but those of one node, from which the others get the training state again, and the next time all but those of another
one. So every process is replaced without a step back to a checkpoint. No node is ever put aside for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from detector.escalation import RESTART, WHOLE_JOB, as_fault
from detector.escalation import decide as escalate
from unicron_ctl.controller import failures
from unicron_ctl.controller.machine import Event as Happening
from unicron_ctl.controller.signals import Signal
from unicron_ctl.controller.soft import JobView
from unicron_ctl.controller.state import JobState

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine

CAUSE = "nccl_timeout"


def timeout(engine: Engine, job: JobState, reason: str) -> None:
    """All ranks wait in the same collective for too long."""
    lost = judge(engine, job, reason, "statistics")
    if lost:
        engine.drive(job, Signal(Happening.LOSS, reason, dict.fromkeys(lost, "is started anew")))
    else:
        engine.drive(job, Signal(Happening.FAULT, reason))


def reported(engine: Engine, job: JobState, signal: Signal) -> str:
    """The reason, when ranks of several nodes have stopped and all that they say is that a collective took too long."""
    if signal.event is not Happening.FAULT or len(job.elements(signal.slots)) < 2:
        return ""
    for slot in signal.slots:
        status = engine.view(job).status(slot)
        fault = status.fault if status is not None else None
        verdict = engine.classifier.match(f"{fault.type}: {fault.text}") if fault is not None else None
        if verdict is None or verdict.cause != CAUSE:
            return ""
    return f"{len(signal.slots)} ranks stopped because a collective took too long, and none of them says why"


def judge(engine: Engine, job: JobState, reason: str, by: str) -> set[int]:
    """Records the failure; returns the slots whose processes are started anew, empty when a new group is enough."""
    verdict = engine.node_events.links(job, "", engine.classifier.cause(CAUSE, reason))
    where = {"job": job.job, "slot": WHOLE_JOB, "node": ""}
    decision = escalate(engine.state.history, verdict, engine.now, **where, job_nodes=max(1, len(job.agents)))
    fault = as_fault(verdict, engine.now, **where)
    memory = {
        "slot": fault.slot,
        "node": fault.node,
        "scope": fault.scope,
        "severity": int(fault.severity),
        "uptime": None,
        "worked": True,
        "event": decision.event.value,
        "state": decision.state.value,
    }
    failure = failures.record(engine, job, "hang", sorted(job.members), verdict, decision, by, escalation=memory)
    if decision.action != RESTART or engine.config.observe:
        return set()
    lost = to_restart(engine.view(job))
    for slot in sorted(lost):
        incarnation = job.members[slot].incarnation + 1
        at = engine.now + decision.wait_seconds
        failures.start(engine, job, slot, incarnation, at, "the same collective hangs again", failure)
    return lost


def to_restart(view: JobView) -> set[int]:
    """All members but those of one node; the one whose processes are the newest, so that each has its turn.

    A job on one node has nobody else to get its state from: all start anew, from what the script starts with.
    """
    job = view.state
    elements = job.elements(job.members)
    if len(elements) < 2:
        return set(job.members)

    def age(element: int) -> tuple[int, int]:
        newest = min(member.incarnation for slot, member in job.members.items() if job.element(slot) == element)
        return -newest, element

    kept = min(elements, key=age)
    return {slot for slot in job.members if job.element(slot) != kept}
