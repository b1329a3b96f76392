"""Agents that come: which are taken in, and which job and Slurm step they belong to.

Several `srun` in one batch script are trainings of their own under the same job id. A job's agents tell the number of
their Slurm step. The job is of one step at a time: a later step waits until the one before has ended, then the job
begins again. An element that was requeued runs its script from the start, while the others are further: what they have
behind them it does alone.
"""

from __future__ import annotations

from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.job import Identity, JobState
from unicron_ctl.controller.model.live import READY, AgentView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.protocol import wire
from unicron_ctl.protocol.encryption import is_key

MAX_ADDRESS = 300  # characters: a host's name has at most 253


def answer(view: View, message: wire.Register) -> wire.Message | None:
    """Why the agent is not taken in now, as the message to it; None when it is."""
    job = view.state.jobs.get(message.job)
    if refused := _other_step(message, job):
        return refused
    if problem := _problem(message, None if begins(view, message) else job):  # a next step may be in another mode
        return wire.Refused(reason=problem, final=True)
    if job is not None and job.ended and message.step <= job.step:
        return wire.End(code=job.ended.code, reason=job.ended.reason)
    return None


def _other_step(message: wire.Register, job: JobState | None) -> wire.Refused | None:
    if job is None or message.step == job.step or job.over:
        return None
    which = f"step {message.step} of job {message.job}"
    if message.step > job.step:
        return wire.Refused(reason=f"{which} has to wait: step {job.step} still runs")
    reason = f"{which} is over for the other elements, which are at step {job.step}"
    return wire.Refused(reason=reason, alone=True)


def begins(view: View, message: wire.Register) -> bool:
    """The job starts with this agent, for the first time or with its next step."""
    job = view.state.jobs.get(message.job)
    return job is None or (job.over and message.step > job.step)


def begin(message: wire.Register) -> Outcome:
    out = Outcome()
    record = records.JobRegistered(settings=message.settings, step=message.step)
    out.records.append((message.job, 0, record))
    return out


def join(job: JobState, message: wire.Register) -> Outcome:
    """The agent is one of the job's: a new one, or one that comes back."""
    out, known = Outcome(), job.agents.get(message.element)
    if known is None or known.agent != message.agent:
        out.hurry = True
        reachable = is_key(message.key) and len(message.peer) <= MAX_ADDRESS
        record = records.AgentRegistered(
            element=message.element,
            agent=message.agent,
            node=message.node,
            address=message.address,
            slots=list(message.slots),
            peer=message.peer if reachable else "",
            key=message.key if reachable else "",
        )
        out.record(job, record, 0)
    elif known.gone:
        out.record(job, records.AgentBack(element=message.element, agent=message.agent, node=message.node), 0)
    return out


def ready_ranks(job: JobState, agent: AgentView, slots: list[int]) -> Outcome:
    """Processes of the agent that can enter a generation for the first time. A plain program says nothing of it."""
    out = Outcome()
    if job.restart_mode:
        return out
    found = {}
    for slot in slots:
        rank = agent.ranks.get(slot)
        if rank is None or rank.state not in READY:
            continue
        agent.announced[slot] = rank.incarnation
        if job.slot(slot).ready != Identity(agent.agent, rank.incarnation):
            found[slot] = rank.incarnation
    if found:
        out.record(job, records.RanksReady(agent=agent.agent, incarnations=found), 0)
    return out


def _problem(message: wire.Register, job: JobState | None) -> str:
    """Why an agent cannot be taken; empty when it can."""
    per_node = message.settings.ranks_per_node
    first = message.element * per_node
    if not message.job or not message.agent:
        return "a job and an agent need a name"
    if message.element < 0 or not 1 <= per_node <= wire.MAX_MEMBERS or len(message.slots) != per_node:
        return f"element {message.element} with {per_node} ranks needs as many slots, not {len(message.slots)}"
    if sorted(message.slots) != list(range(first, first + per_node)):
        return f"element {message.element} with {per_node} ranks must have the slots {first} to {first + per_node - 1}"
    if job is None:
        return ""
    if message.agent in job.superseded:
        return f"another agent has taken element {message.element} of job {message.job}"
    if per_node != job.settings.ranks_per_node:
        had = job.settings.ranks_per_node
        return f"job {message.job} has {had} ranks per node, this agent {per_node}: they must be the same"
    if message.settings.mode != job.settings.mode:
        had_mode, other, why = job.settings.mode, message.settings.mode, message.settings.mode_reason
        differs = f"job {message.job} is healed in {had_mode} mode, this agent would be in {other} mode ({why})"
        return f"{differs}: submit with --unicron-mode={had_mode} or --unicron-mode={other}, so that all are the same"
    return ""
