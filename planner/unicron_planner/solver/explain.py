"""Why a job gets what it gets: the decision, the second-best plan and by how much it lost, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from unicron_planner.problem.objective import Scenario
from unicron_planner.solver import keys, tables
from unicron_planner.solver.keys import Row
from unicron_planner.solver.plan import Plan, flops_text, nodes_text, plan_of
from unicron_planner.solver.solve import solve, within


@dataclass(frozen=True)
class Explanation:
    """Why a job gets its nodes."""

    job: str
    nodes: int
    reason: str
    margin: float
    """By how much the objective of `second` is smaller, in weighted FLOP over `seconds`."""
    seconds: float
    """The expected time to the next failure."""
    text: str
    second: Plan | None
    """The best plan that gives the job any other size; None if there is none."""

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**vars(self), "second": None if self.second is None else self.second.to_dict()}


def runner_up(scenario: Scenario, name: str, plan: Plan) -> Plan | None:
    """The best plan in which the job gets another size than in `plan`, on the nodes that were offered to its owner;
    None if it has no other size."""
    nodes = plan.assignment[name]
    owner = scenario.job(name).owner
    jobs, room = scenario.owners[owner], plan.shares.get(owner, scenario.nodes)
    rows = [within(row, room) for row in keys.rows(scenario, jobs)]
    at = [job.name for job in jobs].index(name)
    other = rows[at].sizes != nodes
    if not np.any(other):
        return None
    rows[at] = Row(rows[at].sizes[other], rows[at].keys[other])
    sizes, _ = tables.optimum(rows, room)
    found = {job.name: size for job, size in zip(jobs, sizes, strict=True)}
    return plan_of(scenario, plan.assignment | found, plan.shares)


def duration_text(seconds: float) -> str:
    """A time span for people."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def explain(scenario: Scenario, name: str, plan: Plan | None = None) -> Explanation:
    """The explanation for one job. Raises PlanError for an unknown job. plan: the chosen one; by default it is
    solved."""
    scenario.job(name)
    plan = plan or solve(scenario)
    nodes, reason = plan.assignment[name], plan.reasons[name]
    second = runner_up(scenario, name, plan)
    seconds = scenario.d_running
    lead = f"{name} gets {nodes_text(nodes)}: {reason}."
    if second is None:
        text = f"{lead} There is no other size that it could be given."
        return Explanation(name, nodes, reason, 0.0, seconds, text, None)
    margin = plan.objective - second.objective
    changes = [
        f"{job} {plan.assignment[job]} to {count}"
        for job, count in second.assignment.items()
        if count != plan.assignment[job] and job != name
    ]
    others = f" (and {', '.join(changes[:4])}{', ...' if len(changes) > 4 else ''})" if changes else ""
    if margin <= 1e-9 * abs(plan.objective):
        verdict = "would do equally well, but disturb more jobs, move more nodes or come later by name"
    else:
        share = f", {100 * margin / abs(plan.objective):.2g} % less" if plan.objective > 0 else ""
        verdict = (
            f"would do {flops_text(margin / seconds)} less on average over the {duration_text(seconds)} "
            f"expected until the next failure{share}"
        )
    text = f"{lead} The second-best plan gives it {nodes_text(second.assignment[name])}{others} and {verdict}."
    return Explanation(name, nodes, reason, margin, seconds, text, second)
