"""Agents that come: which are taken in, and which job and Slurm step they belong to.

Several `srun` in one batch script are trainings of their own under the same job id. A job's agents tell the number of
their Slurm step. The job is of one step at a time: a later step waits until the one before has ended, then the job
begins again. A step that was killed has ended when none of its agents is left: Slurm starts no task of a step again.
A step whose command trains nothing, a monitor in the background, is the job only until another one comes, and goes on
unprotected then. An element that was requeued runs its script from the start, while the others are further: what they
have behind them it does alone. Of two steps of one allocation that run at a time the one whose agents come
first is the job, and the other one goes on unprotected, on all of its nodes. When Slurm requeues the whole job, its
steps are counted anew.
"""

from __future__ import annotations

import msgspec

from unicron_ctl.controller.job import confirmation
from unicron_ctl.controller.job.orders import ending
from unicron_ctl.controller.model.agent_view import AgentView, Route
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import Identity, JobState, Phase
from unicron_ctl.controller.model.live import READY
from unicron_ctl.controller.model.submission import another
from unicron_ctl.controller.model.view import Listing, Outcome, Send, View
from unicron_ctl.controller.plan import job_layouts
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import ranges, wire
from unicron_ctl.shared.protocol.encryption import is_key
from unicron_ctl.shared.protocol.structs import Settings
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_detector.words import counted

# Jobs, and agents of them, that are taken in while Slurm does not say whose they are.
OF_A_USER = 20, 4096
COLD_REASONS = 20  # on record, of one job
OF_ALL = 400, 20_000


def answer(
    view: View, message: wire.Register, key: str, asker: Asker, info: ElementInfo | None = None
) -> wire.Message | None:
    """Why the agent is not taken in now, as the message to it; None when it is. asker: who made its credential, which
    is bound to what it says of itself and to `key`. info: its element as Slurm shows it, where Slurm has been asked."""
    job = view.state.jobs.get(message.job)
    if job is not None and another(job, info):
        return None
    if refused := _not_the_owner(view, message, job, asker) or _another_self(message, job, key):
        return refused
    if refused := _other_step(message, job):
        return refused
    if job is not None and message.agent in job.superseded and not begins(view, message, info):
        reason = f"another agent has taken element {message.element} of job {message.job}"
        return wire.Refusal(reason=reason, final=True, replaced=True)
    if job is not None and job.set_aside and not job.ended and not begins(view, message, info):
        known = job.agents.get(message.element)
        if released(job) or known is None or known.agent != message.agent:
            apart = not released(job) and not job.sweep and _others(view, message)
            return wire.Refusal(reason=job.set_aside, final=True, alone=job.sweep, apart=apart)
    other = None if begins(view, message, info) else job  # a next step may be in another mode
    if problem := _problem(message, other):
        return wire.Refusal(reason=problem, final=True, apart=_others(view, message))
    if problem := _other_command(message, other):
        return wire.Refusal(reason=problem, final=True, alone=True, apart=_others(view, message))
    if job is not None and job.ended and message.step <= job.step and not requeued(job, message):
        known = job.agents.get(message.element)
        if view.slurm.used and info is None and (known is None or known.agent != message.agent):
            # Slurm uses numbers again: what is on record may be another job, and this one would end untrained with 0.
            reason = f"a job {message.job} has ended, and Slurm has not said yet whether this is another one: it waits"
            return wire.Refusal(reason=reason)
        return ending(job.ended)
    return _too_many(view, message, asker) if view.slurm.used and info is None else None


def turned_away(view: View, route: Route, message: wire.Register, answered: wire.Message) -> Outcome:
    """Sends `answered` to an agent that is not taken in. An agent that does not fit the others of a job that nobody
    trains yet takes the protection from all: without each other neither part has a world."""
    out, job = Outcome(), view.state.jobs.get(message.job)
    if isinstance(answered, wire.Refusal) and answered.apart and job is not None and _unformed(job) and not job.over:
        reason = f"element {message.element} on {message.node}: {answered.reason}. Until then nothing protects the job"
        what = f"the registration of agent {message.agent}"
        out.record(job, records.JobSetAside(input=what, reason=reason, sweep=answered.alone))
        answered = wire.Refusal(reason=reason, final=True, alone=answered.alone)
    out.sends.append(Send(route, answered))
    return out


def released(job: JobState) -> bool:
    """The job was set aside while no rank has a world: its agents are to make a plain one."""
    return bool(job.set_aside) and _unformed(job)


def _unformed(job: JobState) -> bool:
    return job.phase is Phase.FORMING or (not job.mode.keeps_state and job.phase is Phase.BREAKING)


def _others(view: View, message: wire.Register) -> bool:
    """Other elements of the job have agents that live."""
    agents = view.live.jobs[message.job].agents if message.job in view.live.jobs else {}
    return any(agent.alive for element, agent in agents.items() if element != message.element)


def _not_the_owner(view: View, message: wire.Register, job: JobState | None, asker: Asker) -> wire.Refusal | None:
    """An agent may speak for a job only with its owner's credential, or an admin's. Nothing is final while the name
    service is away, for nobody is an admin then but root; nor while Slurm has not said whose the job is: whoever began
    it may have named another's, even an admin's."""
    if job is None:
        return None
    sure = bool(job.submitted) or not view.slurm.used
    if asker.may_order(job) and (sure or None in (job.uid, asker.uid) or job.uid == asker.uid):
        return None
    reason = f"job {message.job}: {asker} is not its owner {job.settings.user}"
    if not sure:
        reason = f"job {message.job} was begun by {job.settings.user}, and Slurm has not confirmed it: {asker} waits"
    return wire.Refusal(reason=reason, final=sure and bool(asker.user))


def _too_many(view: View, message: wire.Register, asker: Asker) -> wire.Refusal | None:
    """A new agent of a job that Slurm does not show: what may be made up meanwhile is bounded."""
    job = view.state.jobs.get(message.job)
    if job is not None and (known := job.agents.get(message.element)) and known.agent == message.agent:
        return None
    unconfirmed = [one for one in view.state.jobs.values() if not one.submitted and not one.over]
    of_user = [one for one in unconfirmed if one.uid == asker.uid]
    new = job is None or job.over
    for jobs, (most_jobs, most_agents) in ((of_user, OF_A_USER), (unconfirmed, OF_ALL)):
        agents = sum(len(one.agents) for one in jobs) + (len(job.agents) if job is not None and job.submitted else 0)
        if len(jobs) + new > most_jobs or agents >= most_agents:
            reason = (
                f"Slurm has not confirmed {counted(len(jobs), 'job')} with {counted(agents, 'agent')}: "
                f"job {message.job} waits for its word"
            )
            return wire.Refusal(reason=reason)
    return None


def _another_self(message: wire.Register, job: JobState | None, key: str) -> wire.Refusal | None:
    """An agent keeps its key, its node and its slots for life: Slurm is asked about them once."""
    known = job.agents.get(message.element) if job else None
    if known is None or known.agent != message.agent:
        return None
    for name, was, is_now in (
        ("key", known.key, key),
        ("node", known.node, message.node),
        ("slots", known.slots, list(message.slots)),
    ):
        if was != is_now:
            who = f"agent {message.agent} of job {message.job}"
            return wire.Refusal(reason=f"{who} has another {name} than before: each agent needs an id of its own")
    return None


def _other_step(message: wire.Register, job: JobState | None) -> wire.Refusal | None:
    if job is None or message.step == job.step:
        return None
    beside = message.step < job.step and one_element(message.settings)
    if job.over and not beside:
        return None
    which = f"step {message.step // ranges.LAUNCHES} of job {message.job}"
    at = job.step // ranges.LAUNCHES
    if begins_anew(job, message):
        return None
    if not message.trains and job.trains:
        reason = f"{which} trains nothing, and step {at} is the job"
        return wire.Refusal(reason=reason, final=True, alone=True)
    if message.step > job.step:
        reason = (
            f"{which} came while step {at} runs, and one step at a time is protected: if step {at} trains nothing, "
        )
        return wire.Refusal(reason=f"{reason}write `UNICRON=0 srun ...` for it")
    reason = f"{which} is over for the other elements, which are at step {at}"
    if beside:
        reason = f"{which} came after step {at} had begun, and one step at a time is protected"
    return wire.Refusal(reason=reason, alone=True)


def one_element(settings: Settings) -> bool:
    """The job is no array of several elements, so each of its steps runs once, and two may run at a time."""
    return settings.allocation or settings.max_nodes == settings.block


def begins_anew(job: JobState, message: wire.Register) -> bool:
    """The agent begins the job again although its step is not over on record. A step that trains takes the place of one
    that trains nothing, and any later one that of one whose agents are all gone."""
    free = (message.trains and not job.trains) or job.step_has_ended(message.element)
    return requeued(job, message) or (free and not job.over and message.step > job.step)


def requeued(job: JobState, message: wire.Register) -> bool:
    """Slurm has requeued the whole job since, and its script is at another step, or at the same one after its end."""
    return message.requeues > job.requeues and (message.step != job.step or job.over)


def _other_command(message: wire.Register, job: JobState | None) -> str:
    """Why an element of an array is a run of its own; empty where it runs what the others do."""
    if job is None or message.settings.runs_as(job.settings):
        return ""
    return (
        "its command is another one than that of the other elements, as in a sweep: submit a sweep without --unicron, "
        "or export UNICRON_SWEEP=0 in the batch script if its array is one training"
    )


def begins(view: View, message: wire.Register, info: ElementInfo | None = None) -> bool:
    """The job starts with this agent: for the first time, with its next step, or because Slurm uses its id again."""
    job = view.state.jobs.get(message.job)
    if job is None or another(job, info) or begins_anew(job, message):
        return True
    return job.over and message.step > job.step


def begin_job(
    view: View, message: wire.Register, asker: Asker, info: ElementInfo | None = None, seen: Listing | None = None
) -> Outcome:
    """Records a new job. info: Slurm's word on the element, which counts, not the message's; seen: the listing that has
    it."""
    out = Outcome()
    own = not asker.admin or asker.user == message.settings.user  # an admin may begin it for somebody else
    owner, settings, submitted = asker.uid if own else None, message.settings, 0.0
    nodes, restarts, runs = list[str](), 0, dict[int, float]()
    before = view.state.jobs.get(message.job)
    if before is not None and not another(before, info):
        broken_off = requeued(before, message) and not before.over
        runs = {**before.runs, before.step: before.registered_at} if broken_off else before.runs
    if info is not None and seen is not None:
        owner, submitted = info.uid, info.submitted
        most = max(1, min(settings.max_nodes, len(seen.of(message.job))))
        nodes, restarts = confirmation.nodes(seen, message.job)
        settings = msgspec.structs.replace(
            settings,
            user=info.user or settings.user,
            max_nodes=most,
            allocation=bool(nodes),
            block=info.block,
        )
    record = records.JobRegistered(
        settings=settings,
        step=message.step,
        trains=message.trains,
        uid=owner,
        submitted=submitted,
        nodes=nodes,
        restarts=restarts,
        runs=runs,
        reason=_as_text(settings),
    )
    out.records.append((message.job, 0, record))
    if settings.layouts:
        layout, reason = job_layouts.first(view, settings, message.node)
        out.records.append((message.job, 0, records.LayoutChosen(layout=layout, reason=reason)))
    return out


def _as_text(settings: Settings) -> str:
    """The job for the event log and unicrond's log."""
    most = settings.max_nodes
    nodes = f"{settings.min_nodes} to {most} nodes" if settings.min_nodes < most else counted(most, "node")
    return f"{settings.name} of {settings.user}, {nodes}, {settings.mode} mode: {settings.mode_reason}"


def join(
    job: JobState, message: wire.Register, key: str, confirmed: bool = True, info: ElementInfo | None = None
) -> Outcome:
    """Records the agent as one of the job's: a new one, or one that comes back. info: its element in Slurm."""
    out, known = Outcome(), job.agents.get(message.element)
    if known is None or known.agent != message.agent:
        out.hurry = True
        reachable = is_key(key or message.key)
        record = records.AgentRegistered(
            element=message.element,
            agent=message.agent,
            node=message.node,
            address=message.address,
            slots=list(message.slots),
            door=message.door,
            key=key,
            confirmed=confirmed,
            peer=message.peer if reachable else "",
            peer_key=key or message.key,
            requeues=message.requeues,
            restarts=info.restarts if info is not None else -1,
            reason=f"element {message.element} on {message.node}",
        )
        out.record(job, record, 0)
    elif known.gone:
        out.record(job, records.AgentBack(element=message.element, agent=message.agent, node=message.node), 0)
    return out


def ready_ranks(job: JobState, agent: AgentView, slots: list[int]) -> Outcome:
    """Processes of the agent that can enter a generation for the first time. A plain program says nothing of it."""
    out = Outcome()
    if not job.mode.reports:
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


def started_cold(job: JobState, agent: AgentView, known: set[str]) -> Outcome:
    """Reasons for which ranks of the agent did not start warm, and that are not `known` to be on record."""
    out = Outcome()
    for slot, reason in agent.status.cold.items():
        if reason not in known and len(known) < COLD_REASONS:
            known.add(reason)
            said = f"slot {slot} on {agent.node} started cold: {reason[:400]}"
            out.record(job, records.StartedCold(element=agent.element, reason=said), 0)
    return out


def _problem(message: wire.Register, job: JobState | None) -> str:
    """Why an agent cannot be taken; empty when it can."""
    per_node = message.settings.ranks_per_node
    if wrong := job_layouts.problem(message.settings):
        return f"job {message.job}: {wrong}"
    if job is None:
        return ""
    if per_node != job.settings.ranks_per_node:
        had = job.settings.ranks_per_node
        return f"job {message.job} has {counted(had, 'rank')} per node, this agent {per_node}: they must be the same"
    if message.settings.block != job.settings.block:
        had, here = job.settings.block, message.settings.block
        return f"job {message.job} has elements of {counted(had, 'node')}, this one {here}: give sbatch --nodes={had}"
    if message.settings.mode != job.settings.mode:
        had_mode, other, why = job.settings.mode, message.settings.mode, message.settings.mode_reason
        differs = f"job {message.job} is healed in {had_mode} mode, this agent would be in {other} mode ({why})"
        return f"{differs}: submit with --unicron-mode={had_mode} or --unicron-mode={other}, so that all are the same"
    if message.settings.layouts != job.settings.layouts:
        had_layouts, others = (", ".join(one.layouts) or "none" for one in (job.settings, message.settings))
        return f"job {message.job} has the layouts {had_layouts}, this agent {others}: UNICRON_LAYOUTS must be the same"
    return ""
