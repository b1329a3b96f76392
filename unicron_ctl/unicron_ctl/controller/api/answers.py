"""Answers the questions of `unicronctl` with the structs of `protocol.answer_schema`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from unicron_ctl.controller.api import filters, privacy
from unicron_ctl.controller.api.filters import Unanswerable as Unanswerable
from unicron_ctl.controller.api.job_answers import explanation, failure_answer, partitions, plain, visible_jobs
from unicron_ctl.controller.api.node_answers import visible_nodes
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.job import injection
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import Failure
from unicron_ctl.controller.nodes import isolation, readmission
from unicron_ctl.controller.plan import planning
from unicron_ctl.controller.plan.inputs import inputs, usable_nodes, why_fixed
from unicron_ctl.shared.log import lemons, records, savings, week
from unicron_ctl.shared.log.naming import KINDS_WITH_NODES
from unicron_ctl.shared.log.store import EventFilter, Store
from unicron_ctl.shared.protocol import answer_schema as schema
from unicron_ctl.shared.protocol.audience import LAST_FAILURES
from unicron_ctl.shared.protocol.questions import (
    EventsQuestion,
    ExplainQuestion,
    Filters,
    HistoryQuestion,
    InjectOrder,
    NoArguments,
    PauseOrder,
    ReportQuestion,
    ResumeOrder,
    StatusQuestion,
)
from unicron_ctl.shared.settings.partitions import DEFAULT
from unicron_ctl.shared.system.release import release

log = logging.getLogger("unicron.controller")
MOMENT = 3600.0  # seconds: "in 0.0 days" says nothing
RETRY_SUM_SECONDS = 3600.0  # after a weekly sum that failed
RELEASE = release()  # read at the start: an upgrade may replace the installed files while this runs


def answer(core: Core, store: Store, what: str, args: Mapping[str, Any], asker: Asker) -> Any:
    """Return the answer to a question. Raises Unanswerable."""
    if what not in QUESTIONS:
        names = ", ".join(sorted(QUESTIONS))
        raise Unanswerable(f"this controller does not know the question {what!r}: it knows {names}")
    kind, function = QUESTIONS[what]
    try:
        question = msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        raise Unanswerable(f"{what}: {error}") from None
    return function(core, store, question, asker)


def status(core: Core, store: Store, wanted: StatusQuestion, asker: Asker) -> schema.Status:
    """Return everything at a glance, or the wanted part. Whatever needs an admin is always in it."""
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
    """Return the last failures of all users together, or of each user."""
    last, counts = list[Failure](), Counter[object]()
    for failure in newest_first:
        job = core.state.jobs[failure.job]
        owner = (job.uid, job.settings.user) if each else None
        if counts[owner] < LAST_FAILURES:
            counts[owner] += 1
            last.append(failure)
    return last


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
    """Return the mode of each partition that Slurm or the configuration names, and of all others ("default")."""
    seen = core.view.slurm.seen
    shown = {name for node in (seen.nodes if seen else ()) for name in node.partitions}
    return {name: core.view.rules(name).mode for name in sorted({DEFAULT, *shown, *core.config.partitions})}


def _partitions(core: Core) -> set[str]:
    return {*modes(core)} - {DEFAULT}


def jobs(core: Core, store: Store, wanted: Filters, asker: Asker) -> list[schema.Job]:
    """Return the wanted jobs, the ended ones last."""
    names = filters.checked_nodes(core, wanted, asker, _partitions(core))
    return filters.jobs(visible_jobs(core, asker), wanted, names, visible_nodes(core, asker) if names else ())


def nodes(core: Core, store: Store, wanted: Filters, asker: Asker) -> list[schema.Node]:
    """Return the wanted nodes, of those that Slurm shows or that have a living agent."""
    names = filters.checked_nodes(core, wanted, asker, _partitions(core))
    return filters.nodes(visible_nodes(core, asker), wanted, names, visible_jobs(core, asker) if wanted.user else ())


def events(core: Core, store: Store, question: EventsQuestion, asker: Asker) -> list[dict[str, object]]:
    """Return the log after an id, or its end. If it does not fit into one answer, an item of the kind CUT stands for
    the rest, with the id of the event up to which the log was read."""
    after = question.after
    tail = store.tail(after, question.limit, _event_filter(core, question, asker))
    items = [event.as_dict() for event in tail.events]
    if tail.cut:
        reason = f"{'later' if after else 'earlier'} events are left out: they are too much for one answer"
        items.insert(len(items) if after else 0, _item(*tail.cut, schema.CUT, reason))
    if question.mark and not (after and (tail.cut or len(items) >= question.limit)):
        items.append(_item(core.state.last_event, core.now, schema.READ, ""))
    return items


def _item(number: int, time: float, kind: str, reason: str) -> dict[str, object]:
    return {"id": number, "time": time, "job": "", "generation": 0, "kind": kind, "reason": reason}


def _event_filter(core: Core, question: EventsQuestion, asker: Asker) -> EventFilter:
    """Return the wanted part of the log. Raises Unanswerable."""
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
    """Return the jobs whose events are wanted ("" for events of no job), or None for all.

    A job's events are for its owner, those of nodes and of the controller for admins. Raises Unanswerable.
    """
    name = _job_id(core, question.job, asker) if question.job else None
    visible = privacy.visible(core.view, asker)
    readable = [job for job in visible if asker.may_read(job) and question.user in ("", job.settings.user)]
    if question.user and not readable:
        raise Unanswerable(f"{asker} may not read events of {question.user}'s jobs: only they, readers and admins")
    every = asker.reads_all and not (name or question.user)
    if every and not question.partition:
        return None
    wanted = {
        job.job
        for job in readable
        if name in (None, job.job) and (not question.partition or question.partition in partitions(core, job, asker))
    }
    return wanted | {""} if every else wanted


def _nodes_of_no_job(core: Core, partition: str, names: frozenset[str] | None) -> frozenset[str] | None:
    """Return the partition's nodes: an event of no job has to name one of them."""
    if not partition:
        return None
    seen = core.view.slurm.seen
    inside = frozenset(node.name for node in (seen.nodes if seen else ()) if partition in node.partitions)
    return inside if names is None else inside & names


def explain(core: Core, store: Store, question: ExplainQuestion, asker: Asker) -> schema.Explanation:
    """Explain how a job is treated, to its owner, readers and admins."""
    state = core.state.jobs[_job_id(core, question.job, asker)]
    if not asker.may_read(state):
        raise Unanswerable(f"{asker} may not read this: only the job's owner, readers and admins")
    return explanation(core, state)


def _job_id(core: Core, text: str, asker: Asker) -> str:
    """Find a job by its id, or by a name that is unique among the living jobs that the asker may see. Raises
    Unanswerable."""
    visible = {state.job: state for state in privacy.visible(core.view, asker)}
    if text in visible:
        return text
    named = [state for state in visible.values() if state.settings.name == text]
    living = [state for state in named if not state.ended] or named[-1:]
    if len(living) == 1:
        return living[0].job
    ids = ", ".join(sorted(visible)) or "none yet"
    raise Unanswerable(f"{'several jobs are' if living else 'no job is'} called {text[:100]!r}: jobs are {ids}")


def inject(core: Core, store: Store, order: InjectOrder, asker: Asker) -> schema.Injection:
    """Break a rank on purpose."""
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
    """Take in a node's health report."""
    if not asker.admin:
        raise Unanswerable(f"{asker} may not report health here: only root and admins")
    seen = core.view.slurm.seen
    if seen is not None and report.node not in seen.by_name:
        raise Unanswerable(f"health: Slurm shows no node {report.node!r}")
    core.carry_out(readmission.on_health_report(core.view, core.slurm.gate, report))
    return {"taken": True}


def pause(core: Core, store: Store, order: PauseOrder, asker: Asker) -> schema.PauseState:
    """Stop all changes in Slurm for a while."""
    _check_partition(core, order.partition, asker)
    until = core.now + order.seconds if order.seconds else 0.0
    # A duration, not a time of day, which would be in the controller's time zone.
    how_long = f"for {timedelta(seconds=round(order.seconds))}" if order.seconds else "until it is resumed"
    reason = f"{_whole(order.partition)} {how_long}: {asker} has asked for it"
    core.append("", 0, records.ActionsPaused(partition=order.partition, until=until, reason=reason))
    return _pause_state(core)


def resume(core: Core, store: Store, order: ResumeOrder, asker: Asker) -> schema.PauseState:
    """End a pause."""
    _check_partition(core, order.partition, asker)
    if core.state.is_paused("", core.now) and order.partition:
        raise Unanswerable(f"all partitions are paused, not {order.partition} alone: `unicronctl resume` ends it")
    reason = f"{_whole(order.partition)}: {asker} has asked for it"
    core.append("", 0, records.ActionsResumed(partition=order.partition, reason=reason))
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
    """Answer a sign of life, which takes the same way as every message."""
    return schema.Pong(release=RELEASE, time=core.now, uid=os.geteuid())


def scenario(core: Core, store: Store, question: NoArguments, asker: Asker) -> schema.Scenario:
    """Return the planner's present input as a scenario (unicron_planner/problem/scenario.py)."""
    config, seen = core.config, core.view.slurm.seen
    running = [state for state in core.state.jobs.values() if not state.over and not why_fixed(core.view, state)]
    planned = inputs(core.view, running)
    rates = [i.rate / i.measured_nodes for i in planned if i.rate and i.measured_nodes]
    usual = sum(rates) / len(rates) if rates else planning.NOMINAL_RATE
    cluster = schema.ScenarioCluster(
        nodes=len(usable_nodes(core.view, seen, running)) if seen else sum(i.nodes for i in planned),
        mtbf_node_hours=config.mtbf_node_hours,
        transition_seconds=config.transition_seconds,
    )
    shown = [i for i in planned if not privacy.hidden(core.view, core.state.jobs[i.job], asker)]
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
    if spares := planning.spares(i, usual, core.config.mtbf_node_hours):
        job.spares = _sizes(i, spares)
    return job


def _sizes(i: planning.JobInput, table: Mapping[int, float]) -> dict[str, float]:
    return {str(nodes): rate for nodes, rate in planning.in_blocks(i, table).items()}


def report(core: Core, store: Store, question: ReportQuestion, asker: Asker) -> schema.Report:
    """Report on the last `seconds`: failures by cause, their cost, and what healing saved."""
    since = core.now - question.seconds
    own = None if asker.reads_all else {job.job for job in core.state.jobs.values() if asker.owns(job)}
    part = store.since(week.KINDS, since, jobs=own)
    # Without healing a failure costs half the time between two checkpoints, and a start of the processes.
    spared_seconds = core.config.checkpoint_seconds / 2.0 + core.config.replacement_seconds
    answer = week.week(part.events, since, core.now, spared_seconds)
    answer.cut_at = part.cut[1] if part.cut else None
    if asker.reads_all:
        answer.observed = observed_lines(core, store)
    else:
        answer.nodes = []
    return answer


def history(core: Core, store: Store, question: HistoryQuestion, asker: Asker) -> schema.NodeHistory:
    """Return a node's incidents, and how they add up."""
    if not asker.reads_all:
        raise Unanswerable(f"{asker} may not read this: only readers and admins")
    seen = core.view.slurm.seen
    if question.node not in core.state.nodes and (seen is None or question.node not in seen.by_name):
        raise Unanswerable(f"neither Slurm nor the log knows a node {question.node[:100]!r}")
    part = store.since(lemons.WEIGHTS, core.now - lemons.SECONDS)
    return lemons.history(part.events, question.node, core.now)


def observed_lines(core: Core, store: Store) -> list[str]:
    """Return the last weekly sum and the sum since then, in one line each. After a short pause in which nothing was
    left undone there is no second line."""
    now = observed_since(core, store)
    if now is not None and not now.calls and now.node_hours < 0.05 and core.now - now.since < MOMENT:
        now = None
    return [week.reason for week in (core.state.observed_week, now) if week]


def observed_since(core: Core, store: Store) -> records.ObservedWeek | None:
    """Return what acting would have saved since the last sum; None if no partition is only observed."""
    state = core.state
    if not state.observed_since:
        return None
    per_node = {name: job.settings.ranks_per_node for name, job in state.jobs.items()}
    events = store.of_kinds(savings.KINDS, state.observed_after)
    return savings.observed_week(events, state.observed_since, core.now, per_node, state.observed_week)


class WeeklySum:
    """Records the sum once a week. A sum that fails is logged and tried again later: nothing depends on it."""

    def __init__(self, core: Core, store: Store) -> None:
        self._core, self._store = core, store
        self._next_try = 0.0

    def is_due(self, now: float) -> bool:
        since = self._core.state.observed_since
        return bool(since) and now - since >= savings.WEEK_SECONDS and now >= self._next_try

    def record_sum(self, now: float) -> None:
        """Records the sum. The log must already hold all decisions."""
        self._next_try = now + RETRY_SUM_SECONDS
        try:
            week = observed_since(self._core, self._store)
        except Exception:
            log.exception("could not sum up what acting would have saved")
            return
        if week is not None:
            self._core.append("", 0, week)


# Name of a question -> the type of its arguments, and the function that answers.
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
    "history": (HistoryQuestion, history),
    "pause": (PauseOrder, pause),
    "resume": (ResumeOrder, resume),
    "ping": (NoArguments, ping),
}
