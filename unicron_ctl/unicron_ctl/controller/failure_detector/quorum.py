"""Quorum: a majority of a job's agents may train on without this controller, unless something shows that it does not.

Agents that cannot reach the controller go on once they are a strict majority of their generation
(docs/design/consensus.md). So as long as the silent agents may have a majority's votes, the rest must not go on here:
in a network that is cut in two, each half believes the other one dead. Dead agents may have voted before they died.
That Slurm hears nothing of many nodes at once says no more than our own silence. The word of a node that answers
counts, or that of a person.
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

Voter = tuple[int, str]  # an element, and its agent


def missing_elements(view: View, job: JobState) -> list[int]:
    """Return the elements, of a generation that somebody may be in, whose agents neither speak nor are shown dead."""
    found = set()
    for element, name in _voters(job):
        if _speaking(view, job, element, name) is None and not _is_dead(view, job, element, name):
            found.add(element)
    return sorted(found)


def no_majority_missing(view: View, job: JobState, missing: list[int] | None = None) -> bool:
    """The missing agents have no strict majority in any generation. missing: the answer of `missing_elements`."""
    gone = set(missing_elements(view, job) if missing is None else missing)
    if not gone:
        return True
    if not job.mode.agents_agree:
        return 2 * len(gone) <= len(job.inside)
    votes = {who for who in _voters(job) if not _votes_here(view, job, *who)}
    return all(2 * len(votes & group) <= len(group) for group in _groups(job))


def majority_may_run(view: View, job: JobState, missing: list[int] | None = None) -> bool:
    """A majority may train on without this controller, so nothing may be formed from the rest.

    A plain program cannot go on without all of its processes, and a job on a single node has no two halves.
    """
    if not job.mode.agents_agree or all(len(group) < 2 for group in _groups(job)):
        return False
    return not no_majority_missing(view, job, missing)


def waits_for_majority(view: View, job: JobView, progress: ProgressWatch) -> bool:
    """`majority_may_run` for callers that ask at every message: a large job is looked through only now and then."""
    if view.now < progress.majority_until:
        return True
    found = majority_may_run(view, job.state)
    progress.majority_until = look_again(view.now, len(job.state.members)) if found else 0.0
    return found


def _groups(job: JobState) -> list[set[Voter]]:
    """Return the voters of each generation that somebody may be in."""
    groups = [*job.former, job.agents_of(job.members)]
    if job.offer is not None:
        inside = set(job.offer.members)
        groups.append(job.agents_of({s: who for s, who in {**job.members, **job.joining}.items() if s in inside}))
    return [set(group.items()) for group in groups]


def _voters(job: JobState) -> set[Voter]:
    return set().union(*_groups(job), job.agents_of(job.joining).items())


def _speaking(view: View, job: JobState, element: int, name: str) -> AgentView | None:
    """Return the agent, while it speaks."""
    agent = view.job(job).agents.get(element)
    speaks = agent is not None and agent.agent == name and agent.alive
    return agent if speaks and (job.job, element) not in view.suspicions.open else None


def _votes_here(view: View, job: JobState, element: int, name: str) -> bool:
    """The missing agents do not have this one's vote. They may have a dead one's: nobody knows when it died."""
    agent = _speaking(view, job, element, name)
    if agent is None:
        return False
    agreed, plan = agent.status.agreed, job.plan
    news = agreed is not None and (plan is None or agreed.since >= plan.generation)
    if agreed is not None and news and plan_may_have_begun(view, job, agreed.plan):
        return False
    return agent.status.over >= last_vote(job, agent) or any(_goes_on(job, slot) for slot in agent.slots)


def check_free_votes(view: View, job: JobView, progress: ProgressWatch) -> Outcome:
    """Ask agents without a rank that goes on to give up their votes, while the missing might have a majority with
    them. Nothing else keeps them from voting for the others once they cannot be heard any more."""
    out, state = Outcome(), job.state
    if state.phase not in BETWEEN or not state.mode.agents_agree or view.now < progress.votes_check_at:
        return out
    progress.votes_check_at = look_again(view.now, len(state.members))
    if no_majority_missing(view, state):
        return out
    for element, name in sorted(_voters(state)):
        agent = _speaking(view, state, element, name)
        if agent is None or any(_goes_on(state, slot) for slot in agent.slots):
            continue
        over = last_vote(state, agent)
        if agent.status.over < over:
            out.orders.append(Order(agent, f"over {over}", wire.Ping(over=over)))
    return out


def last_vote(job: JobState, agent: AgentView) -> int:
    """Return the last generation in which the agent may have a vote."""
    if job.plan is None or not any(slot in job.members for slot in agent.slots):
        return job.broken
    return max(job.broken, job.plan.generation)


def plan_may_have_begun(view: View, job: JobState, plan: Plan, ping: int = 0) -> bool:
    """All members of a plan that agents agreed on may be in it: none of them speaks without being in it, and not all
    are shown dead. ping: the number of the Ping that a member must have answered."""
    names, alive = dict(who for group in _groups(job) for who in group), False
    for element in dict.fromkeys(map(job.element, plan.members)):
        agent = view.job(job).agents.get(element)
        name = names.get(element, agent.agent if agent is not None else "")
        here = _speaking(view, job, element, name)
        if here is not None and here.status.pinged >= ping and any(_goes_on(job, slot) for slot in here.slots):
            return False
        alive = alive or not _is_dead(view, job, element, name)
    return alive


def _goes_on(job: JobState, slot: int) -> bool:
    """The slot stays a member: no plan can complete without it."""
    out = slot in job.lost or slot in job.condemned or job.element(slot) in job.parted
    return (slot in job.members or slot in job.joining) and not out


def _is_dead(view: View, job: JobState, element: int, agent: str) -> bool:
    """The agent cannot vote any more: it said that it ends, or its node or Slurm did."""
    record = job.agents.get(element)
    if record is None:
        return False
    if record.agent == agent:
        return record.gone not in ("", "silent") or bool(shown_dead(view, job, element))
    # Another agent has come in its place. Slurm starts an element elsewhere also when it only lost sight of the node.
    node = job.superseded.get(agent, record.node)
    info = view.slurm.node(node)
    return node == record.node or info is None or not slurm_hears_nothing(view, node) or bool(_taken_down(info))


def shown_dead(view: View, job: JobState, element: int, since: float = 0.0) -> str:
    """Tell how Slurm shows that nothing of the element lives on its agent's node; empty while something may.

    A node that does not answer Slurm says nothing, unless somebody has set it down. since: Slurm was asked after that.
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
    """Slurm hears nothing of the node, or has it down."""
    info = view.slurm.node(node)
    if info is None:
        return False
    return "POWERED_DOWN" in info.states or bool(info.states & DOWN and not ON_THE_WAY & info.states)


def _taken_down(info: NodeInfo) -> str:
    """Tell how a person, or power saving, has the node down; empty where Slurm or a controller set it down by itself.

    Slurm keeps the reason of a node that it sets down, one to drain it perhaps, and may add its own to it
    ("fan 2 : Not responding").
    """
    if "POWERED_DOWN" in info.states:
        return f"{info.name} is POWERED_DOWN"
    by_hand = "DOWN" in info.states and "DRAIN" not in info.states and not info.reason.startswith(OURS)
    said = by_hand and not slurms_own(info.reason.rpartition(" : ")[2])
    return f"{info.name} was set DOWN: {info.reason}" if said else ""


def declare_dead_command(view: View, node: str) -> str:
    """Return the command by which a person says that the node is dead."""
    info = view.slurm.node(node)
    first = f"`scontrol update NodeName={node} State=UNDRAIN`, then " if info and "DRAIN" in info.states else ""
    return f"{first}`scontrol update NodeName={node} State=DOWN Reason=...`"
