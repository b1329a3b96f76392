"""Quorum: a majority of a job's agents may train on without this controller, unless something disproves it.

Agents that cannot reach the controller go on once they are a strict majority of their generation
(docs/design/consensus.md), so the rest must not go on here while the silent agents may have a majority's votes. Dead
agents may have voted before they died. A node's silence towards Slurm proves no more than our own; the word of a node
that answers counts, or that of a person.
"""

from __future__ import annotations

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import ProgressWatch, look_again
from unicron_ctl.controller.model.view import Order, Outcome, View
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.wire import Plan
from unicron_ctl.shared.slurm.drains import OURS
from unicron_ctl.shared.slurm.slurm_client import NodeInfo, slurms_own
from unicron_ctl.shared.slurm.states import DOWN, OCCUPIES

ON_THE_WAY = frozenset({"POWERING_UP", "POWERING_DOWN"})  # while a node boots, its silence says nothing
BETWEEN = frozenset({Phase.FORMING, Phase.BREAKING, Phase.ENTERING})  # phases in which some are a generation behind


def missing_elements(view: View, job: JobState) -> list[int]:
    """Return the elements, of any generation that may still run, whose agents neither speak nor are shown dead."""
    agents, doubted = view.job(job).agents, bool(view.suspicions.open)
    silent = [
        (element, name)
        for element, name in job.voting.everybody
        if doubted or (agent := agents.get(element)) is None or agent.agent != name or not agent.alive
    ]
    missing = (who for who in silent if _speaking(view, job, *who) is None and not is_dead(view, job, *who))
    return sorted({element for element, _ in missing})


def no_majority_missing(view: View, job: JobState, missing: list[int] | None = None) -> bool:
    """Whether the missing agents have no strict majority in any generation. missing: from `missing_elements`."""
    gone = set(missing_elements(view, job) if missing is None else missing)
    if not gone:
        return True
    if not job.mode.agents_agree:
        return 2 * len(gone) <= len(job.inside)
    votes = {who for who in job.voting.everybody if not _votes_here(view, job, *who)}
    return all(2 * len(votes & group) <= len(group) for group in job.voting.groups)


def majority_may_run(view: View, job: JobState, missing: list[int] | None = None) -> bool:
    """Whether a majority may train on without this controller, so that nothing may be formed from the rest.

    A plain program cannot go on without all of its processes, and a job on a single node has no two halves.
    """
    if not job.mode.agents_agree or all(len(group) < 2 for group in job.voting.groups):
        return False
    return not no_majority_missing(view, job, missing)


def waits_for_majority(view: View, job: JobView, progress: ProgressWatch) -> bool:
    """Answer as `majority_may_run` does, for callers that ask at every message: a large job is checked now and then."""
    if view.now < progress.majority_until:
        return True
    found = majority_may_run(view, job.state)
    progress.majority_until = look_again(view.now, len(job.state.members)) if found else 0.0
    return found


def _speaking(view: View, job: JobState, element: int, name: str) -> AgentView | None:
    agent = view.job(job).agents.get(element)
    speaks = agent is not None and agent.agent == name and agent.alive
    return agent if speaks and (job.job, element) not in view.suspicions.open else None


def _votes_here(view: View, job: JobState, element: int, name: str) -> bool:
    """Whether the missing agents do not have this agent's vote. They may have that of a dead one, which may have voted
    before it died."""
    agent = _speaking(view, job, element, name)
    if agent is None:
        return False
    agreed, plan = agent.status.agreed, job.plan
    news = agreed is not None and (plan is None or agreed.since >= plan.generation)
    if agreed is not None and news and plan_may_have_begun(view, job, agreed.plan):
        return False
    return agent.status.over >= last_vote(job, agent) or any(_goes_on(job, slot) for slot in agent.slots)


def check_free_votes(view: View, job: JobView, progress: ProgressWatch) -> Outcome:
    """Ask agents without a continuing rank to give up their votes, while the missing agents might have a majority with
    them. Otherwise these could still vote for the missing ones once this controller cannot hear them."""
    out, state = Outcome(), job.state
    if state.phase not in BETWEEN or not state.mode.agents_agree or view.now < progress.votes_check_at:
        return out
    progress.votes_check_at = look_again(view.now, len(state.members))
    if no_majority_missing(view, state):
        return out
    for element, name in sorted(state.voting.everybody):
        agent = _speaking(view, state, element, name)
        if agent is None or any(_goes_on(state, slot) for slot in agent.slots):
            continue
        over = last_vote(state, agent)
        if agent.status.over < over:
            out.orders.append(Order(agent, f"over {over}", wire.Ping(over=over)))
    return out


def last_vote(job: JobState, agent: AgentView) -> int:
    """Return the last generation in which the agent may vote."""
    if job.plan is None or not any(slot in job.members for slot in agent.slots):
        return job.broken
    return max(job.broken, job.plan.generation)


def plan_may_have_begun(view: View, job: JobState, plan: Plan, ping: int = 0) -> bool:
    """Whether all members of a plan that agents agreed on may be in it: none of them speaks without being in it, and
    not all are shown dead. ping: the number of the Ping that a member must have answered."""
    names, alive = dict(who for group in job.voting.groups for who in group), False
    for element in dict.fromkeys(map(job.element, plan.members)):
        agent = view.job(job).agents.get(element)
        name = names.get(element, agent.agent if agent is not None else "")
        here = _speaking(view, job, element, name)
        if here is not None and here.status.pinged >= ping and any(_goes_on(job, slot) for slot in here.slots):
            return False
        alive = alive or not is_dead(view, job, element, name)
    return alive


def _goes_on(job: JobState, slot: int) -> bool:
    """Whether the slot stays a member, so that no plan can complete without it."""
    out = slot in job.lost or slot in job.condemned or job.element(slot) in job.parted
    return (slot in job.members or slot in job.joining) and not out


def is_dead(view: View, job: JobState, element: int, agent: str) -> bool:
    """Whether the agent cannot vote any more, according to itself, its node or Slurm."""
    record = job.agents.get(element)
    if record is None:
        return False
    if record.agent == agent:
        return record.gone not in ("", "silent") or bool(shown_dead(view, job, element))
    # Another agent has replaced it. Slurm also starts an element elsewhere if it only lost sight of the node.
    node = job.superseded.get(agent, record.node)
    info = view.slurm.node(node)
    return node == record.node or info is None or not slurm_hears_nothing(view, node) or bool(_taken_down(info))


def shown_dead(view: View, job: JobState, element: int, since: float = 0.0) -> str:
    """Describe how Slurm shows that nothing of the element lives on its agent's node; empty while something may.

    That a node does not answer Slurm proves nothing unless a person set it down. since: Slurm was asked after that.
    """
    record, seen = job.agents.get(element), view.slurm.seen
    info = view.slurm.node(record.node) if record is not None else None
    if record is None or seen is None or info is None or not record.confirmed or seen.asked_at <= since:
        return ""
    if slurm_hears_nothing(view, info.name):
        return _taken_down(info)
    if info.asleep:
        return ""
    listed = seen.of(job.job)
    shown = listed.get(element)
    if shown is None and listed and job.settings.allocation:
        return f"{info.name} answers Slurm, which runs job {job.job} without this part of it"
    if shown is None or (shown.state in OCCUPIES and shown.node == record.node):
        return ""
    where = f" on {shown.node}" if shown.node else ""
    return f"{info.name} answers Slurm, and {job.label(element)} is {shown.state}{where}"


def slurm_hears_nothing(view: View, node: str) -> bool:
    """Whether Slurm hears nothing from the node, or has it down."""
    info = view.slurm.node(node)
    if info is None:
        return False
    return "POWERED_DOWN" in info.states or bool(info.states & DOWN and not ON_THE_WAY & info.states)


def _taken_down(info: NodeInfo) -> str:
    """Describe how a person, or power saving, took the node down; empty if Slurm or a controller did so.

    Slurm keeps the reason of a node that it sets down, even that of a drain, and may append its own to it
    ("fan 2 : Not responding").
    """
    if "POWERED_DOWN" in info.states:
        return f"{info.name} is POWERED_DOWN"
    by_hand = "DOWN" in info.states and "DRAIN" not in info.states and not info.reason.startswith(OURS)
    by_hand = by_hand and not slurms_own(info.reason.rpartition(" : ")[2])
    return f"{info.name} was set DOWN: {info.reason}" if by_hand else ""


def declare_dead_command(view: View, node: str) -> str:
    """Return the command with which a person declares the node dead."""
    info = view.slurm.node(node)
    first = f"`scontrol update NodeName={node} State=UNDRAIN`, then " if info and "DRAIN" in info.states else ""
    return f"{first}`scontrol update NodeName={node} State=DOWN Reason=...`"
