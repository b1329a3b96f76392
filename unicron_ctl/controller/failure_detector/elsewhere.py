"""Whether a job may be going on without this controller, and what shows that it does not.

Agents that cannot reach the controller go on once they are a strict majority of their generation
(docs/design/agreement.md). So as long as the silent may have a majority's votes, the rest must not go on here: a
network that is cut in two lets both halves believe that the other one is dead. The dead may have voted before. That
Slurm gets no answer from many nodes at once says the same as our own silence; what counts is the word of a node that
does answer, or of a person.
"""

from __future__ import annotations

from unicron.ctl.controller.model.agent_view import AgentView
from unicron.ctl.controller.model.job_state import JobState, Phase
from unicron.ctl.controller.model.job_view import JobView
from unicron.ctl.controller.model.pacing import look_again
from unicron.ctl.controller.model.requests import OURS
from unicron.ctl.controller.model.view import View
from unicron.ctl.protocol.wire import Plan
from unicron.ctl.slurm.slurm_client import NodeInfo, slurms_own

HERE = frozenset(
    "RUNNING CONFIGURING COMPLETING SUSPENDED STOPPED SIGNALING RESIZING STAGE_OUT".split()
)  # states in which an element has processes, or may have (squeue(1), JOB STATE CODES)
GONE = frozenset({"DOWN", "NOT_RESPONDING"})  # states of a node of which Slurm hears nothing, or that it has given up
ON_THE_WAY = frozenset({"POWERING_UP", "POWERING_DOWN"})  # ... and while it boots, silence says nothing
BETWEEN = frozenset({Phase.FORMING, Phase.BREAKING, Phase.ENTERING})  # while some are in an earlier generation


def away(view: View, job: JobState) -> list[int]:
    """Elements of the present generation, of the one on offer, or of one that some may not have left, that neither
    speak nor are shown dead."""
    found = set()
    for element, name in _voters(job):
        if _heard(view, job, element, name) is None and not _dead(view, job, element, name):
            found.add(element)
    return sorted(found)


def may_go_on(view: View, job: JobState, missing: list[int] | None = None) -> bool:
    """Those that are away have no strict majority, so they do not go on by themselves. missing: what `away` says."""
    gone = set(away(view, job) if missing is None else missing)
    if not gone:
        return True
    if job.restart_mode:  # nobody votes
        return 2 * len(gone) <= len(job.inside)
    votes = {who for who in _voters(job) if not _with_us(view, job, *who)}
    return all(2 * len(votes & group) <= len(group) for group in _groups(job))


def goes_on(view: View, job: JobState, missing: list[int] | None = None) -> bool:
    """A majority may be going on elsewhere: nothing may be formed from the rest. A plain program cannot go on without
    all of its processes; and of a job on a single node there are no two halves. missing: what `away` says."""
    if job.restart_mode or all(len(group) < 2 for group in _groups(job)):
        return False
    return not may_go_on(view, job, missing)


def waits(view: View, job: JobView) -> bool:
    """The same, for what is asked at every message: a large job is looked through now and then only."""
    if view.now < job.live.elsewhere_until:
        return True
    found = goes_on(view, job.state)
    job.live.elsewhere_until = look_again(view.now, len(job.state.members)) if found else 0.0
    return found


Voter = tuple[int, str]  # an element, and its agent


def _groups(job: JobState) -> list[set[Voter]]:
    """Those who vote together, of every generation that somebody may be in."""
    groups = [*job.former, job.agents_of(job.members)]
    if job.offer is not None:
        inside = set(job.offer.members)
        groups.append(job.agents_of({s: who for s, who in {**job.members, **job.joining}.items() if s in inside}))
    return [set(group.items()) for group in groups]


def _voters(job: JobState) -> set[Voter]:
    """All of them, as `away` means them."""
    return set().union(*_groups(job), job.agents_of(job.joining).items())


def _heard(view: View, job: JobState, element: int, name: str) -> AgentView | None:
    """The agent, while it speaks."""
    agent = view.job(job).agents.get(element)
    speaks = agent is not None and agent.agent == name and agent.alive and not agent.left
    return agent if speaks and (job.job, element) not in view.inquiries.open else None


def _with_us(view: View, job: JobState, element: int, name: str) -> bool:
    """The silent ones do not have its vote. Those of the dead they may have: nobody knows when they died."""
    agent = _heard(view, job, element, name)
    if agent is None:
        return False
    agreed, plan = agent.agreed, job.plan
    if (
        agreed is not None
        and (plan is None or agreed.since >= plan.generation)
        and may_have_begun(view, job, agreed.plan)
    ):
        return False
    return agent.over >= last_vote(job, agent) or any(_stands(job, slot) for slot in agent.slots)


def unbound(view: View, job: JobView) -> list[AgentView]:
    """Agents that have a vote and no rank that is to go on, while the silent might have a majority with them. They are
    to give it up: nothing else keeps them from voting for the others once they cannot be heard any more."""
    state, live = job.state, job.live
    if state.phase not in BETWEEN or state.restart_mode or view.now < live.unbound_at:
        return []
    live.unbound_at = look_again(view.now, len(state.members))
    if may_go_on(view, state):
        return []
    heard = (_heard(view, state, element, name) for element, name in sorted(_voters(state)))
    free = (a for a in heard if a is not None and not any(_stands(state, slot) for slot in a.slots))
    return [agent for agent in free if agent.over < last_vote(state, agent)]


def last_vote(job: JobState, agent: AgentView) -> int:
    """The last generation in which it may have one."""
    inside = job.plan is not None and any(slot in job.members for slot in agent.slots)
    return max(job.broken, job.plan.generation if inside and job.plan is not None else 0)


def may_have_begun(view: View, job: JobState, plan: Plan, ping: int = 0) -> bool:
    """The members of a plan of the agents' may all be in it: no member of whom it is not known that it is has been
    heard, and not all are shown dead. ping: the number of the Ping that it has to have answered."""
    names, alive = dict(who for group in _groups(job) for who in group), False
    for element in dict.fromkeys(map(job.element, plan.members)):
        agent = view.job(job).agents.get(element)
        name = names.get(element, agent.agent if agent is not None else "")
        here = _heard(view, job, element, name)
        if here is not None and here.pinged >= ping and any(_stands(job, slot) for slot in here.slots):
            return False
        alive = alive or not _dead(view, job, element, name)
    return alive


def _stands(job: JobState, slot: int) -> bool:
    """It is to go on: so it enters what this controller plans, or nobody does."""
    out = slot in job.lost or slot in job.condemned or job.element(slot) in job.parted
    return (slot in job.members or slot in job.joining) and not out


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
    return node == record.node or info is None or not hears_nothing(view, node) or bool(_taken_down(info))


def shown_dead(view: View, job: JobState, element: int, since: float = 0.0) -> str:
    """By what Slurm shows that nothing of the element lives on its agent's node; empty while something may.

    A node that does not answer Slurm says nothing, unless somebody has set it down. since: Slurm was asked after that.
    """
    record, seen = job.agents.get(element), view.slurm.seen
    info = view.slurm.node(record.node) if record is not None else None
    if record is None or seen is None or info is None or not record.confirmed or seen.asked_at <= since:
        return ""
    if hears_nothing(view, info.name):
        return _taken_down(info)
    if info.asleep:
        return ""
    shown = seen.of(job.job).get(element)
    if shown is None or (shown.state in HERE and shown.node == record.node):
        return ""
    where = f" on {shown.node}" if shown.node else ""
    return f"{info.name} answers Slurm, and {job.job}_{element} is {shown.state}{where}"


def hears_nothing(view: View, node: str) -> bool:
    """Slurm hears nothing of the node, or has it down."""
    info = view.slurm.node(node)
    if info is None:
        return False
    return "POWERED_DOWN" in info.states or bool(info.states & GONE and not ON_THE_WAY & info.states)


def _taken_down(info: NodeInfo) -> str:
    """A person, or the power control, has the node down. Not Slurm for reasons of its own, and no controller, be it one
    before this. Of a node that has a reason, to drain it perhaps, Slurm keeps that when it sets it down by itself, and
    may add its own ("fan 2 : Not responding")."""
    if "POWERED_DOWN" in info.states:
        return f"{info.name} is POWERED_DOWN"
    by_hand = "DOWN" in info.states and "DRAIN" not in info.states and not info.reason.startswith(f"{OURS}[")
    said = by_hand and not slurms_own(info.reason.rpartition(" : ")[2])
    return f"{info.name} was set DOWN: {info.reason}" if said else ""


def declare_dead(view: View, node: str) -> str:
    """The command by which a person says that the node is dead."""
    info = view.slurm.node(node)
    first = f"`scontrol update NodeName={node} State=UNDRAIN`, then " if info and "DRAIN" in info.states else ""
    return f"{first}`scontrol update NodeName={node} State=DOWN Reason=...`"
