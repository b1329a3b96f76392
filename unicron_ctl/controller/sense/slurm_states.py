"""What Slurm says of elements whose agent is gone, or seems to live although Slurm shows its end.

An agent that was killed tells nothing; the node it ran on may be in order. So the failure is recorded by the lease or
the hint, and what Slurm knows is added to it as soon as a listing shows it. Source: squeue(1), JOB STATE CODES.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.job_state import Failure, JobState
from unicron.ctl.controller.model.view import Listing, View
from unicron.ctl.slurm.slurm_client import ElementInfo, NodeInfo

ENDED = frozenset(
    "FAILED NODE_FAIL OUT_OF_MEMORY BOOT_FAIL LAUNCH_FAILED TIMEOUT DEADLINE PREEMPTED CANCELLED REVOKED "
    "COMPLETED".split()
)
NODE_STATES = ("FAIL", "ERROR", "POWERED_DOWN", "DOWN", "NOT_RESPONDING")  # what speaks against a node, worst first
OPEN_KINDS = ("node", "agent")


@dataclass(frozen=True)
class Said:
    """What Slurm says that belongs to a failure: of its element, or (state, node) of its node."""

    job: JobState
    failure: Failure
    element: ElementInfo
    state: str = ""
    node: NodeInfo | None = None


def describe(element: ElementInfo) -> str:
    """7_1 is OUT_OF_MEMORY (exit code 0:125, OutOfMemory)."""
    more = [f"exit code {element.exit_code}" if element.exit_code not in ("", "0:0", "0") else "", element.reason]
    rest = ", ".join(part for part in more if part)
    return f"Slurm: {element.job}_{element.element} is {element.state}" + (f" ({rest})" if rest else "")


def ended_agents(view: View, listing: Listing, job: JobState) -> Iterator[AgentView]:
    """Agents that seem to live although Slurm shows their element ended: they may live on for a moment, and are to be
    asked."""
    for element in _known(listing, job):
        agent = view.job(job).agents.get(element.element)
        if agent is not None and agent.alive and element.state in ENDED and listing.asked_at > agent.last_registered:
            yield agent


def look(view: View, listing: Listing, job: JobState) -> Iterator[Said]:
    """What the listing tells about failures of nodes and agents that Slurm has not been quoted on."""
    for element in _known(listing, job):
        agent = view.job(job).agents.get(element.element)
        if agent is not None and agent.alive:
            continue
        of_all = (f for f in reversed(job.failures) if f.element == element.element and f.kind in OPEN_KINDS)
        failure = next(of_all, None)
        if failure is None or failure.restored_at is not None or failure.slurm:
            continue
        if element.state in ENDED and element.state != "COMPLETED":
            yield Said(job, failure, element)
            continue
        node = view.slurm.node(job.agents[element.element].node)
        if node is None or view.unfit(node.name) or (node.asleep and "POWERED_DOWN" not in node.states):
            continue
        state = next((state for state in NODE_STATES if state in node.states), "")
        if state:
            yield Said(job, failure, element, state, node)


def _known(listing: Listing, job: JobState) -> Iterator[ElementInfo]:
    """The job's elements that had an agent."""
    return (element for element in listing.of(job.job).values() if element.element in job.agents)
