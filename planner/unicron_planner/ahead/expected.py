"""Plans that weigh the next failure, not only the state now (after Parcae's expected throughput, NSDI'24).

The optimum of G gives every node to some job. A spare node can be worth more: if a job loses a node, and its next
smaller size is far below, the spare keeps it at its size. So a few candidates are compared, the optima with 0, 1, 2,
... nodes held back, by their own objective plus the expected objective of the plan after the next failure, which is
equally likely on each node.
"""

from __future__ import annotations

import math
from dataclasses import replace

from unicron_planner.ahead.lookahead import Lookahead
from unicron_planner.problem.objective import Scenario
from unicron_planner.solver import keys, tables
from unicron_planner.solver.plan import Plan, plan_of
from unicron_planner.solver.solve import within

MOST_SPARES = 2


def candidates(scenario: Scenario, spares: int = MOST_SPARES) -> list[dict[str, int]]:
    """The best assignments with at least 0, 1, ... `spares` nodes held back, without repetition."""
    jobs = sorted(scenario.jobs, key=lambda job: job.name)
    rows = keys.rows(scenario, jobs)
    out: list[dict[str, int]] = []
    for held in range(min(spares, scenario.nodes) + 1):
        room = scenario.nodes - held
        sizes, _ = tables.optimum([within(row, room) for row in rows], room)
        found = {job.name: size for job, size in zip(jobs, sizes, strict=True)}
        if found not in out:
            out.append(found)
    return out


def after_failure(scenario: Scenario, assignment: dict[str, int]) -> float:
    """Expected objective of the plan after the next failure, if `assignment` runs until then."""
    if scenario.nodes == 0:
        return 0.0
    running = replace(
        scenario, jobs=tuple(replace(job, nodes=assignment[job.name], lost_worker=False) for job in scenario.jobs)
    )
    table = Lookahead(running, pairs=False)
    parts = []
    for job in running.jobs:
        if job.nodes:
            parts.append(job.nodes / scenario.nodes * table.entries["lost", job.name].plan.objective)
    idle = scenario.nodes - sum(assignment.values())
    if idle:
        parts.append(idle / scenario.nodes * table.entries[("spare",)].plan.objective)
    return math.fsum(parts)


def solve_expected(scenario: Scenario) -> Plan:
    """The candidate with the best sum over this running period and the next; ties: the fewest spares."""
    best: tuple[float, Plan] | None = None
    for assignment in candidates(scenario):
        plan = plan_of(scenario, assignment)
        score = plan.objective + after_failure(scenario, assignment)
        if best is None or score > best[0] + 1e-12 * abs(best[0]):
            best = (score, plan)
    assert best is not None  # the optimum itself is always a candidate
    return best[1]
