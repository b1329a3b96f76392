"""Unicron's dynamic program (docs/design/planning.md): the best plan for one scenario, exact and deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.solver import keys, tables
from unicron_planner.solver.keys import Row
from unicron_planner.solver.plan import Plan, plan_of
from unicron_planner.solver.shares import divide

Assign = Callable[[Sequence[Job], int], dict[str, int]]


def solve(scenario: Scenario) -> Plan:
    """The plan for at most n' nodes with the largest sum of G. If there are several owners, the sum is largest for each
    of them on the nodes of their share (`unicron_planner.solver.shares`).

    Ties: fewest jobs disturbed, then the smallest sum of |x' - x_t|, then the job whose name comes first gets more.
    """
    assignment, shares = by_owner(scenario, lambda jobs, room: best(scenario, jobs, room))
    return plan_of(scenario, assignment, shares)


def best(scenario: Scenario, jobs: Sequence[Job], room: int) -> dict[str, int]:
    """The best sizes for some of the scenario's jobs, sorted by name, on `room` of its nodes."""
    rows = keys.rows(scenario, jobs)
    if room < scenario.nodes:
        rows = [within(row, room) for row in rows]
    sizes, _ = tables.optimum(rows, room)
    return {job.name: size for job, size in zip(jobs, sizes, strict=True)}


def within(row: Row, room: int) -> Row:
    """The row without the sizes above `room`."""
    fitting = row.sizes <= room
    return row if fitting.all() else Row(row.sizes[fitting], row.keys[fitting])


def by_owner(scenario: Scenario, assign: Assign) -> tuple[dict[str, int], dict[str, int]]:
    """(nodes by job, nodes offered to each owner). `assign` divides the nodes offered to an owner among the
    owner's jobs, sorted by name.

    Owners are served in the order of the nodes that they have now, by weight. What one leaves of its share is offered
    to the next. So an owner's claims cannot change what it is offered, and nobody gains by false ones.
    """
    owners = scenario.owners
    if len(owners) == 1:
        (owner, jobs), *_ = owners.items()
        return assign(jobs, scenario.nodes), {owner: scenario.nodes}
    divided = divide(scenario)
    assignment: dict[str, int] = {}
    offered: dict[str, int] = {}
    left = 0
    for owner in sorted(owners, key=lambda owner: (_standing(owners[owner]), owner)):
        jobs = owners[owner]
        offered[owner] = divided[owner] + left
        found = assign(jobs, offered[owner])
        left = max(0, offered[owner] - sum(found.values()))
        assignment |= found
    return assignment, offered


def _standing(jobs: Sequence[Job]) -> tuple[bool, float]:
    """The sort key of an owner: the nodes of the jobs now, by weight. Owners of weight 0 are last."""
    weight = max(job.weight for job in jobs)
    return not weight, sum(job.holds for job in jobs) / (weight or 1.0)
