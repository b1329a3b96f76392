"""What Slurm says of elements whose agent is gone: how their task ended (the plugin's hint) and the state of the job.

An agent that was killed tells nothing; the node it ran on may be in order. So the failure is recorded by the lease or
the hint, and what Slurm knows is added to it as soon as a listing shows it.

Sources: squeue(1) JOB STATE CODES, wait(2).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from detector.classify import Classifier
from detector.severity import Verdict
from unicron_ctl.controller.state import JobState
from unicron_ctl.slurm.client import ElementInfo, NodeInfo

if TYPE_CHECKING:
    from unicron_ctl.controller.cluster import Observation
    from unicron_ctl.controller.engine import Engine

OVER = frozenset(
    "FAILED NODE_FAIL OUT_OF_MEMORY BOOT_FAIL LAUNCH_FAILED TIMEOUT DEADLINE PREEMPTED CANCELLED REVOKED".split()
)
ENDED = OVER | {"COMPLETED"}
NODE_STATES = ("FAIL", "ERROR", "POWERED_DOWN", "DOWN", "NOT_RESPONDING")  # what speaks against a node, worst first
OPEN_KINDS = ("node", "agent")


def task_end(classifier: Classifier, status: int | None) -> Verdict | None:
    """The verdict on a task's wait status, as the plugin reports it; None without one, or when it ended with 0."""
    if not status:
        return None
    try:
        return classifier.exit(os.waitstatus_to_exitcode(status))
    except ValueError:  # a status of a stopped process, or no status at all: the datagram is not to be trusted
        return None


def element_end(classifier: Classifier, element: ElementInfo) -> Verdict | None:
    """The verdict on an element that is over, by its state and exit code; None while it is not, or ended well."""
    if element.state not in OVER:
        return None
    verdict = classifier.slurm(element.state)
    if element.state == "FAILED" and element.exit_code not in ("", "0:0", "0"):
        try:
            return classifier.exit(element.exit_code)
        except ValueError:
            return verdict
    return verdict


def describe(element: ElementInfo) -> str:
    """7_1 is OUT_OF_MEMORY (exit code 0:125, OutOfMemory)."""
    more = [f"exit code {element.exit_code}" if element.exit_code not in ("", "0:0", "0") else "", element.reason]
    rest = ", ".join(part for part in more if part)
    return f"Slurm: {element.job}_{element.element} is {element.state}" + (f" ({rest})" if rest else "")


def look(engine: Engine, seen: Observation) -> None:
    """A fresh listing: what does it say of elements that failed, and of agents that seem to live?"""
    for element in seen.elements:
        job = engine.state.jobs.get(element.job)
        if job is None or job.ended or element.element not in job.agents:
            continue
        view = engine.agents.get((element.job, element.element))
        if view is not None and view.alive:
            if element.state in ENDED and seen.asked_at > view.last_registered:
                engine.suspect(view)  # it may live on for a moment: it is asked
            continue
        _explain(engine, job, element, engine.cluster.node_info(job.agents[element.element].node))


def _explain(engine: Engine, job: JobState, element: ElementInfo, node: NodeInfo | None) -> None:
    failure = next((f for f in reversed(job.failures) if f["element"] == element.element), None)
    if failure is None or failure["kind"] not in OPEN_KINDS or failure["restored_at"] is not None or failure["slurm"]:
        return
    verdict, said, state = element_end(engine.classifier, element), describe(element), element.state
    if verdict is None:
        state = _node_state(engine, node)
        if not state or node is None:
            return
        verdict, said = engine.classifier.slurm(state), f"Slurm: {node.name} is {state} ({node.reason or 'no reason'})"
    changes = {"cause": verdict.cause, "severity": int(verdict.severity)} if verdict.scope != "none" else {}
    engine.emit(
        "failure_verdict",
        job.job,
        failure=failure["id"],
        slurm=state,
        **changes,
        reason=f"{failure['reason']}; {said}: {verdict.reason}",
    )


def _node_state(engine: Engine, node: NodeInfo | None) -> str:
    """The word for a node that Slurm has taken out of service by itself; empty when it is ours or in order."""
    if node is None or node.name in engine.cluster.put_aside():
        return ""
    return next((state for state in NODE_STATES if state in node.states), "")
