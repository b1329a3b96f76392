"""What Slurm says about elements whose agents are gone, or seem to live although Slurm shows their end.

An agent that was killed tells nothing, and its node may be in order. So the failure is recorded by the lease or the
hint, and what Slurm knows is added to it as soon as a listing shows it. Source: squeue(1), JOB STATE CODES.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import Failure, JobState
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.states import OVER

NODE_STATES = ("FAIL", "ERROR", "POWERED_DOWN", "DOWN", "NOT_RESPONDING")  # what speaks against a node, worst first
OPEN_KINDS = ("node", "agent")


def describe(element: ElementInfo) -> str:
    """7_1 is OUT_OF_MEMORY (exit code 0:125, OutOfMemory)."""
    more = [f"exit code {element.exit_code}" if element.exit_code not in ("", "0:0", "0") else "", element.reason]
    rest = ", ".join(part for part in more if part)
    return f"Slurm: {element.label} is {element.state}" + (f" ({rest})" if rest else "")


def ended_agents(view: View, listing: Listing, job: JobState) -> Iterator[AgentView]:
    """Agents that seem to live although Slurm shows their element ended. They may live on for a moment, so they are
    asked."""
    for element in _known(listing, job):
        agent = view.job(job).agents.get(element.element)
        if agent is not None and agent.alive and element.state in OVER and listing.asked_at > agent.last_registered:
            yield agent


def check_slurm_states(view: View, job: JobView) -> Outcome:
    """What the last listing adds to failures of nodes and agents that do not quote Slurm yet."""
    out, listing = Outcome(), view.slurm.seen
    for element in _known(listing, job.state) if listing is not None else ():
        agent = job.agents.get(element.element)
        if agent is not None and agent.alive:
            continue
        of_it = (f for f in reversed(job.state.failures) if f.record.element == element.element)
        failure = next((f for f in of_it if f.record.kind_of_failure in OPEN_KINDS), None)
        if failure is None or failure.restored_at is not None or failure.slurm:
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


def _finding(view: View, job: JobView, element: ElementInfo, failure: Failure, state: str, node: str = "") -> Finding:
    """Slurm shows the failure's element in this state, or its node where that is named."""
    number = element.element
    return Finding(
        What.SLURM, job.state.job, (), view.now, Source.SLURM, state, element=number, node=node, seen=failure.id
    )


def _known(listing: Listing, job: JobState) -> Iterator[ElementInfo]:
    """The job's elements that had an agent."""
    return (element for element in listing.of(job.job).values() if element.element in job.agents)
