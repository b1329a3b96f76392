"""The answers about jobs."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import asdict

from unicron_ctl.controller.api import privacy
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.job.candidates import missing_places
from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.agent_view import CAN_ENTER
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import AgentRecord, Failure, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.plan.inputs import bounds, waiting, weight, why_fixed
from unicron_ctl.controller.plan.reconcile import shortage
from unicron_ctl.shared.protocol import answer_schema as schema
from unicron_detector.words import plural
from unicron_transition.generations import layout


def visible_jobs(core: Core, asker: Asker, brief: bool = False) -> list[schema.Job]:
    """Return all jobs that the asker may know, the ended ones last. brief: without their elements."""
    visible = privacy.visible(core.view, asker)
    return [privacy.of_job(core.view, state, job_answer(core, state, asker, brief), asker) for state in visible]


def job_answer(core: Core, state: JobState, asker: Asker, brief: bool = False) -> schema.Job:
    """Return one job. Parts that take long and that the asker may not see are not made. brief: without its ranks."""
    full = asker.may_read(state)
    nodes_now = len(state.inside) if not state.ended else 0
    return schema.Job(
        **asdict(_base(core, state, brief)),
        user=state.settings.user,
        partitions=partitions(core, state, asker),
        since=state.since,
        nodes=nodes_now,
        min_nodes=state.settings.min_nodes,
        max_nodes=state.settings.max_nodes,
        members=sorted(state.members),
        iteration=state.iteration,
        train_iterations=state.iterations_wanted,
        iteration_seconds=state.seconds,
        loss=state.loss,
        degraded=_slow(core, state),
        anomalies=anomalies(core, state.job) if full else [],
        weight=weight(core.view, state),
        flops=state.measured.get(nodes_now, 0.0),
        waf=waf(core, state),
        ledger_violations=state.ledger_violations,
        silent=_silent(core, state) if full else [],
        left_out=[f"{e} ({state.agents[e].node})" for e in sorted(state.parted)] if full else [],
        failures=len(state.failures),
        last_failure=failure_answer(state.failures[-1]) if state.failures else None,
        reason=state.decisions[-1].reason if state.decisions else "",
        elements=_elements(core, state) if full and not brief else [],
        barred=[plain(one, schema.Waiting) for one in waiting(core.view, state) if not one.starts] if full else [],
    )


def waf(core: Core, state: JobState) -> float:
    """Return the job's achieved FLOP/s times its weight; 0 if it has fewer nodes than it needs."""
    nodes = len(state.inside)
    if state.ended or nodes < state.settings.min_nodes:
        return 0.0
    return weight(core.view, state) * state.measured.get(nodes, 0.0)


def partitions(core: Core, job: JobState, asker: Asker) -> list[str]:
    """Return the partitions of a job: as Slurm shows them, or, once it no longer shows the job, those of the job's
    nodes, which only its readers see."""
    seen = core.view.slurm.seen
    shown = seen.partitions(job.job) if seen else frozenset()
    if shown or seen is None or not asker.may_read(job):
        return sorted(shown)
    infos = (seen.by_name.get(agent.node) for agent in job.agents.values())
    return sorted({name for info in infos if info is not None for name in info.partitions})


def explanation(core: Core, state: JobState) -> schema.Explanation:
    """Explain how a job is treated: the plan's reason, its failures, the last decisions about it."""
    report, view = core.state.plan_report, core.view.job(state)
    return schema.Explanation(
        **asdict(_base(core, state)),
        mode_reason=state.settings.mode_reason,
        log_dir=state.settings.log_dir,
        cold=view.cold() if not state.ended else {},
        forgets=view.forgets() if not state.ended else {},
        plan_reason=report.reasons.get(state.job, "") if report and not state.over else "",
        plan_trigger=report.trigger if report else "",
        bounds=_bounds(core, state) if not state.over else "",
        waiting=[plain(one, schema.Waiting) for one in waiting(core.view, state)],
        decisions=[plain(decided, schema.Decision) for decided in state.decisions],
        failures=[failure_answer(failure) for failure in state.failures],
    )


def _bounds(core: Core, state: JobState) -> str:
    if why := why_fixed(core.view, state):
        nodes = plural(state.settings.max_nodes, "node")
        return f"it is one allocation, of {nodes}, which the plan leaves as it is: {why}"
    if state.settings.allocation:
        least = state.settings.min_nodes
        return f"it is one allocation: the plan may take nodes from it, down to {least}, and cannot give it any"
    return bounds(core.view, state, _planned_with(core, state))


Struct = TypeVar("Struct", bound=msgspec.Struct)


def plain(source: object, kind: type[Struct]) -> Struct:
    """Copy the object's attributes into a struct of this kind."""
    return msgspec.convert(source, kind, from_attributes=True)


def failure_answer(failure: Failure) -> schema.Failure:
    """Return the failure's record with the times and actions that followed."""
    fields = asdict(failure.record) | vars(failure)
    return msgspec.convert({**fields, "kind": failure.record.kind_of_failure, "slot": failure.slot}, schema.Failure)


def _base(core: Core, state: JobState, brief: bool = False) -> schema.JobBase:
    view = core.view.job(state)
    size = view.replica
    standing = spares.standing(view) if not state.over else {}
    return schema.JobBase(
        job=state.job,
        name=state.settings.name,
        mode=state.settings.mode,
        state=state.phase.value,
        generation=state.generation,
        planned_nodes=core.state.assignment.get(state.job),
        layout=view.shape,
        layouts=list(state.settings.layouts),
        planned_layout=core.state.layouts.get(state.job, ""),
        replica=size,
        replicas=len(state.members) // size if not state.ended else 0,
        standbys=_standbys(view) if size > 1 and not state.ended else [],
        spares=[schema.Spare(element=e, node=view.agents[e].node, state=how) for e, how in standing.items()],
        spares_wanted=state.settings.spares,
        spares_ready=sum(how == "ready" for how in standing.values()),
        ended=plain(state.ended, schema.Ending) if state.ended else None,
        set_aside=state.set_aside,
        waits=state.waits or _why_not_formed(core, view),
        nan_since=state.nan_since if state.nan_since >= 0 else None,
        unsound_until=_made_again(state),
        goodput=state.goodput,
        trained_seconds=state.trained_seconds,
        lost_seconds=state.all_lost_seconds,
        blocks=_blocks(state) if state.settings.block > 1 and not state.ended else [],
        checkpoints="" if brief else next((s.saves_in for _, _, s in view.all_ranks() if s.saves_in), ""),
        verified=None if brief else max((s.verified for _, _, s in view.all_ranks() if s.verified >= 0), default=None),
    )


def _made_again(state: JobState) -> int | None:
    """The iteration that it had reached when it went back, until it has made that again."""
    reached = state.unsound.until - 1 if state.unsound is not None and not state.ended else -1
    return reached if reached > state.iteration else None


def _standbys(job: JobView) -> list[int]:
    """The slots whose ranks keep a state and do not train, and of the new ranks those that complete no replica."""
    states = {slot: status.state for _, slot, status in job.all_ranks()}
    if job.state.phase is Phase.FORMING:
        return [slot for slot, state in states.items() if state in ("standby", "stopped")]
    outside = [slot for slot, state in states.items() if state in CAN_ENTER]
    _, rest = layout.compose(outside, job.replica)
    spare = bool(job.state.settings.spares)  # new ranks wait as such
    return [slot for slot in outside if states[slot] == "standby" or (slot in rest and not spare)]


def _why_not_formed(core: Core, job: JobView) -> str:
    """Why ranks wait for others; empty as long as these may just be starting."""
    if (short := shortage(core.view, job.state)) is not None:
        return short.reason
    if job.state.phase is not Phase.FORMING or job.seconds_in_phase(core.now) <= core.config.forming_settle_seconds:
        return ""
    ready = {slot for _, slot, status in job.all_ranks() if status.state in (*CAN_ENTER, "stopped")}
    missing = missing_places(ready, job.replica)
    if not ready or not missing:
        return ""
    return f"a replica ({job.shape}) has {job.replica} ranks, and those for the places {missing[:20]} are missing"


def _blocks(state: JobState) -> list[str]:
    """Describe the elements that have had agents: each with its nodes and why an agent is gone."""
    blocks: dict[int, list[AgentRecord]] = {}
    for element, agent in sorted(state.agents.items()):
        blocks.setdefault(state.block_of(element), []).append(agent)
    return [
        f"{state.job}_{block} {','.join(agent.node for agent in agents)}"
        + "".join(f" ({agent.node}: {agent.gone})" for agent in agents if agent.gone)
        for block, agents in blocks.items()
    ]


def _silent(core: Core, state: JobState) -> list[str]:
    """Name the elements that the controller does not hear but does not count as lost."""
    suspected = [one for (job, _), one in sorted(core.view.suspicions.open.items()) if job == state.job]
    return [f"{one.element} ({one.node})" for one in suspected if core.now - one.since > core.config.lease]


def _elements(core: Core, state: JobState) -> list[schema.Element]:
    view = core.view.job(state)
    elements = []
    for element, record in sorted(state.agents.items()):
        agent = view.agents.get(element)
        statuses = [(slot, view.status(slot)) for slot in record.slots] if agent is not None else []
        ranks = [
            schema.Rank(
                slot=slot,
                state=s.state,
                incarnation=s.incarnation,
                generation=s.generation,
                iteration=s.iteration,
                phase=s.phase,
                pid=s.pid,
                start=view.agents[element].start(slot),
                forgets=s.forgets,
            )
            for slot, s in statuses
            if s is not None
        ]
        answer = schema.Element(
            element=element,
            node=record.node,
            agent=record.agent,
            gone=record.gone,
            last_heard=agent.last_heard if agent is not None else None,
            copies_failed=agent.status.unmoved if agent is not None else 0,
            ranks=ranks,
        )
        elements.append(answer)
    return elements


def _planned_with(core: Core, state: JobState) -> list[JobState]:
    acts = permission.acts(core.view, state)
    jobs = (job for job in core.state.jobs.values() if not job.over and not why_fixed(core.view, job))
    return [job for job in jobs if permission.acts(core.view, job) is acts]


def _slow(core: Core, state: JobState) -> schema.Slow | None:
    runtime = core.runtimes.get(state.job)
    if runtime is None or (slow := runtime.sensors.times.slow) is None:
        return None
    found = plain(slow, schema.Slow)
    if state.swap is None and slow.slot is not None and runtime.swaps.element == state.element(slow.slot):
        found.swap = runtime.swaps.why
    return found


def anomalies(core: Core, job: str) -> list[schema.Anomaly]:
    """Return the job's present anomalies."""
    runtime = core.runtimes.get(job)
    return [plain(item, schema.Anomaly) for item in runtime.sensors.peers.standing] if runtime else []
