"""Unicron's dynamic program (docs/design/planning.md): the best plan for one scenario, exact and deterministic."""

from __future__ import annotations

from planner import keys, tables
from planner.model import Scenario
from planner.node_types import solve_typed
from planner.plan import Plan, flops_text, nodes_text, plan_of

__all__ = ["Plan", "by_name", "flops_text", "nodes_text", "plan_of", "solve"]


def solve(scenario: Scenario) -> Plan:
    """The assignment of at most n' nodes with the largest sum of G.

    Ties: fewest jobs disturbed, then the smallest sum of |x' - x_t|, then the job whose name comes first gets more.
    """
    if scenario.types:
        return solve_typed(scenario)
    order = by_name(scenario)
    rows = keys.rows(scenario)
    sizes, _ = tables.optimum([rows[i] for i in order], scenario.nodes)
    return plan_of(scenario, {scenario.jobs[i].name: size for i, size in zip(order, sizes, strict=True)})


def by_name(scenario: Scenario) -> list[int]:
    """Indices of the jobs, sorted by name."""
    return sorted(range(len(scenario.jobs)), key=lambda i: scenario.jobs[i].name)
