"""Plans jobs that can use different nodes, so that the nodes for each job can really be found. Pure.

Jobs that can use the same nodes are planned together by one dynamic program over the number of nodes. If some can use
only a part of them, the planned numbers may not fit side by side. Then the jobs that compete for too few nodes (Hall's
condition) are planned first, on these nodes alone, and the others on what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from unicron_ctl.controller.plan.planning import JobInput
from unicron_planner.solver.plan import Plan

Solve = Callable[[Sequence[JobInput], int, Mapping[str, int]], Plan]


@dataclass(frozen=True)
class Pool:
    """Jobs that share nodes, and all nodes that any of them can use."""

    jobs: tuple[JobInput, ...]
    nodes: frozenset[str]

    @property
    def count(self) -> int:
        """The number of nodes that the plan may give out. Spare nodes stay free, unless the jobs train on them
        already."""
        spare = max((job.spare_nodes for job in self.jobs), default=0)
        had = sum(min(job.nodes, job.trains) for job in self.jobs)
        return max(len(self.nodes) - spare, min(len(self.nodes), had))


def pools(jobs: Sequence[JobInput]) -> list[Pool]:
    """Groups the jobs by the nodes that they share. The pools are in the order of their first jobs."""
    found: list[Pool] = []
    for job in jobs:
        touching = [pool for pool in found if pool.nodes & job.reach]
        merged = Pool(
            (*(known for pool in touching for known in pool.jobs), job),
            job.reach.union(*(pool.nodes for pool in touching)),
        )
        found = [pool for pool in found if pool not in touching] + [merged]
    order = {job.job: index for index, job in enumerate(jobs)}
    ordered = [replace(pool, jobs=tuple(sorted(pool.jobs, key=lambda job: order[job.job]))) for pool in found]
    return sorted(ordered, key=lambda pool: order[pool.jobs[0].job])


def plan(pool: Pool, solve: Solve) -> Plan:
    """Plans one pool, so that each job's nodes can be found within its reach. Hot spares are taken from the nodes that
    the partition keeps free, as far as these suffice."""
    return _add_hot_spares(pool, _share(pool, solve, {}))


def _add_hot_spares(pool: Pool, found: Plan) -> Plan:
    """Gives jobs the hot spares that the plan has no nodes for, from the nodes that are kept free."""
    given, reasons = dict(found.assignment), dict(found.reasons)
    for job in pool.jobs:
        room = len(pool.nodes) - job.block
        while job.trains <= given[job.job] < job.max_nodes and sum(given.values()) <= room:
            more = {**given, job.job: given[job.job] + job.block}
            if crowd(pool, more):
                break
            given = more
        if given[job.job] > found.assignment[job.job]:
            count = given[job.job] - found.assignment[job.job]
            waits = f"wait{'s' if count == 1 else ''}"
            reasons[job.job] += f"; {count} of the nodes that are kept free {waits} ready as its hot spare"
    spares = max(0, len(pool.nodes) - sum(given.values()))
    return replace(found, assignment=given, reasons=reasons, spares=spares)


def _share(pool: Pool, solve: Solve, elsewhere: Mapping[str, int]) -> Plan:
    """Plans the pool; if some of its jobs compete for too few nodes, plans those first and the others on the rest.

    elsewhere: nodes that owners already have outside the pool. They count towards the owners' shares, so nobody gets
    more by asking for particular nodes."""
    found = solve(pool.jobs, pool.count, elsewhere)
    crowded = crowd(pool, found.assignment)
    if not crowded or len(crowded) == len(pool.jobs):
        return found
    inner = [job for job in pool.jobs if job.job in crowded]
    nodes = frozenset().union(*(job.reach for job in inner))
    parts = [_share(part, solve, elsewhere) for part in pools(inner)]
    had = dict(elsewhere)
    for job in inner:
        had[job.whose] = had.get(job.whose, 0) + sum(part.assignment.get(job.job, 0) for part in parts)
    rest = [replace(job, reach=job.reach - nodes) for job in pool.jobs if job.job not in crowded]
    parts += [_share(part, solve, had) for part in pools(rest)]
    return join_plans(parts, len(pool.nodes))


def join_plans(parts: Sequence[Plan], nodes: int) -> Plan:
    """Joins the plans of different jobs. nodes: the number of nodes in all."""
    objective, waf = sum((part.objective for part in parts), 0.0), sum((part.waf for part in parts), 0.0)
    assignment, reasons, layouts, shares = dict[str, int](), dict[str, str](), dict[str, str](), Counter[str]()
    for part in parts:
        assignment |= part.assignment
        reasons |= part.reasons
        layouts |= part.layouts
        shares.update(part.shares)
    spares = max(0, nodes - sum(assignment.values()))
    return Plan(assignment, objective, waf, reasons, spares, layouts, dict(shares))


def crowd(pool: Pool, wanted: Mapping[str, int]) -> set[str]:
    """Returns jobs that together want more nodes than they can use; empty if every job can have its number.

    This is a maximum flow from jobs to kinds of nodes: if a job goes short, the jobs that it reaches are such a set.
    """
    if all(job.reach == pool.nodes for job in pool.jobs):
        return set()
    room: dict[frozenset[str], int] = {}
    for name in pool.nodes:
        users = frozenset(job.job for job in pool.jobs if name in job.reach)
        room[users] = room.get(users, 0) + 1
    given: dict[tuple[str, frozenset[str]], int] = {}
    for job in pool.jobs:
        for _ in range(wanted[job.job]):
            seen = _give_one(job.job, room, given)
            if seen:
                return seen
    return set()


def _give_one(job: str, room: dict[frozenset[str], int], given: dict[tuple[str, frozenset[str]], int]) -> set[str]:
    """Gives the job one more node, and moves other jobs' nodes if needed. Returns the jobs in its way if it fails."""
    reached_from: dict[str, tuple[str, frozenset[str]] | None] = {job: None}
    queue = [job]
    for current in queue:
        for users in (kind for kind in room if current in kind):
            if room[users] > 0:
                room[users] -= 1
                _shift(current, users, reached_from, given)
                return set()
            for other in sorted(users - reached_from.keys()):
                if given.get((other, users), 0) > 0:
                    reached_from[other] = (current, users)
                    queue.append(other)
    return set(reached_from)


def _shift(
    current: str,
    users: frozenset[str],
    reached_from: Mapping[str, tuple[str, frozenset[str]] | None],
    given: dict[tuple[str, frozenset[str]], int],
) -> None:
    """Gives `current` a node of this kind; each earlier job on the path takes the node that the next one gave up."""
    step: tuple[str, frozenset[str]] | None = (current, users)
    while step is not None:
        taker, kind = step
        given[taker, kind] = given.get((taker, kind), 0) + 1
        step = reached_from[taker]
        if step is not None:
            given[taker, step[1]] -= 1
