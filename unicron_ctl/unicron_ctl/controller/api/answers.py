"""The questions of `unicronctl` and their answers: the structs of `protocol.answer_schema`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from unicron_ctl.controller.api import filters, privacy
from unicron_ctl.controller.api.filters import Unanswerable as Unanswerable
from unicron_ctl.controller.api.job_answers import explanation, failure_answer, partitions, plain, visible_jobs
from unicron_ctl.controller.api.node_answers import visible_nodes
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.job import injection
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import Failure
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.controller.nodes import isolation, readmission
from unicron_ctl.controller.plan import planning
from unicron_ctl.controller.plan.inputs import inputs, usable_nodes, why_fixed
from unicron_ctl.shared.log import records, savings, week
from unicron_ctl.shared.log.naming import KINDS_WITH_NODES
from unicron_ctl.shared.log.store import EventFilter, Store
from unicron_ctl.shared.protocol import answer_schema as schema
from unicron_ctl.shared.protocol.audience import LAST_FAILURES
from unicron_ctl.shared.protocol.questions import (
    EventsQuestion,
    ExplainQuestion,
    Filters,
    InjectOrder,
    NoArguments,
    PauseOrder,
    ReportQuestion,
    ResumeOrder,
    StatusQuestion,
)
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.settings.partitions import DEFAULT
from unicron_ctl.shared.system.release import release

log = logging.getLogger("unicron.controller")
MOMENT = 3600.0  # seconds: "in 0.0 days" says nothing
SUM_AGAIN = 3600.0  # seconds after a weekly sum that failed
RELEASE = release()  # once, at the start: what is installed may be replaced while this runs


def answer(core: Core, store: Store, what: str, args: Mapping[str, Any], asker: Asker) -> Any:
    """The data for a question of `asker`. Raises Unanswerable."""
    if what not in QUESTIONS:
        known = ", ".join(sorted(QUESTIONS))
        raise Unanswerable(f"this controller does not know the question {what!r}: it knows {known}")
    kind, function = QUESTIONS[what]
    try:
        question = msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        raise Unanswerable(f"{what}: {error}") from None
    return function(core, store, question, asker)


def status(core: Core, store: Store, wanted: StatusQuestion, asker: Asker) -> schema.Status:
    """Everything at a glance, or what is asked for. What needs an admin is always there."""
    names = filters.checked_nodes(core, wanted, asker, _partitions(core))
    all_jobs, all_nodes = visible_jobs(core, asker, wanted.brief), visible_nodes(core, asker, wanted.brief)
    listed = filters.jobs(all_jobs, wanted, names, all_nodes)
    mine = [job for job in core.state.jobs.values() if asker.may_read(job)]
    failures = sorted((f for job in mine for f in job.failures), key=lambda failure: -failure.id)
    last = _last(core, filters.failures(failures, wanted, names, listed), wanted.each)
    report = core.state.plan_report
    return schema.Status(
        controller=_controller(core),
        jobs=listed,
        nodes=filters.nodes(all_nodes, wanted, names, all_jobs),
        failures=[failure_answer(failure) for failure in reversed(last)],
        attention=[plain(item, schema.Attention) for item in isolation.attention(core.view)] if asker.reads_all else [],
        observed=observed_lines(core, store) if asker.reads_all else [],
        waf=sum(item.waf for item in listed),
        plan=plain(report, schema.PlanReport) if report and asker.reads_all else schema.PlanReport(),
        sharing=privacy.sharing(core.view) if asker.reads_all else None,
    )


def _last(core: Core, newest_first: Iterable[Failure], each: bool) -> list[Failure]:
    """The last failures of all, or of each user."""
    told, counts = list[Failure](), Counter[object]()
    for failure in newest_first:
        job = core.state.jobs[failure.job]
        owner = (job.uid, job.settings.user) if each else None
        if counts[owner] < LAST_FAILURES:
            counts[owner] += 1
            told.append(failure)
    return told


def _controller(core: Core) -> schema.Controller:
    slurm = core.view.slurm
    return schema.Controller(
        pid=os.getpid(),
        since=core.view.started_at,
        time=core.now,
        alone_since=core.view.suspicions.alone_since,
        most_silent_since=core.view.suspicions.most_since,
        modes=modes(core),
        paused=_pause_state(core).until,
        events=core.state.last_event,
        slurm=schema.SlurmStatus(
            used=slurm.used, last_answer=slurm.seen.asked_at if slurm.seen else None, error=slurm.error
        ),
    )


def modes(core: Core) -> dict[str, str]:
    """The mode of each partition that Slurm shows, of those that the configuration names, and of all others
    ("default")."""
    seen = core.view.slurm.seen
    shown = {name for node in (seen.nodes if seen else ()) for name in node.partitions}
    return {name: core.view.rules(name).mode for name in sorted({DEFAULT, *shown, *core.config.partitions})}


def _partitions(core: Core) -> set[str]:
    return {*modes(core)} - {DEFAULT}


def jobs(core: Core, store: Store, wanted: Filters, asker: Asker) -> list[schema.Job]:
    """All jobs of which the asker may know, the ended ones last, or those that are asked for."""
    names = filters.checked_nodes(core, wanted, asker, _partitions(core))
    return filters.jobs(visible_jobs(core, asker), wanted, names, visible_nodes(core, asker) if names else ())


def nodes(core: Core, store: Store, wanted: Filters, asker: Asker) -> list[schema.Node]:
    """All nodes that Slurm shows, and those on which an agent speaks, or those that are asked for."""
    names = filters.checked_nodes(core, wanted, asker, _partitions(core))
    return filters.nodes(visible_nodes(core, asker), wanted, names, visible_jobs(core, asker) if wanted.user else ())


def events(core: Core, store: Store, question: EventsQuestion, asker: Asker) -> list[dict[str, object]]:
    """The log after an id, or its end. Where it is too much for one answer an item of the kind CUT stands for the rest,
    with the id of the event up to which the log was read."""
    after, wanted = question.after, _event_filter(core, question, asker)
    found = store.tail(after, question.limit, wanted)
    told = [event.as_dict() for event in found.events]
    if found.cut:
        reason = f"{'later' if after else 'earlier'} events are left out: they are too much for one answer"
        number, time = found.cut
        told.insert(len(told) if after else 0, _item(number, time, schema.CUT, reason))
    if question.mark and not (after and (found.cut or len(told) >= question.limit)):
        told.append(_item(core.state.last_event, core.now, schema.READ, ""))
    return told


def _item(number: int, time: float, kind: str, reason: str) -> dict[str, object]:
    return {"id": number, "time": time, "job": "", "generation": 0, "kind": kind, "reason": reason}


def _event_filter(core: Core, question: EventsQuestion, asker: Asker) -> EventFilter:
    """Return which part of the log is asked for. Raises Unanswerable."""
    names = filters.checked_nodes(core, question, asker, _partitions(core))
    kinds = filters.kinds(question.kinds)
    return EventFilter(
        jobs=_jobs_of_events(core, question, asker),
        kinds=kinds or (KINDS_WITH_NODES if names is not None else ()),
        without=question.without.split(),
        nodes=names,
        nodes_of_no_job=_nodes_of_no_job(core, question.partition, names),
        since=question.since,
        before=question.before,
    )


def _jobs_of_events(core: Core, question: EventsQuestion, asker: Asker) -> set[str] | None:
    """Return the jobs whose events are asked for ("": those of no job), None for all. Events of a job are its owner's;
    those of nodes and of the controller the admins'. Raises Unanswerable."""
    name = _job_id(core, question.job, asker) if question.job else None
    visible = privacy.visible(core.view, asker)
    readable = [job for job in visible if asker.may_read(job) and question.user in ("", job.settings.user)]
    if question.user and not readable:
        raise Unanswerable(f"{asker} may not read events of {question.user}'s jobs: only they, readers and admins")
    every = asker.reads_all and not (name or question.user)
    if every and not question.partition:
        return None
    found = {
        job.job
        for job in readable
        if name in (None, job.job) and (not question.partition or question.partition in partitions(core, job, asker))
    }
    return found | {""} if every else found


def _nodes_of_no_job(core: Core, partition: str, names: frozenset[str] | None) -> frozenset[str] | None:
    """Return the nodes of which an event of no job has to name one: those of the partition that is asked for."""
    if not partition:
        return None
    seen = core.view.slurm.seen
    inside = frozenset(node.name for node in (seen.nodes if seen else ()) if partition in node.partitions)
    return inside if names is None else inside & names


def explain(core: Core, store: Store, question: ExplainQuestion, asker: Asker) -> schema.Explanation:
    """Why a job is treated as it is; for its owner, readers and admins."""
    state = core.state.jobs[_job_id(core, question.job, asker)]
    if not asker.may_read(state):
        raise Unanswerable(f"{asker} may not read this: only the job's owner, readers and admins")
    return explanation(core, state)


def _job_id(core: Core, text: str, asker: Asker) -> str:
    """A job by its id, or by its name where that is unique among living jobs that the asker may see. Raises
    Unanswerable."""
    seen = {state.job: state for state in privacy.visible(core.view, asker)}
    if text in seen:
        return text
    named = [state for state in seen.values() if state.settings.name == text]
    living = [state for state in named if not state.ended] or named[-1:]
    if len(living) == 1:
        return living[0].job
    known = ", ".join(sorted(seen)) or "none yet"
    raise Unanswerable(f"{'several jobs are' if living else 'no job is'} called {text[:100]!r}: jobs are {known}")


def inject(core: Core, store: Store, order: InjectOrder, asker: Asker) -> schema.Injection:
    """Breaks a rank on purpose."""
    state = core.state.jobs[_job_id(core, order.job, asker)]
    if not asker.may_order(state):
        raise Unanswerable(f"{asker} may not inject here: only the job's owner and admins")
    target = order.fault, order.slot, order.node, order.seconds, order.dry_run
    try:
        done, outcome = injection.perform(core.view, core.view.job(state), *target)
    except injection.NotInjected as error:
        raise Unanswerable(str(error)) from None
    core.carry_out(outcome)
    if not order.dry_run:
        core.runtime(state).injected.add(done.slot)
        done.event = core.state.last_event
    return done


def health(core: Core, store: Store, report: readmission.Report, asker: Asker) -> dict[str, bool]:
    """Takes a node's health report."""
    if not asker.admin:
        raise Unanswerable(f"{asker} may not report health here: only root and admins")
    seen = core.view.slurm.seen
    if seen is not None and report.node not in seen.by_name:
        raise Unanswerable(f"health: Slurm shows no node {report.node!r}")
    core.carry_out(readmission.on_health_report(core.view, core.slurm.gate, report))
    return {"taken": True}


def pause(core: Core, store: Store, order: PauseOrder, asker: Asker) -> schema.PauseState:
    """Changes nothing in Slurm for a while, though the configuration allows it."""
    _check_partition(core, order.partition, asker)
    until = core.now + order.seconds if order.seconds else 0.0
    # As a duration: the time of day would be that of the controller's zone, and the record has `until`.
    how_long = f"for {timedelta(seconds=round(order.seconds))}" if order.seconds else "until it is resumed"
    reason = f"{_whole(order.partition)} {how_long}: {asker} has asked for it"
    record = records.ActionsPaused(partition=order.partition, until=until, reason=reason)
    core.carry_out(Outcome(records=[("", 0, record)]))
    return _pause_state(core)


def resume(core: Core, store: Store, order: ResumeOrder, asker: Asker) -> schema.PauseState:
    """Acts again where the configuration allows it."""
    _check_partition(core, order.partition, asker)
    if core.state.is_paused("", core.now) and order.partition:
        raise Unanswerable(f"all partitions are paused, not {order.partition} alone: `unicronctl resume` ends it")
    reason = f"{_whole(order.partition)}: {asker} has asked for it"
    record = records.ActionsResumed(partition=order.partition, reason=reason)
    core.carry_out(Outcome(records=[("", 0, record)]))
    return _pause_state(core)


def _whole(partition: str) -> str:
    return f"partition {partition}" if partition else "everything"


def _check_partition(core: Core, name: str, asker: Asker) -> None:
    if not asker.admin:
        raise Unanswerable(f"{asker} may not do this: only root and admins")
    filters.check_partition(name, _partitions(core))


def _pause_state(core: Core) -> schema.PauseState:
    ends = core.state.paused
    until = {name: ends[name] for name in sorted(ends) if core.state.is_paused(name, core.now)}
    return schema.PauseState(time=core.now, until=until, modes=modes(core))


def ping(core: Core, store: Store, question: NoArguments, asker: Asker) -> schema.Pong:
    """Whether the controller answers, and how soon: through the same queue and loop as every message."""
    return schema.Pong(release=RELEASE, time=core.now, uid=os.geteuid())


def scenario(core: Core, store: Store, question: NoArguments, asker: Asker) -> schema.Scenario:
    """The planner's input of this moment, in the structure of a scenario file (unicron_planner/problem/scenario.py)."""
    config, seen = core.config, core.view.slurm.seen
    running = [state for state in core.state.jobs.values() if not state.over and not why_fixed(core.view, state)]
    found = inputs(core.view, running)
    rates = [i.rate / i.measured_nodes for i in found if i.rate and i.measured_nodes]
    usual = sum(rates) / len(rates) if rates else planning.NOMINAL_RATE
    cluster = schema.ScenarioCluster(
        nodes=len(usable_nodes(core.view, seen, running)) if seen else sum(i.nodes for i in found),
        mtbf_node_hours=config.mtbf_node_hours,
        transition_seconds=config.transition_seconds,
    )
    shown = [i for i in found if not privacy.hidden(core.view, core.state.jobs[i.job], asker)]
    return schema.Scenario(cluster=cluster, job=[_scenario_job(core, i, usual, asker) for i in shown])


def _scenario_job(core: Core, i: planning.JobInput, usual: float, asker: Asker) -> schema.ScenarioJob:
    full = asker.may_read(core.state.jobs[i.job])
    job = schema.ScenarioJob(
        name=i.job,
        weight=i.weight,
        min_nodes=i.min_nodes,
        max_nodes=i.max_nodes,
        nodes=i.nodes,
        lost_worker=i.alive < i.nodes,
        owner=i.whose,
        unit=i.unit,
        keep=min(i.alive, i.unit),
        node_names=sorted(a.node for a in core.view.live.jobs[i.job].agents.values() if a.alive) if full else [],
    )
    if i.layouts:
        job.layouts = {name: _sizes(i, table) for name, table in i.layouts.items()}
        job.layout, job.transition = i.layout, {"restart": i.restart_seconds}
    else:
        job.flops = _sizes(i, planning.throughput(i, usual))
    if saved := planning.spares(i, usual, core.config.mtbf_node_hours):
        job.spares = _sizes(i, saved)
    return job


def _sizes(i: planning.JobInput, table: Mapping[int, float]) -> dict[str, float]:
    return {str(nodes): rate for nodes, rate in planning.in_blocks(i, table).items()}


def report(core: Core, store: Store, question: ReportQuestion, asker: Asker) -> schema.Report:
    """Failures by cause, what they cost and what healing saved, in the last `seconds`."""
    since = core.now - question.seconds
    own = None if asker.reads_all else {job.job for job in core.state.jobs.values() if asker.owns(job)}
    found = store.since(week.KINDS, since, jobs=own)
    told = week.week(found.events, since, core.now, spared_seconds(core.config))
    if asker.reads_all:
        told = replace(told, observed=observed_lines(core, store))
    else:
        told = replace(told, nodes=[])
    return replace(told, cut_at=found.cut[1] if found.cut else None)


def spared_seconds(config: ControllerConfig) -> float:
    """Return the cost of a failure to a job that is requeued and begins from its last checkpoint: half the time between
    two of them, and the start of the processes."""
    return config.checkpoint_seconds / 2.0 + config.replacement_seconds


def observed_lines(core: Core, store: Store) -> list[str]:
    """The last weekly sum and what has come since, in one line each; no line after a moment in which nothing was
    left undone, such as a short pause."""
    now = observed_since(core, store)
    if now is not None and not now.calls and now.node_hours < 0.05 and core.now - now.since < MOMENT:
        now = None
    return [week.reason for week in (core.state.observed_week, now) if week]


def observed_since(core: Core, store: Store) -> records.ObservedWeek | None:
    """Return the sum of what acting would have saved since the last sum; None when nothing is only observed."""
    state = core.state
    if not state.observed_since:
        return None
    per_node = {name: job.settings.ranks_per_node for name, job in state.jobs.items()}
    events = store.of_kinds(savings.KINDS, state.observed_after)
    return savings.observed_week(events, state.observed_since, core.now, per_node, state.observed_week)


class WeeklySum:
    """Records the sum once a week. A sum that fails is logged and tried again later: nobody depends on it."""

    def __init__(self, core: Core, store: Store) -> None:
        self._core, self._store = core, store
        self._next_try = 0.0

    def is_due(self, now: float) -> bool:
        since = self._core.state.observed_since
        return bool(since) and now - since >= savings.WEEK_SECONDS and now >= self._next_try

    def record_sum(self, now: float) -> None:
        """Sums up; the log must hold all that was decided."""
        self._next_try = now + SUM_AGAIN
        try:
            week = observed_since(self._core, self._store)
        except Exception:
            log.exception("could not sum up what acting would have saved")
            return
        if week is not None:
            self._core.append("", 0, week)


# What is asked -> the type of its arguments, and the function that answers.
QUESTIONS: dict[str, tuple[type[msgspec.Struct], Callable[[Core, Store, Any, Asker], Any]]] = {
    "status": (StatusQuestion, status),
    "jobs": (Filters, jobs),
    "nodes": (Filters, nodes),
    "events": (EventsQuestion, events),
    "explain": (ExplainQuestion, explain),
    "scenario": (NoArguments, scenario),
    "inject": (InjectOrder, inject),
    "health": (readmission.Report, health),
    "report": (ReportQuestion, report),
    "pause": (PauseOrder, pause),
    "resume": (ResumeOrder, resume),
    "ping": (NoArguments, ping),
}
