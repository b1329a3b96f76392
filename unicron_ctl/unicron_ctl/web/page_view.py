"""Makes the page's JSON from the controller's answers to one viewer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.commands.status_tables import paused_lines
from unicron_ctl.shared.protocol.answer_schema import Explanation, Failure, Job, Node, Scenario, Status
from unicron_ctl.shared.slurm.host_lists import natural
from unicron_ctl.shared.slurm.states import DRAINED
from unicron_planner.solver.plan import Plan

View = dict[str, object]


def overview(status: Status, admin: bool) -> View:
    """Show the whole cluster. A node is [name, look, Slurm's states, jobs, whether it is suspect, remark]; times are
    seconds since the epoch."""
    controller = status.controller
    living = {job.job for job in status.jobs if not job.ended}
    trained, lost = sum(job.trained_seconds for job in status.jobs), sum(job.lost_seconds for job in status.jobs)
    return {
        "admin": admin,
        "since": controller.since,
        "modes": controller.modes,
        "alarms": _alarms(status),
        "notes": [*paused_lines(controller.paused), *status.observed],
        "waf": status_tables.rate(status.waf),
        "goodput": {"share": trained / (trained + lost) if trained + lost else None, "lost": lost},
        "jobs": [_job(job, status) for job in status.jobs],
        "failures": [_failure(failure) for failure in reversed(status.failures)],
        "nodes": [_node(node, living) for node in sorted(status.nodes, key=lambda node: natural(node.node))],
    }


def _alarms(status: Status) -> list[str]:
    """Return the lines that come first on the page."""
    lines = [f"needs an admin: {item.reason}" for item in status.attention]
    if status.controller.alone_since is not None:
        lines.append("unicrond hears no agent at all, and does nothing")
    if status.controller.most_silent_since is not None:
        lines.append("most agents fell silent together: unicrond takes no node and requeues nothing")
    if status.controller.slurm.error:
        lines.append(f"Slurm does not answer: {status.controller.slurm.error}")
    return lines


def _job(job: Job, status: Status) -> View:
    reasons = status.plan.reasons
    elsewhere = ("last failure", "goodput")  # on the page
    return {
        "job": job.job,
        "name": job.name,
        "user": job.user,
        "state": status_tables.job_state(job),
        "ended": job.ended is not None,
        "since": job.since,
        "nodes": job.nodes,
        "most": job.max_nodes,
        "planned": None if job.ended else job.planned_nodes,
        "iteration": job.iteration,
        "iterations": job.train_iterations,
        "seconds": job.iteration_seconds,
        "loss": job.loss,
        "rate": status_tables.rate(job.waf),
        "goodput": job.goodput,
        "lost": job.lost_seconds,
        "failures": job.failures,
        "notes": [note for note in status_tables.job_notes(job) if not note.startswith(elsewhere)],
        "plan": reasons.get(job.job, "") if isinstance(reasons, dict) else "",
    }


def _where(failure: Failure) -> str:
    slots = status_tables.slots_of(failure)
    return f"{slots} on {failure.node}" if slots and failure.kind != "node" else failure.node


def _failure(failure: Failure) -> View:
    return {
        "id": failure.id,
        "job": failure.job,
        "where": _where(failure),
        "severity": failure.severity,
        "cause": failure.cause,
        "by": failure.detected_by,
        "reason": failure.reason,
        "at": failure.detected_at,
        "again": status_tables.again_after(failure),
        "kept": failure.reused_micro_batches,
        "twice": failure.recomputed_micro_batches,
        "done": "; ".join(failure.actions) or failure.action,
    }


def _node(node: Node, living: set[str]) -> list[Any]:
    jobs = sorted({user.partition("_")[0] for user in node.used_by})
    suspect = bool(node.suspect or node.anomalies or (node.health and node.health.verdict == "bad"))
    states = "+".join(node.states).lower()
    return [node.node, _look_of(node, jobs, living), states, jobs, int(suspect), _remark(node)]


def _look_of(node: Node, jobs: list[str], living: set[str]) -> str:
    """Return the look of the node on the map."""
    if not node.healthy:
        return "drained" if DRAINED.intersection(node.states) else "down"
    if node.asked_since is not None:
        return "silent"
    if any(job in living for job in jobs):
        return "protected"
    return "used" if jobs else "idle"


def _remark(node: Node) -> str:
    words = [node.reason, node.admission]
    for name, report in (("health", node.health), ("pair test", node.pair_test)):
        if report is not None and report.verdict != "good":
            words.append(f"{name} {report.verdict}: {report.reason}")
    words += ["unverified"] if node.unverified else []
    words += [f"suspect: {node.suspect}"] if node.suspect else []
    words += ["its agent is silent or gone; others are asked whether they reach it"] if node.asked_since else []
    words += [anomaly.reason for anomaly in node.anomalies]
    words += [f"{element}: spare, {how}" for element, how in node.spare_of.items()]
    words += [status_tables.node_event(node.last_event)] if node.last_event else []
    return "; ".join(word for word in words if word)


def job_view(data: Explanation, alternative: Mapping[str, Any] | None) -> View:
    """Show one job: its state, its failures and the decisions about it, newest first, and its second-best plan."""
    second = (alternative or {}).get("second")
    return {
        "job": data.job,
        "name": data.name,
        "lines": [*status_tables.standing(data), *status_tables.obstacles(data)],
        "failures": [_failure(failure) for failure in reversed(data.failures)],
        "decisions": [
            {"at": one.time, "kind": one.kind, "generation": one.generation, "reason": one.reason}
            for one in reversed(data.decisions)
        ],
        "plan": (alternative or {}).get("text", ""),
        "second": [[name, nodes] for name, nodes in second["assignment"].items()] if second else [],
    }


def plan_view(scenario: Scenario, plan: Plan, names: Mapping[str, str]) -> View:
    """Show the best plan for the present cluster. names: of the jobs, by id."""
    jobs = [
        {
            "job": job.name,
            "name": names.get(job.name, ""),
            "nodes": job.nodes,
            "planned": plan.assignment[job.name],
            "reason": plan.reasons[job.name],
        }
        for job in scenario.job
    ]
    return {"jobs": jobs, "nodes": scenario.cluster.nodes, "spares": plan.spares, "waf": status_tables.rate(plan.waf)}
