"""What `unicronctl` is told: views of the state as plain data with stable keys.

status   {"controller", "jobs", "nodes", "failures", "attention", "waf"}: the keys of the single items are those of
         `job`, `node` and `FAILURE_KEYS`; attention lists nodes that need an admin (node, since, job, reason); times
         are seconds since the epoch, durations seconds, rates FLOP/s.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unicron_ctl.controller import injection, monitoring, peers, planning
from unicron_ctl.controller.admission import checked
from unicron_ctl.controller.placement import OCCUPIES
from unicron_ctl.controller.state import JobState, NodeState
from unicron_ctl.controller.store import Store

if TYPE_CHECKING:
    from unicron_ctl.controller.engine import Engine

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
    "iteration",
    "reused_micro_batches",
    "recomputed_micro_batches",
    "redistributed_micro_batches",
    "actions",
)


class Unanswerable(Exception):
    """The question makes no sense; the text says what would."""


def answer(engine: Engine, store: Store, what: str, args: dict[str, Any]) -> Any:
    """The data for a question. Raises Unanswerable."""
    ask = QUESTIONS.get(what)
    if ask is None:
        raise Unanswerable(
            f"this controller does not know the question {what!r}: it knows {', '.join(sorted(QUESTIONS))}"
        )
    return ask(engine, store, args)


def status(engine: Engine, store: Store, args: dict[str, Any]) -> dict[str, Any]:
    """Everything at a glance."""
    listed = jobs(engine, store, args)
    failures = sorted(
        (f for job in engine.state.jobs.values() for f in job.failures), key=lambda failure: failure["id"]
    )
    return {
        "controller": {
            "pid": os.getpid(),
            "since": engine.started_at,
            "time": engine.now,
            "observe": engine.config.observe,
            "events": engine.state.last_event,
            "slurm": {
                "used": engine.has_slurm,
                "last_answer": engine.cluster.seen.asked_at if engine.cluster.seen else None,
                "error": engine.cluster.error,
            },
        },
        "jobs": listed,
        "nodes": nodes(engine, store, args),
        "failures": [failure_record(f) for f in failures[-100:]],
        "attention": engine.cluster.isolation.attention(),
        "waf": sum(item["waf"] for item in listed),
        "plan": engine.state.plan_report,
    }


def jobs(engine: Engine, store: Store, args: dict[str, Any]) -> list[dict[str, Any]]:
    """All jobs, the ended ones last."""
    return [
        job(engine, state)
        for _, state in sorted(engine.state.jobs.items(), key=lambda item: (bool(item[1].ended), item[0]))
    ]


def job(engine: Engine, state: JobState) -> dict[str, Any]:
    """One job."""
    seconds, view = state.seconds, engine.view(state)
    nodes_now = len(state.elements(state.members)) if not state.ended else 0
    flops = state.measured.get(nodes_now, 0.0)
    weight = state.settings.weight
    enough = nodes_now >= state.settings.min_nodes
    last = state.failures[-1] if state.failures else None
    return {
        "job": state.job,
        "name": state.settings.name,
        "user": state.settings.user,
        "mode": state.settings.mode,
        "state": state.phase,
        "since": state.since,
        "generation": state.generation,
        "nodes": nodes_now,
        "min_nodes": state.settings.min_nodes,
        "max_nodes": state.settings.max_nodes,
        "planned_nodes": engine.state.assignment.get(state.job),
        "members": sorted(state.members),
        "iteration": state.iteration,
        "train_iterations": state.iterations_wanted,
        "iteration_seconds": seconds,
        "loss": state.loss,
        "degraded": monitoring.slow(engine, state),
        "anomalies": peers.standing(engine, state.job),
        "weight": weight,
        "flops": flops,
        "waf": weight * flops if enough and not state.ended else 0.0,
        "ledger_violations": state.ledger_violations,
        "ended": state.ended,
        "failures": len(state.failures),
        "last_failure": failure_record(last) if last else None,
        "reason": state.decisions[-1]["reason"] if state.decisions else "",
        "elements": [
            {
                "element": element,
                "node": record.node,
                "agent": record.agent,
                "gone": record.gone,
                "last_heard": view.agents[element].last_heard if element in view.agents else None,
                "ranks": [
                    {
                        "slot": slot,
                        "state": s.state,
                        "incarnation": s.incarnation,
                        "generation": s.generation,
                        "iteration": s.iteration,
                        "phase": s.phase,
                        "pid": s.pid,
                    }
                    for slot in record.slots
                    if (s := view.status(slot)) is not None
                ],
            }
            for element, record in sorted(state.agents.items())
        ],
    }


def nodes(engine: Engine, store: Store, args: dict[str, Any]) -> list[dict[str, Any]]:
    """All nodes that Slurm shows, and those on which an agent speaks."""
    seen = engine.cluster.seen
    users: dict[str, list[str]] = {}
    for e in seen.elements if seen else ():
        if e.node and e.state in OCCUPIES:
            users.setdefault(e.node, []).append(f"{e.job}_{e.element}")
    agents = {view.node: view for view in engine.agents.values() if view.alive}
    names = {n.name: n for n in seen.nodes} if seen else {}
    listed = []
    for name in sorted({*names, *agents}):
        info, view, known = names.get(name), agents.get(name), engine.state.nodes.get(name)
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
                "anomalies": peers.of_node(engine, name),
                "metrics": peers.of_machine(engine, view.job, view.element) if view else {},
                "last_event": node_event(known),
                **engine.cluster.gate.view(name),
            }
        )
    return listed


def node_event(known: NodeState | None) -> dict[str, Any] | None:
    """What the node's kernel, memory cgroup or links said last."""
    if known is None or not known.events:
        return None
    keys = ("time", "source", "text", "code", "count", "cause", "severity", "action", "reason")
    return {key: known.events[-1][key] for key in keys}


def events(engine: Engine, store: Store, args: dict[str, Any]) -> list[dict[str, Any]]:
    """The log after an id: args after, limit, job, kinds."""
    after, limit, only = args.get("after", 0), args.get("limit", 200), args.get("job")
    if not isinstance(after, int) or not isinstance(limit, int) or not (only is None or isinstance(only, str)):
        raise Unanswerable("events: after and limit must be whole numbers, job a job id")
    return [
        event.as_dict()
        for event in store.tail(after, max(1, min(limit, 5000)), _job_id(engine, only) if only else None)
    ]


def explain(engine: Engine, store: Store, args: dict[str, Any]) -> dict[str, Any]:
    """Why a job is treated as it is: the plan's reason, its failures, its last decisions."""
    state = engine.state.jobs[_job_id(engine, str(args.get("job", "")))]
    return {
        "job": state.job,
        "name": state.settings.name,
        "mode": state.settings.mode,
        "mode_reason": state.settings.mode_reason,
        "state": state.phase,
        "generation": state.generation,
        "ended": state.ended,
        "planned_nodes": engine.state.assignment.get(state.job),
        "plan_reason": engine.state.plan_report.get("reasons", {}).get(state.job, ""),
        "plan_trigger": engine.state.plan_report.get("trigger", ""),
        "decisions": list(state.decisions),
        "failures": [failure_record(failure) for failure in state.failures],
    }


def scenario(engine: Engine, store: Store, args: dict[str, Any]) -> dict[str, Any]:
    """The planner's input of this moment, in the structure of a scenario file (DESIGN section 7)."""
    cluster, config = engine.cluster, engine.config
    running = [state for state in engine.state.jobs.values() if not state.ended]
    inputs = cluster.replanning.inputs(running)
    count = len(cluster.replanning.usable_nodes(running)) if cluster.seen else sum(i.nodes for i in inputs)
    rates = [i.rate / i.measured_nodes for i in inputs if i.rate and i.measured_nodes]
    usual = sum(rates) / len(rates) if rates else planning.UNMEASURED
    return {
        "cluster": {
            "nodes": count,
            "mtbf_node_hours": config.mtbf_node_hours,
            "transition_seconds": config.transition_seconds,
        },
        "job": [
            {
                "name": i.job,
                "weight": i.weight,
                "min_nodes": i.min_nodes,
                "max_nodes": i.max_nodes,
                "nodes": i.nodes,
                "lost_worker": i.alive < i.nodes,
                "node_names": sorted(view.node for view in engine.agents.values() if view.job == i.job and view.alive),
                "flops": {str(n): rate for n, rate in planning.throughput(i, usual).items()},
            }
            for i in inputs
        ],
    }


def failure_record(failure: dict[str, Any]) -> dict[str, Any]:
    return {key: failure[key] for key in FAILURE_KEYS}


def owner_of(engine: Engine, args: dict[str, Any], what: str = "") -> str:
    """Whose word counts beside root's and the admins': the owner of the job that an order is about; of nodes, the user
    of this controller, who is a Slurm operator. Raises Unanswerable.
    """
    if what == "health":
        return getpass.getuser()
    return engine.state.jobs[_job_id(engine, str(args.get("job", "")))].settings.user


def _job_id(engine: Engine, text: str) -> str:
    """A job by its id, or by its name where that is unique among living jobs. Raises Unanswerable."""
    if text in engine.state.jobs:
        return text
    named = [state for state in engine.state.jobs.values() if state.settings.name == text]
    living = [state for state in named if not state.ended] or named[-1:]
    if len(living) == 1:
        return living[0].job
    known = ", ".join(sorted(engine.state.jobs)) or "none yet"
    raise Unanswerable(f"{'several jobs are' if living else 'no job is'} called {text!r}: jobs are {known}")


def inject(engine: Engine, store: Store, args: dict[str, Any]) -> dict[str, Any]:
    """Breaks a rank on purpose: args fault, job, slot, node, seconds, dry_run."""
    slot, node, seconds = args.get("slot"), args.get("node"), args.get("seconds", 0.0)
    if not (slot is None or isinstance(slot, int)) or not (node is None or isinstance(node, str)):
        raise Unanswerable("inject: slot must be a whole number, node a name")
    if not isinstance(seconds, int | float) or not 0 <= seconds <= 86400:
        raise Unanswerable("inject: seconds must be 0 to 86400")
    state = engine.state.jobs[_job_id(engine, str(args.get("job", "")))]
    fault, dry_run = str(args.get("fault", "")), bool(args.get("dry_run"))
    try:
        return injection.perform(engine, state, fault, slot, node, float(seconds), dry_run)
    except injection.NotInjected as error:
        raise Unanswerable(str(error)) from None


def health(engine: Engine, store: Store, args: dict[str, Any]) -> dict[str, Any]:
    """Takes a node's health report: args node, source, verdict, reason, at."""
    report = checked(args)
    if isinstance(report, str):
        raise Unanswerable(report)
    seen = engine.cluster.seen
    if seen is not None and all(info.name != report[0] for info in seen.nodes):
        raise Unanswerable(f"health: Slurm shows no node {report[0]!r}")
    engine.cluster.gate.take(*report)
    return {"taken": True}


QUESTIONS: dict[str, Callable[[Engine, Store, dict[str, Any]], Any]] = {
    "status": status,
    "jobs": jobs,
    "nodes": nodes,
    "events": events,
    "explain": explain,
    "scenario": scenario,
    "inject": inject,
    "health": health,
}
