"""What `unicronctl` is told: views of the state as plain data with stable keys.

status   {"controller", "jobs", "nodes", "failures", "attention", "observed", "waf", "plan"}: the keys of the single
         items are those of `job`, `node` and `FAILURE_KEYS`; attention lists nodes that need an admin (node, since,
         job, reason), observed what acting would have saved, in lines; times are seconds since the epoch, durations
         seconds, rates FLOP/s.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

from unicron.ctl.controller.api import privacy
from unicron.ctl.controller.api.live_scenario import scenario
from unicron.ctl.controller.core.core import Core
from unicron.ctl.controller.job import injection, spares
from unicron.ctl.controller.log import savings
from unicron.ctl.controller.log.records import ObservedWeek
from unicron.ctl.controller.log.store import Store
from unicron.ctl.controller.model import permission
from unicron.ctl.controller.model.asker import Asker
from unicron.ctl.controller.model.job_state import Failure, JobState, Phase
from unicron.ctl.controller.model.node_state import NodeState
from unicron.ctl.controller.nodes import isolation, readmission
from unicron.ctl.controller.plan.inputs import bounds, waiting, weight
from unicron.ctl.controller.sense.timing import Slow
from unicron.ctl.settings.partitions import DEFAULT
from unicron.ctl.slurm.slurm_client import OCCUPIES

log = logging.getLogger("unicron.controller")
CUT = "cut"
SUM_AGAIN = 3600.0  # seconds after a weekly sum that failed
FAILURE_KEYS = (
    "id",
    "kind",
    "job",
    "slot",
    "slots",
    "element",
    "node",
    "severity",
    "cause",
    "action",
    "reason",
    "detected_at",
    "detected_by",
    "broken_at",
    "planned_at",
    "resumed_at",
    "stepped_at",
    "restored_at",
    "whole_at",
    "iteration",
    "reused_micro_batches",
    "recomputed_micro_batches",
    "redistributed_micro_batches",
    "actions",
)


class Unanswerable(Exception):
    """The question makes no sense; the text says what would."""


def answer(core: Core, store: Store, what: str, args: dict[str, Any], asker: Asker) -> Any:
    """The data for a question of `asker`. Raises Unanswerable."""
    ask = QUESTIONS.get(what)
    if ask is None:
        raise Unanswerable(
            f"this controller does not know the question {what!r}: it knows {', '.join(sorted(QUESTIONS))}"
        )
    return ask(core, store, args, asker)


def status(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> dict[str, Any]:
    """Everything at a glance."""
    listed = jobs(core, store, args, asker)
    mine = [job for job in core.state.jobs.values() if asker.may_order(job)]
    failures = sorted((f for job in mine for f in job.failures), key=lambda failure: failure.id)
    return {
        "controller": {
            "pid": os.getpid(),
            "since": core.view.started_at,
            "time": core.now,
            "alone_since": core.view.suspicions.alone_since,
            "most_silent_since": core.view.suspicions.most_since,
            "modes": modes(core),
            "events": core.state.last_event,
            "slurm": {
                "used": core.view.slurm.used,
                "last_answer": core.view.slurm.seen.asked_at if core.view.slurm.seen else None,
                "error": core.view.slurm.error,
            },
        },
        "jobs": listed,
        "nodes": nodes(core, store, args, asker),
        "failures": [failure_record(f) for f in failures[-100:]],
        "attention": [dataclasses.asdict(item) for item in isolation.attention(core.view)] if asker.admin else [],
        "observed": _observed_lines(core, store) if asker.admin else [],
        "waf": sum(item["waf"] for item in listed),
        "plan": dataclasses.asdict(core.state.plan_report) if core.state.plan_report and asker.admin else {},
    }


def _silent(core: Core, state: JobState) -> list[str]:
    """Elements that this controller does not hear and does not take for lost."""
    view, lease = core.view, core.config.lease
    found = [one for (job, _), one in sorted(view.suspicions.open.items()) if job == state.job]
    return [f"{one.element} ({one.node})" for one in found if core.now - one.since > lease]


def _observed_lines(core: Core, store: Store) -> list[str]:
    return [week.reason for week in (core.state.observed_week, observed(core, store)) if week]


def observed(core: Core, store: Store) -> ObservedWeek | None:
    """What acting would have saved since the last sum; None when nothing is only observed."""
    state = core.state
    if not state.observed_since:
        return None
    per_node = {name: job.settings.ranks_per_node for name, job in state.jobs.items()}
    events = store.of_kinds(savings.KINDS, state.observed_after)
    return savings.saved(events, state.observed_since, core.now, per_node, state.observed_week)


class WeeklySum:
    """Once a week: what acting would have saved. A line that is lost costs nobody anything, so whatever goes wrong
    with it is said and tried again later."""

    def __init__(self, core: Core, store: Store) -> None:
        self._core, self._store = core, store
        self._look_at = 0.0

    def due(self, now: float) -> bool:
        since = self._core.state.observed_since
        return bool(since) and now - since >= savings.WEEK_SECONDS and now >= self._look_at

    def record(self, now: float) -> None:
        """When it is due; the log must hold all that was decided."""
        self._look_at = now + SUM_AGAIN
        try:
            week = observed(self._core, self._store)
        except Exception:
            log.exception("couldn't sum up what acting would have saved")
            return
        if week is not None:
            self._core.append("", 0, week)


def modes(core: Core) -> dict[str, str]:
    """The mode of each partition that Slurm shows, of those that the configuration names, and of all others
    ("default")."""
    seen = core.view.slurm.seen
    shown = {name for node in (seen.nodes if seen else ()) for name in node.partitions}
    return {name: core.config.rules(name).mode for name in sorted({DEFAULT, *shown, *core.config.partitions})}


def jobs(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> list[dict[str, Any]]:
    """All jobs of which the asker may know, the ended ones last."""
    found = privacy.visible(core.view, asker)
    return [privacy.of_job(core.view, state, job(core, state, asker), asker) for state in found]


def job(core: Core, state: JobState, asker: Asker) -> dict[str, Any]:
    """One job. What takes long and is not for the asker is not even made."""
    seconds, full = state.seconds, asker.may_order(state)
    nodes_now = len(state.inside) if not state.ended else 0
    flops = state.measured.get(nodes_now, 0.0)
    counts = weight(core.view, state)
    enough = nodes_now >= state.settings.min_nodes
    last = state.failures[-1] if state.failures else None
    return {
        "job": state.job,
        "name": state.settings.name,
        "user": state.settings.user,
        "mode": state.settings.mode,
        "state": state.phase.value,
        "since": state.since,
        "generation": state.generation,
        "nodes": nodes_now,
        "min_nodes": state.settings.min_nodes,
        "max_nodes": state.settings.max_nodes,
        "planned_nodes": core.state.assignment.get(state.job),
        "members": sorted(state.members),
        **_replicas(core, state),
        **_spares(core, state),
        "iteration": state.iteration,
        "train_iterations": state.iterations_wanted,
        "iteration_seconds": seconds,
        "loss": state.loss,
        "nan_since": state.nan_since if state.nan_since >= 0 else None,
        "degraded": _slow(core, state),
        "anomalies": _anomalies(core, state.job) if full else [],
        "weight": counts,
        "flops": flops,
        "waf": counts * flops if enough and not state.ended else 0.0,
        "ledger_violations": state.ledger_violations,
        "ended": dataclasses.asdict(state.ended) if state.ended else None,
        "set_aside": state.set_aside,
        "waits": state.waits,
        "silent": _silent(core, state) if full else [],
        "left_out": [f"{e} ({state.agents[e].node})" for e in sorted(state.parted)] if full else [],
        "failures": len(state.failures),
        "last_failure": failure_record(last) if last else None,
        "reason": state.decisions[-1].reason if state.decisions else "",
        "elements": _elements(core, state) if full else [],
        "barred": [dataclasses.asdict(one) for one in waiting(core.view, state) if not one.starts] if full else [],
    }


def _replicas(core: Core, state: JobState) -> dict[str, Any]:
    """layout: how the ranks of a replica share its model, in words, and `replica`: how many they are. replicas: those
    that train. standbys: slots of living ranks that complete none and have kept their state."""
    view = core.view.job(state)
    size = view.replica
    kept = ("standby", "stopped") if state.phase is Phase.FORMING else ("standby",)
    standbys = [slot for _, slot, status in view.all_ranks() if status.state in kept] if size > 1 else []
    return {
        "layout": view.live.layout if not state.layout else state.layout,
        "layouts": list(state.settings.layouts),
        "planned_layout": core.state.layouts.get(state.job, ""),
        "replica": size,
        "replicas": len(state.members) // size if not state.ended else 0,
        "standbys": standbys if not state.ended else [],
    }


def _spares(core: Core, state: JobState) -> dict[str, Any]:
    """spares: elements that wait to take a lost one's place, each with its node and whether it is ready or starting.
    spares_wanted: how many were asked for. spares_ready: how many of them could come in now."""
    view = core.view.job(state)
    found = spares.standing(view) if not state.over else {}
    return {
        "spares": [{"element": e, "node": view.agents[e].node, "state": how} for e, how in found.items()],
        "spares_wanted": state.settings.spares,
        "spares_ready": sum(how == "ready" for how in found.values()),
    }


def _elements(core: Core, state: JobState) -> list[dict[str, Any]]:
    """Every agent of the job with its ranks."""
    view = core.view.job(state)
    return [
        {
            "element": element,
            "node": record.node,
            "agent": record.agent,
            "gone": record.gone,
            "last_heard": view.agents[element].last_heard if element in view.agents else None,
            "copies_failed": view.agents[element].unmoved if element in view.agents else 0,
            "ranks": [
                {
                    "slot": slot,
                    "state": s.state,
                    "incarnation": s.incarnation,
                    "generation": s.generation,
                    "iteration": s.iteration,
                    "phase": s.phase,
                    "pid": s.pid,
                    "start": view.agents[element].start(slot),
                    "forgets": s.forgets,
                }
                for slot in record.slots
                if element in view.agents and (s := view.status(slot)) is not None
            ],
        }
        for element, record in sorted(state.agents.items())
    ]


def nodes(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> list[dict[str, Any]]:
    """All nodes that Slurm shows, and those on which an agent speaks."""
    if not privacy.sees_nodes(core.view, asker):
        return []
    seen = core.view.slurm.seen
    users: dict[str, list[str]] = {}
    for e in seen.elements if seen else ():
        if e.node and e.state in OCCUPIES:
            users.setdefault(e.node, []).append(e.label)
    agents = {view.node: view for view in core.view.live.agents() if view.alive}
    names = seen.by_name if seen else {}
    odd = _anomalies_of_nodes(core) if asker.admin else {}
    mine = privacy.own_jobs(core.view, asker)
    waiting, asked = _waiting(core), core.view.suspicions.nodes()
    listed = []
    for name in sorted({*names, *agents}):
        info, view, known = names.get(name), agents.get(name), core.state.nodes.get(name)
        listed.append(
            {
                "node": name,
                "states": sorted(info.states) if info else [],
                "healthy": info.healthy if info else view is not None,
                "reason": info.reason if info else "",
                "used_by": users.get(name, [f"{view.job}_{view.element}"] if view else []),
                "downed_by_unicron": bool(known and known.downed),
                "lost_at": known.lost_at if known and known.lost_at else None,
                "last_heard": view.last_heard if view else None,
                "asked_since": asked.get(name),
                "anomalies": odd.get(name, []),
                "spare_of": waiting.get(name, {}),
                "metrics": _metrics(core, view.job, view.element) if view and asker.admin else {},
                "last_event": node_event(known) if asker.admin else None,
                **(readmission.shown(core.view, core.slurm.gate, name) if asker.admin else readmission.NOT_SHOWN),
            }
        )
    return [privacy.of_node(core.view, item, asker, mine) for item in listed]


def _waiting(core: Core) -> dict[str, dict[str, str]]:
    """Node -> JOB_ELEMENT of the hot spares on it -> ready or starting."""
    found: dict[str, dict[str, str]] = {}
    for state in core.state.jobs.values():
        view = core.view.job(state)
        for element, how in (spares.standing(view) if not state.over else {}).items():
            found.setdefault(view.agents[element].node, {})[f"{state.job}_{element}"] = how
    return found


def node_event(known: NodeState | None) -> dict[str, Any] | None:
    """What the node's kernel, memory cgroup or links said last."""
    if known is None or not known.events:
        return None
    seen = known.events[-1]
    keys = ("source", "text", "code", "count", "cause", "severity", "action", "reason")
    return {"time": seen.time} | {key: getattr(seen.said, key) for key in keys}


def events(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> list[dict[str, Any]]:
    """The log after an id: args after, limit, job, without (kinds that do not count, a space between them). Where it
    is too much for one answer an item of the kind CUT stands for the rest, with the id of the event up to which
    the log was read."""
    after, limit, only = args.get("after", 0), args.get("limit", 200), args.get("job")
    without = args.get("without", "")
    if not isinstance(after, int) or not isinstance(limit, int) or not (only is None or isinstance(only, str)):
        raise Unanswerable("events: after and limit must be whole numbers, job a job id")
    if not 0 <= after < 2**63:
        raise Unanswerable("events: after must be the id of an event")
    if not isinstance(without, str) or len(without.split()) > 20:
        raise Unanswerable("events: without must be up to 20 kinds with a space between them")
    unwanted = without.split()
    limit, name = max(1, min(limit, 5000)), _job_id(core, only, asker) if only else None
    of_jobs = [name] if name is not None else None
    if not asker.admin:  # Events of a job are its owner's; those of nodes and of the controller the admins'.
        of_jobs = [job.job for job in core.state.jobs.values() if asker.owns(job) and name in (None, job.job)]
    found = store.tail(after, limit, of_jobs, unwanted)
    told = [event.as_dict() for event in found.events]
    if found.cut:
        reason = f"{'later' if after else 'earlier'} events are left out: they are too much for one answer"
        number, time = found.cut
        cut = {"id": number, "time": time, "job": "", "generation": 0, "kind": CUT, "reason": reason}
        told.insert(len(told) if after else 0, cut)
    return told


def explain(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> dict[str, Any]:
    """Why a job is treated as it is: the plan's reason, its failures, its last decisions."""
    state = core.state.jobs[_job_id(core, str(args.get("job", "")), asker)]
    if not asker.may_order(state):
        raise Unanswerable(f"{asker} may not read this: only the job's owner and admins")
    report = core.state.plan_report
    return {
        "job": state.job,
        "name": state.settings.name,
        "mode": state.settings.mode,
        "mode_reason": state.settings.mode_reason,
        "state": state.phase.value,
        "generation": state.generation,
        **_replicas(core, state),
        **_spares(core, state),
        "ended": dataclasses.asdict(state.ended) if state.ended else None,
        "set_aside": state.set_aside,
        "waits": state.waits,
        "nan_since": state.nan_since if state.nan_since >= 0 else None,
        "cold": core.view.job(state).cold() if not state.ended else {},
        "forgets": core.view.job(state).forgets() if not state.ended else {},
        "planned_nodes": core.state.assignment.get(state.job),
        "plan_reason": report.reasons.get(state.job, "") if report else "",
        "plan_trigger": report.trigger if report else "",
        "bounds": bounds(core.view, state, _planned_with(core, state)) if not state.over else "",
        "waiting": [dataclasses.asdict(one) for one in waiting(core.view, state)],
        "decisions": [dataclasses.asdict(decided) for decided in state.decisions],
        "failures": [failure_record(failure) for failure in state.failures],
    }


def _planned_with(core: Core, state: JobState) -> list[JobState]:
    """The jobs that are planned for together with this one."""
    acts = permission.acts(core.view, state)
    return [job for job in core.state.jobs.values() if not job.over and permission.acts(core.view, job) is acts]


def failure_record(failure: Failure) -> dict[str, Any]:
    return {key: getattr(failure, key) for key in FAILURE_KEYS}


def _slow(core: Core, state: JobState) -> dict[str, Any] | None:
    """What makes the job slow at present."""
    desk = core.desks.get(state.job)
    slow: Slow | None = desk.times.slow if desk else None
    return dataclasses.asdict(slow) if slow else None


def _anomalies(core: Core, job: str) -> list[dict[str, Any]]:
    """The job's present anomalies."""
    desk = core.desks.get(job)
    return [item.told() for item in desk.peers.standing] if desk else []


def _anomalies_of_nodes(core: Core) -> dict[str, list[dict[str, Any]]]:
    """The present anomalies of all jobs, by node."""
    found: dict[str, list[dict[str, Any]]] = {}
    for job in core.desks:
        for item in _anomalies(core, job):
            for name in item["nodes"]:
                found.setdefault(name, []).append(item)
    return found


def _metrics(core: Core, job: str, element: int) -> dict[str, float]:
    """What the element's agent measured last on its node."""
    desk = core.desks.get(job)
    sample = desk.peers.samples.get(element) if desk else None
    return sample.values if sample else {}


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


def inject(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> dict[str, Any]:
    """Breaks a rank on purpose: args fault, job, slot, node, seconds, dry_run."""
    slot, node, seconds = args.get("slot"), args.get("node"), args.get("seconds", 0.0)
    if not (slot is None or isinstance(slot, int)) or not (node is None or isinstance(node, str)):
        raise Unanswerable("inject: slot must be a whole number, node a name")
    if not isinstance(seconds, int | float) or not 0 <= seconds <= 86400:
        raise Unanswerable("inject: seconds must be 0 to 86400")
    state = core.state.jobs[_job_id(core, str(args.get("job", "")), asker)]
    if not asker.may_order(state):
        raise Unanswerable(f"{asker} may not inject here: only the job's owner and admins")
    fault, dry_run = str(args.get("fault", "")), bool(args.get("dry_run"))
    try:
        done, outcome = injection.perform(core.view, core.view.job(state), fault, slot, node, float(seconds), dry_run)
    except injection.NotInjected as error:
        raise Unanswerable(str(error)) from None
    core.take(outcome)
    if not dry_run:
        core.desk(state).injected.add(done["slot"])
        done["event"] = core.state.last_event
    return done


def health(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> dict[str, Any]:
    """Takes a node's health report: args node, source, verdict, reason, at."""
    if not asker.admin:
        raise Unanswerable(f"{asker} may not report health here: only root and admins")
    report = readmission.checked(args)
    if isinstance(report, str):
        raise Unanswerable(report)
    seen = core.view.slurm.seen
    if seen is not None and report.node not in seen.by_name:
        raise Unanswerable(f"health: Slurm shows no node {report.node!r}")
    core.take(readmission.take(core.view, core.slurm.gate, report))
    return {"taken": True}


def ping(core: Core, store: Store, args: dict[str, Any], asker: Asker) -> dict[str, Any]:
    """Whether the controller answers, and how soon: through the same queue and loop as every message."""
    return {"pong": True}


QUESTIONS: dict[str, Callable[[Core, Store, dict[str, Any], Asker], Any]] = {
    "status": status,
    "jobs": jobs,
    "nodes": nodes,
    "events": events,
    "explain": explain,
    "scenario": scenario,
    "inject": inject,
    "health": health,
    "ping": ping,
}
