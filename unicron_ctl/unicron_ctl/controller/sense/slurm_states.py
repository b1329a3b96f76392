"""Slurm's states of elements whose agents are gone, or seem to live although Slurm shows their end.

An agent that was killed reports nothing, and its node may be fine. So the lease or the hint records the failure, and
Slurm's state is added as soon as a listing shows it. Source: squeue(1), JOB STATE CODES.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import Failure, JobState
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.states import OVER

NODE_STATES = ("FAIL", "ERROR", "POWERED_DOWN", "DOWN", "NOT_RESPONDING")  # evidence against a node, worst first
OPEN_KINDS = ("node", "agent")


def describe(element: ElementInfo) -> str:
    """7_1 is OUT_OF_MEMORY (exit code 0:125, OutOfMemory)."""
    more = [f"exit code {element.exit_code}" if element.exit_code not in ("", "0:0", "0") else "", element.reason]
    rest = ", ".join(part for part in more if part)
    return f"Slurm: {element.label} is {element.state}" + (f" ({rest})" if rest else "")


def check_ended(view: View, job: JobView) -> Outcome:
    """Suspect agents that seem to live although Slurm shows that their element ended. They may do so for a moment, so
    they are probed."""
    out, listing = Outcome(), view.slurm.seen
    asked_at = listing.asked_at if listing is not None else 0.0
    for element in _with_agents(listing, job.state):
        agent = job.agents.get(element.element)
        if agent is not None and agent.alive and element.state in OVER and asked_at > agent.last_registered:
            out.suspects.append(agent)
    return out


def check_slurm_states(view: View, job: JobView) -> Outcome:
    """Report what the last listing adds to failures of nodes and agents that do not quote Slurm yet."""
    out = Outcome()
    for element in _with_agents(view.slurm.seen, job.state):
        agent = job.agents.get(element.element)
        failure = _open_failure(job.state, element.element) if agent is None or not agent.alive else None
        if failure is None:
            continue
        if element.state in OVER and element.state != "COMPLETED":
            out.findings.append(_finding(view, job, element, failure, element.state))
            continue
        node = view.slurm.node(job.state.agents[element.element].node)
        if node is None or view.unfit(node.name) or (node.asleep and "POWERED_DOWN" not in node.states):
            continue
        state = next((state for state in NODE_STATES if state in node.states), "")
        if state:
            out.findings.append(_finding(view, job, element, failure, state, node.name))
    return out


def _open_failure(job: JobState, element: int) -> Failure | None:
    """Return the last failure of the element or its node, unless it is over or quotes Slurm already."""
    of_it = (f for f in reversed(job.failures) if f.record.element == element)
    failure = next((f for f in of_it if f.record.kind_of_failure in OPEN_KINDS), None)
    return None if failure is None or failure.restored_at is not None or failure.slurm else failure


def _finding(view: View, job: JobView, element: ElementInfo, failure: Failure, state: str, node: str = "") -> Finding:
    """Slurm shows the failure's element in this state, or its node where that is named."""
    number = element.element
    return Finding(
        What.SLURM, job.state.job, (), view.now, Source.SLURM, state, element=number, node=node, seen=failure.id
    )


def _with_agents(listing: Listing | None, job: JobState) -> Iterator[ElementInfo]:
    listed = listing.of(job.job).values() if listing is not None else ()
    return (element for element in listed if element.element in job.agents)
