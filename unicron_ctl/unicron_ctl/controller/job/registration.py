"""Registrations of agents: which are accepted, and to which job and Slurm step each belongs.

Slurm's record decides. An agent is accepted once a listing shows its element at work, on its node, for its user. If
Slurm does not show the element yet, the agent waits for the next listing; if Slurm shows something else, it is refused.
If Slurm does not answer within `CONFIRM_SECONDS` the agent is accepted unconfirmed: its job is healed within itself,
and nothing is asked of Slurm for it, or for its node, until a listing confirms it (:meth:`View.shown_node`,
:func:`confirmed_jobs`).

Several `srun` in one batch script are separate trainings under one job id, and one step at a time is the job. A later
step waits until the previous one has ended; a killed step has ended when none of its agents is left. A step that trains
nothing gives way to any later one. A requeued element runs unprotected through steps that are over for the others. If
two steps of one allocation run at the same time, the first to register is protected. When Slurm requeues the whole job,
its steps are counted anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from unicron_ctl.controller.job.orders import ending
from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.agent_view import Route
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import AgentRecord, JobState, Phase
from unicron_ctl.controller.model.view import Listing, Outcome, Send, View
from unicron_ctl.controller.plan import job_layouts
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import ranges, wire
from unicron_ctl.shared.protocol.encryption import is_key
from unicron_ctl.shared.protocol.structs import Settings
from unicron_ctl.shared.settings.partitions import OFF
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.states import OCCUPIES
from unicron_detector.words import plural

CONFIRM_SECONDS = 5.0  # then an agent is accepted although Slurm does not answer
LISTING_SECONDS = 30.0  # an older listing confirms no agent
# Most jobs, and agents of them, that are accepted before Slurm confirms them: of one user, and of all.
OF_A_USER = 20, 4096
OF_ALL = 400, 20_000
NOTICE_SHARE = 0.5  # of Slurm's KillWait: an agent that will end waits so long for a boundary; the rest is for files
PROGRESS_SECONDS = 0.2  # between two statuses of an agent that report only progress, in jobs that are not large
LARGE_JOB = 64  # nodes; in larger jobs progress and steps come with the heartbeats


@dataclass(frozen=True)
class Request:
    """A registration."""

    route: Route
    message: wire.Register
    key: str
    """The CURVE public key of its connection."""
    asker: Asker
    """The user of its credential, which is bound to the key and to the agent's claims about itself."""
    since: float
    """When it first came."""

    @property
    def name(self) -> tuple[str, int, str]:
        """Its job, element and agent."""
        return self.message.job, self.message.element, self.message.agent


@dataclass
class Case:
    """A registration with the facts about its job, for the checks."""

    view: View
    request: Request
    info: ElementInfo | None = None
    """Its element as Slurm shows it, if Slurm has answered."""

    def __post_init__(self) -> None:
        self.message = self.request.message
        self.job = self.view.state.jobs.get(self.message.job)

    @cached_property
    def same(self) -> JobState | None:
        """The job on record, unless Slurm has reused its id."""
        return None if self.job is None or self.job.id_reused(self.info) else self.job

    @cached_property
    def requeued(self) -> bool:
        """Whether Slurm has requeued the whole job, and its script is at another step, or at the same one after its
        end."""
        job, message = self.job, self.message
        return job is not None and message.requeues > job.requeues and (message.step != job.step or job.over)

    @cached_property
    def takes_over(self) -> bool:
        """Whether the agent begins the job again although the job's step is not over on record: after a requeue of the
        whole job, or as a later step if the present one trains nothing, or has no agent left."""
        job, message = self.job, self.message
        if job is None or self.requeued:
            return self.requeued
        # The step was killed, as by `scancel JOB.STEP`: all agents are gone, and this element's is not merely silent.
        ended = self.known is not None and self.known.gone not in ("", "silent")
        free = (message.trains and not job.trains) or (ended and all(agent.gone for agent in job.agents.values()))
        return free and not job.over and message.step > job.step

    @cached_property
    def begins(self) -> bool:
        """Whether the job starts with this agent: for the first time, with its next step, or under a reused id."""
        job = self.same
        return job is None or self.takes_over or (job.over and self.message.step > job.step)

    @cached_property
    def known(self) -> AgentRecord | None:
        """The last agent of its element."""
        return self.job.agents.get(self.message.element) if self.job is not None else None

    @cached_property
    def is_back(self) -> bool:
        """Whether the agent is on record already."""
        return self.known is not None and self.known.agent == self.message.agent

    @property
    def has_mates(self) -> bool:
        """Whether other elements of the job have living agents."""
        job = self.view.live.jobs.get(self.message.job)
        return job is not None and any(agent.element != self.message.element for agent in job.alive())

    def final(self, reason: str, alone: bool = False) -> wire.Refusal:
        """The final refusal of an agent that does not fit the others of its job."""
        return wire.Refusal(reason=reason, final=True, alone=alone, apart=self.has_mates)


# ---------------------------------------------------------------- why an agent is not accepted
Check = Callable[[Case], wire.Message | None]


def refusal(case: Case) -> wire.Message | None:
    """The message to an agent that is not accepted now; None for one that is."""
    if case.job is not None and case.same is None:
        return None
    return next((answer for check in CHECKS if (answer := check(case)) is not None), None)


def _turned_off(case: Case) -> wire.Message | None:
    """Refuses a job of a partition whose mode is "off": it runs unprotected. Slurm shows the partition."""
    view, name = case.view, case.message.job
    if case.job is not None:
        return None
    modes = {view.config.rules(partition).mode for partition in ("", *view.config.partitions)}
    if OFF not in modes:
        return None
    if view.slurm.used and not (view.slurm.seen and view.slurm.seen.of(name)) and len(modes) > 1:
        return wire.Refusal(reason=f"Slurm does not show job {name} yet: its partition is not known")
    rules = permission.of_job(view, name)
    if rules.mode != OFF:
        return None
    return wire.Refusal(reason=f'partition {rules.partition} is "off" in the configuration of unicrond', final=True)


def _not_the_owner(case: Case) -> wire.Message | None:
    """Refuses a credential that is neither the owner's nor an admin's. The refusal is not final while the name service
    is away, because then only root counts as an admin; nor before Slurm has shown the owner, because the agent that
    began the job may have named another user's, even an admin's."""
    job, asker = case.job, case.request.asker
    if job is None:
        return None
    sure = bool(job.submitted) or not case.view.slurm.used
    if asker.may_order(job) and (sure or None in (job.uid, asker.uid) or job.uid == asker.uid):
        return None
    reason = f"job {job.job}: {asker} is not its owner {job.settings.user}"
    if not sure:
        reason = f"job {job.job} was begun by {job.settings.user}, and Slurm has not confirmed it: {asker} waits"
    return wire.Refusal(reason=reason, final=sure and bool(asker.user))


def _another_self(case: Case) -> wire.Message | None:
    """Refuses an agent with another key, node or slots than before: Slurm confirmed them only once."""
    record, message = case.known, case.message
    if record is None or not case.is_back:
        return None
    before = {"key": record.key, "node": record.node, "slots": record.slots}
    now = {"key": case.request.key, "node": message.node, "slots": list(message.slots)}
    name = next((name for name in before if before[name] != now[name]), "")
    agent = f"agent {message.agent} of job {message.job}"
    reason = f"{agent} has another {name} than before: each agent needs an id of its own"
    return wire.Refusal(reason=reason, final=True) if name else None


def _other_step(case: Case) -> wire.Message | None:
    """Refuses an agent of another step than the job's."""
    job, message = case.job, case.message
    if job is None or message.step == job.step or case.takes_over:
        return None
    one = message.settings.allocation or message.settings.max_nodes == message.settings.block
    beside = message.step < job.step and one  # no array: each step runs once, and two may run at a time
    if job.over and not beside:
        return None
    which = f"step {message.step // ranges.LAUNCHES} of job {message.job}"
    at = f"step {job.step // ranges.LAUNCHES}"
    if not message.trains and job.trains:
        return wire.Refusal(reason=f"{which} trains nothing, and {at} is the job", final=True, alone=True)
    if message.step > job.step:
        reason = f"{which} came while {at} runs, and one step at a time is protected: if {at} trains nothing, "
        return wire.Refusal(reason=f"{reason}write `UNICRON=0 srun ...` for it")
    if beside:
        reason = f"{which} came after {at} had begun, and one step at a time is protected"
    else:
        reason = f"{which} is over for the other elements, which are at {at}"
    return wire.Refusal(reason=reason, alone=True)


def _has_successor(case: Case) -> wire.Message | None:
    """Refuses an agent whose element another agent has taken since."""
    if case.job is None or case.message.agent not in case.job.superseded or case.begins:
        return None
    return replaced_by_another(case.message.job, case.message.element)


def replaced_by_another(job: str, element: int) -> wire.Refusal:
    """The message to an agent whose element another agent has taken."""
    return wire.Refusal(reason=f"another agent has taken element {element} of job {job}", final=True, replaced=True)


def _left_alone(case: Case) -> wire.Message | None:
    """Refuses newcomers of a job that is set aside; its own agents go on."""
    job = case.job
    if job is None or not job.set_aside or job.ended or case.begins or (case.is_back and not released(job)):
        return None
    apart = not released(job) and not job.sweep and case.has_mates
    return wire.Refusal(reason=job.set_aside, final=True, alone=job.sweep, apart=apart)


def _unlike_the_others(case: Case) -> wire.Message | None:
    """Refuses an agent that cannot train with the others. The next step may differ."""
    job, mine = case.job, case.message.settings
    if wrong := job_layouts.problem(mine):
        return case.final(f"job {case.message.job}: {wrong}")
    if job is None or case.begins:
        return None
    if problem := next(_differences(case.message.job, mine, job.settings), ""):
        return case.final(problem)
    if mine.runs_as(job.settings):
        return None
    sweep = (
        "its command is another one than that of the other elements, as in a sweep: submit a sweep without --unicron, "
        "or export UNICRON_SWEEP=0 in the batch script if its array is one training"
    )
    return case.final(sweep, alone=True)


def _differences(name: str, mine: Settings, its: Settings) -> Iterator[str]:
    """Each difference between an agent's settings and its job's that prevents training together."""
    if mine.ranks_per_node != its.ranks_per_node:
        ranks = plural(its.ranks_per_node, "rank")
        yield f"job {name} has {ranks} per node, this agent {mine.ranks_per_node}: they must be the same"
    if mine.block != its.block:
        nodes = plural(its.block, "node")
        yield f"job {name} has elements of {nodes}, this one {mine.block}: give sbatch --nodes={its.block}"
    if mine.mode != its.mode:
        why = f"this agent would be in {mine.mode} mode ({mine.mode_reason})"
        ways = f"submit with --unicron-mode={its.mode} or --unicron-mode={mine.mode}, so that all are the same"
        yield f"job {name} is healed in {its.mode} mode, {why}: {ways}"
    if mine.layouts != its.layouts:
        job, agent = (", ".join(settings.layouts) or "none" for settings in (its, mine))
        yield f"job {name} has the layouts {job}, this agent {agent}: UNICRON_LAYOUTS must be the same"


def _has_ended(case: Case) -> wire.Message | None:
    """Ends an agent of a job that has ended. Slurm reuses ids: an agent that is not on record may be of another job,
    which would end untrained with 0; so it waits until Slurm shows the job."""
    job = case.job
    if job is None or job.ended is None or case.message.step > job.step or case.requeued:
        return None
    if case.view.slurm.used and case.info is None and not case.is_back:
        reason = f"a job {job.job} has ended, and Slurm has not said yet whether this is another one: it waits"
        return wire.Refusal(reason=reason)
    return ending(job.ended)


def _too_many(case: Case) -> wire.Message | None:
    """Refuses more unconfirmed jobs or agents than the limits of a user, and of all: they may be made up."""
    job, asker = case.job, case.request.asker
    if not case.view.slurm.used or case.info is not None or case.is_back:
        return None
    unconfirmed = [one for one in case.view.state.jobs.values() if not one.submitted and not one.over]
    of_user = [one for one in unconfirmed if one.uid == asker.uid]
    new, mine = job is None or job.over, len(job.agents) if job is not None and job.submitted else 0
    for jobs, (most_jobs, most_agents) in ((of_user, OF_A_USER), (unconfirmed, OF_ALL)):
        agents = sum(len(one.agents) for one in jobs) + mine
        if len(jobs) + new > most_jobs or agents >= most_agents:
            reason = f"Slurm has not confirmed {plural(len(jobs), 'job')} with {plural(agents, 'agent')}"
            return wire.Refusal(reason=f"{reason}: job {case.message.job} waits for its word")
    return None


CHECKS: tuple[Check, ...] = (
    _turned_off,
    _not_the_owner,
    _another_self,
    _other_step,
    _has_successor,
    _left_alone,
    _unlike_the_others,
    _has_ended,
    _too_many,
)
"""The first check with a message decides."""


def released(job: JobState) -> bool:
    """Whether the job was set aside before any rank had a world: its agents make a plain one."""
    return bool(job.set_aside) and _unformed(job)


def _unformed(job: JobState) -> bool:
    return job.phase is Phase.FORMING or (not job.mode.keeps_state and job.phase is Phase.BREAKING)


def turn_away(case: Case, answer: wire.Message) -> Outcome:
    """Sends `answer` to an agent that is not accepted. If the agent does not fit the others of a job that does not
    train yet, the whole job loses its protection: without each other neither part has a world."""
    out, job, message = Outcome(), case.job, case.message
    if isinstance(answer, wire.Refusal) and answer.apart and job is not None and _unformed(job) and not job.over:
        reason = f"element {message.element} on {message.node}: {answer.reason}. Until then nothing protects the job"
        what = f"the registration of agent {message.agent}"
        out.record(job, records.JobSetAside(input=what, reason=reason, sweep=answer.alone))
        answer = wire.Refusal(reason=reason, final=True, alone=answer.alone)
    out.sends.append(Send(case.request.route, answer))
    return out


# ---------------------------------------------------------------- the records of an accepted agent
def admission(case: Case, confirmed: bool) -> Outcome:
    """Records an agent that is new or comes back, and its job if that begins with it."""
    out, message, job, info = Outcome(), case.message, case.job, case.info
    news: list[records.Record] = []
    before = None if case.begins else case.known
    if case.begins:
        news += _beginning(case)
    elif info is not None and job is not None and job.nodes and info.restarts != job.nodes_of_restart:
        nodes, restarts = nodes_of(case.view.slurm.seen, message.job)
        reason = f"Slurm has requeued job {message.job} on {plural(len(nodes), 'node')}"
        news.append(records.JobReallocated(nodes=nodes, restarts=restarts, reason=reason))
    if before is None or before.agent != message.agent:
        out.hurry = True
        news.append(_as_record(case, confirmed))
    elif before.gone:
        news.append(records.AgentBack(element=message.element, agent=message.agent, node=message.node))
    out.records += [(message.job, 0, record) for record in news]
    return out


def _as_record(case: Case, confirmed: bool) -> records.AgentRegistered:
    """The record of the agent. Others can reach it if it has a key."""
    message, key = case.message, case.request.key or case.message.key
    return records.AgentRegistered(
        element=message.element,
        agent=message.agent,
        node=message.node,
        address=message.address,
        slots=list(message.slots),
        door=message.door,
        key=case.request.key,
        confirmed=confirmed,
        peer=message.peer if is_key(key) else "",
        peer_key=key,
        requeues=message.requeues,
        restarts=case.info.restarts if case.info is not None else -1,
        reason=f"element {message.element} on {message.node}",
    )


def _beginning(case: Case) -> Iterator[records.Record]:
    """Records a new job, with Slurm's facts rather than the agent's."""
    message, asker, info, before = case.message, case.request.asker, case.info, case.same
    own = not asker.admin or asker.user == message.settings.user  # an admin may begin it for another user
    uid, settings, submitted = asker.uid if own else None, message.settings, 0.0
    nodes, restarts, runs, seen = list[str](), 0, dict[int, float](), case.view.slurm.seen
    if before is not None:
        broken_off = {before.step: before.registered_at} if case.requeued and not before.over else {}
        runs = {**before.runs, **broken_off}
    if info is not None and seen is not None:
        uid, submitted = info.uid, info.submitted
        nodes, restarts = nodes_of(seen, message.job)
        settings = msgspec.structs.replace(
            settings,
            user=info.user or settings.user,
            max_nodes=max(1, min(settings.max_nodes, len(seen.of(message.job)))),
            allocation=bool(nodes),
            block=info.block,
        )
    least, most = settings.min_nodes, settings.max_nodes
    size = f"{least} to {most} nodes" if least < most else plural(most, "node")
    yield records.JobRegistered(
        settings=settings,
        step=message.step,
        trains=message.trains,
        uid=uid,
        submitted=submitted,
        nodes=nodes,
        restarts=restarts,
        runs=runs,
        reason=f"{settings.name} of {settings.user}, {size}, {settings.mode} mode: {settings.mode_reason}",
    )
    if settings.layouts:
        layout, reason = job_layouts.first(case.view, settings, message.node)
        yield records.LayoutChosen(layout=layout, reason=reason)


def nodes_of(seen: Listing | None, job: str) -> tuple[list[str], int]:
    """(nodes of the allocation in the order of its elements, how often Slurm has requeued it); ([], 0) for an array."""
    listed = seen.of(job) if seen is not None else {}
    found = [info for _, info in sorted(listed.items()) if info.allocation > 1 and info.node]
    return [info.node or "" for info in found], found[0].restarts if found else 0


def welcome(view: View, job: JobState) -> wire.Welcome:
    """The answer to an agent that is accepted."""
    config = view.config
    return wire.Welcome(
        heartbeat_period=config.heartbeat_period,
        controller="unicrond",
        metrics_seconds=config.metrics_seconds,
        symptom_seconds=config.symptom_seconds,
        metrics_directory=config.metrics_directory,
        progress_seconds=progress_seconds(view, job),
        layout=job.layout,
        run=f"{round(job.registered_at * 1e6):x}",
        notice_seconds=NOTICE_SHARE * view.slurm.kill_wait,
        brief=True,
        fence_seconds=config.fence_seconds,
    )


def progress_seconds(view: View, job: JobState) -> float:
    """Seconds for which an agent of the job may hold back reports of mere progress."""
    return max(PROGRESS_SECONDS, view.config.heartbeat_period * (job.settings.max_nodes > LARGE_JOB))


# ---------------------------------------------------------------- confirmation by Slurm
def compare(view: View, place: tuple[str, int, str], asker: Asker, since: float) -> ElementInfo | wire.Refusal | None:
    """The element as Slurm shows it; the refusal of the agent; or None while Slurm has not answered. Pure.

    place: job, element and node that the agent names. Only a listing that was requested after the agent came can refuse
    it, and finally only by showing another owner or another node.
    """
    (job, element, node), seen = place, view.slurm.seen
    if seen is None:
        return None
    name, fresh = f"element {element} of job {job}", seen.asked_at >= since
    info = seen.of(job).get(element)
    if info is None:
        return wire.Refusal(reason=f"Slurm shows no {name}") if fresh else None
    mine = asker.admin or asker.uid == info.uid
    works = info.state in OCCUPIES and node in seen.nodes_of(info)
    if mine and works and view.now - seen.asked_at <= LISTING_SECONDS:
        return info
    if not fresh:
        return None
    if not mine:
        return wire.Refusal(reason=f"job {job}: {asker} is not its owner {info.user}", final=True)
    if info.state in OCCUPIES and not works:
        return wire.Refusal(reason=f"Slurm runs {name} on {info.node}, not on {node}", final=True)
    return None if works else wire.Refusal(reason=f"Slurm shows {name} as {info.state}, not at work")


def confirmed_jobs(view: View, jobs: Sequence[JobState]) -> list[JobState]:
    """The jobs whose owner Slurm has shown."""
    return [job for job in jobs if job.submitted or not view.slurm.used]


def confirm_agents(view: View, listing: Listing, job: JobState) -> Outcome:
    """Confirms a job, or agents of it, that were accepted unconfirmed."""
    out = Outcome()
    unsure = [element for element, agent in job.agents.items() if not agent.confirmed]
    if job.submitted and not unsure:
        return out
    if (other := next(iter(listing.of(job.job).values()), None)) is not None and job.id_reused(other):
        reason = f"Slurm shows job {job.job} as {other.user}'s"
        out.record(job, records.JobEnded(code=1, reason=reason, disowned=True))
        return out
    asker = Asker(uid=job.uid, admin=job.uid is None)
    for element in sorted(unsure if job.submitted else job.agents):
        agent = job.agents[element]
        info = compare(view, (job.job, element, agent.node), asker, listing.asked_at)
        if not isinstance(info, ElementInfo):
            continue
        if not job.submitted and not out.records:
            nodes, restarts = nodes_of(listing, job.job)
            confirmed = records.JobConfirmed(
                uid=info.uid,
                user=info.user,
                submitted=info.submitted,
                most=len(listing.of(job.job)),
                nodes=nodes,
                restarts=restarts,
                reason=f"Slurm shows job {job.job} as {info.user}'s",
            )
            out.record(job, confirmed)
        out.record(job, records.AgentConfirmed(element=element, agent=agent.agent))
    return out
