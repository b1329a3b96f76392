"""Whether a job may be going on without this controller, and what shows that it does not.

Agents that cannot reach the controller go on once they are a strict majority of their generation
(docs/design/agreement.md). So as long as a majority is silent, and not shown dead, the rest must not go on here: a
network that is cut in two lets both halves believe that the other one is dead. That Slurm gets no answer from many
nodes at once says the same as our own silence; what counts is the word of a node that does answer, or of a person.
"""

from __future__ import annotations

from unicron_ctl.controller.model.job import JobState
from unicron_ctl.controller.model.live import JobView
from unicron_ctl.controller.model.view import View
from unicron_ctl.slurm.client import NodeInfo

HERE = frozenset(
    "RUNNING CONFIGURING COMPLETING SUSPENDED STOPPED SIGNALING RESIZING STAGE_OUT".split()
)  # states in which an element has processes, or may have (squeue(1), JOB STATE CODES)
GONE = frozenset({"DOWN", "NOT_RESPONDING"})  # states of a node of which Slurm hears nothing, or that it has given up
PACE = 5e-5  # seconds per member between two looks at all of them
BY_ITSELF = "not responding"  # how the reason begins that Slurm gives a node that it sets down by itself


def away(view: View, job: JobState) -> list[int]:
    """Elements of the present generation, or of the one on offer, that neither speak nor are shown dead."""
    present, per_node = view.job(job).agents, view.job(job).per_node
    inside = {slot // per_node: who.agent for those in (job.members, job.joining) for slot, who in those.items()}
    found = []
    for element, name in inside.items():
        agent = present.get(element)
        speaks = agent is not None and agent.agent == name and agent.alive and not agent.left
        if not speaks or (job.job, element) in view.inquiries.open:
            if not _dead(view, job, element, name):
                found.append(element)
    return sorted(found)


def may_go_on(view: View, job: JobState, missing: list[int] | None = None) -> bool:
    """Those that are away are no strict majority, so they do not go on by themselves. missing: what `away` says."""
    gone = set(away(view, job) if missing is None else missing)
    if not gone:
        return True
    offered = job.offer.members if job.offer is not None else []
    return all(2 * len(gone & group) <= len(group) for group in map(set, map(job.elements, (job.members, offered))))


def goes_on(view: View, job: JobState, missing: list[int] | None = None) -> bool:
    """A majority may be going on elsewhere: nothing may be formed from the rest. A plain program cannot go on without
    all of its processes; and of a job on a single node there are no two halves. missing: what `away` says."""
    if job.restart_mode or len(job.elements(job.members)) < 2:
        return False
    return not may_go_on(view, job, missing)


def waits(view: View, job: JobView) -> bool:
    """The same, for what is asked at every message: a large job is looked through now and then only."""
    if view.now < job.live.elsewhere_until:
        return True
    found = goes_on(view, job.state)
    job.live.elsewhere_until = view.now + PACE * len(job.state.members) if found else 0.0
    return found


def _dead(view: View, job: JobState, element: int, agent: str) -> bool:
    """The agent that was a member cannot vote any more: it said that it ends, or its node or Slurm did."""
    record = job.agents.get(element)
    if record is None:
        return False
    if record.agent == agent:
        return record.gone not in ("", "silent") or bool(shown_dead(view, job, element))
    # Another agent has come in its place. Slurm starts an element elsewhere also when it only lost sight of the node.
    node = job.superseded.get(agent, record.node)
    info = view.slurm.node(node)
    return node == record.node or info is None or not hears_nothing(view, node) or bool(_taken_down(view, info))


def shown_dead(view: View, job: JobState, element: int, since: float = 0.0) -> str:
    """By what Slurm shows that nothing of the element lives on its agent's node; empty while something may.

    A node that does not answer Slurm says nothing, unless somebody has set it down. since: Slurm was asked after that.
    """
    record, seen = job.agents.get(element), view.slurm.seen
    info = view.slurm.node(record.node) if record is not None else None
    if record is None or seen is None or info is None or not record.confirmed or seen.asked_at <= since:
        return ""
    if hears_nothing(view, info.name):
        return _taken_down(view, info)
    shown = seen.of(job.job).get(element)
    if shown is None or (shown.state in HERE and shown.node == record.node):
        return ""
    where = f" on {shown.node}" if shown.node else ""
    return f"{info.name} answers Slurm, and {job.job}_{element} is {shown.state}{where}"


def hears_nothing(view: View, node: str) -> bool:
    """Slurm hears nothing of the node, or has it down."""
    info = view.slurm.node(node)
    return info is not None and bool(info.states & (GONE | {"POWERED_DOWN"}))


def _taken_down(view: View, info: NodeInfo) -> str:
    """A person, or the power control, has the node down: not Slurm because it heard nothing, nor this controller."""
    if "POWERED_DOWN" in info.states:
        return f"{info.name} is POWERED_DOWN"
    by_hand = "DOWN" in info.states and info.reason and not info.reason.lower().startswith(BY_ITSELF)
    return f"{info.name} was set DOWN: {info.reason}" if by_hand and not view.unfit(info.name) else ""
