"""The plan for one scenario: what each job gets, what it is worth, and why, in one sentence a job."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from unicron_planner.problem.objective import Job, Scenario


@dataclass(frozen=True)
class Plan:
    """The best assignment of nodes to jobs."""

    assignment: dict[str, int]
    """Nodes by job."""
    objective: float
    """Sum of G, weighted FLOP over the next running period."""
    waf: float
    """Sum of F, weighted FLOP/s."""
    reasons: dict[str, str]
    """A sentence for each job."""
    spares: int = 0
    """Nodes that no job gets."""
    layouts: dict[str, str] = field(default_factory=dict)
    """The layout of each job that has several."""
    shares: dict[str, int] = field(default_factory=dict)
    """Nodes offered to each owner, if there are several."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `unicronctl plan`."""
        out = {
            "assignment": self.assignment,
            "objective": self.objective,
            "waf": self.waf,
            "reasons": self.reasons,
            "spares": self.spares,
        }
        more = {"layouts": self.layouts, "shares": self.shares}
        return out | {name: value for name, value in more.items() if value}


def plan_of(scenario: Scenario, assignment: dict[str, int], shares: dict[str, int] | None = None) -> Plan:
    """Makes a Plan, with figures and reasons, from an assignment. shares: nodes offered to each owner."""
    shares = shares if shares and len(shares) > 1 else {}
    assignment = {job.name: assignment[job.name] for job in scenario.jobs}
    spares = scenario.nodes - sum(assignment.values())
    layouts = {job.name: scenario.layout(job, assignment[job.name]) for job in scenario.jobs}
    return Plan(
        assignment=assignment,
        objective=math.fsum(scenario.g(job, assignment[job.name]) for job in scenario.jobs),
        waf=math.fsum(job.f(assignment[job.name], layouts[job.name]) for job in scenario.jobs),
        reasons={
            job.name: reason(scenario, job, assignment[job.name], spares, shares.get(job.owner))
            for job in scenario.jobs
        },
        spares=spares,
        layouts={name: layout for name, layout in layouts.items() if layout is not None},
        shares=shares,
    )


def flops_text(rate: float) -> str:
    """Formats FLOP/s for people, as "1.9 PFLOP/s"."""
    for name, unit in (("EFLOP/s", 1e18), ("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if rate >= unit:
            return f"{rate / unit:.3g} {name}"
    return f"{rate:.3g} FLOP/s"


def nodes_text(count: int) -> str:
    """Formats a number of nodes, as "1 node" or "2 nodes"."""
    return f"{count} node{'' if count == 1 else 's'}"


def reason(scenario: Scenario, job: Job, nodes: int, spares: int, share: int | None = None) -> str:
    """Says in one sentence why the job gets `nodes` nodes. share: nodes offered to its owner, if there are several
    owners."""
    offer = f"; {job.owner or 'its owner'} has {share} of {nodes_text(scenario.nodes)} by weight"
    offer = "" if share is None else offer
    if nodes == 0:
        return _stop_reason(scenario, job, share) + offer
    if job.spares and nodes != job.nodes and min(nodes, job.working) == min(job.nodes, job.working):
        return _spares_reason(job, nodes) + offer
    return _reason(scenario, job, nodes, spares, share) + _with_spares(job, nodes) + offer


def _with_spares(job: Job, nodes: int) -> str:
    waiting = nodes - job.working
    if waiting <= 0:
        return ""
    words = f"{waiting} of them wait{'s' if waiting == 1 else ''} as hot spare{'s' if waiting > 1 else ''}"
    return f"; {words}, which saves {flops_text(job.spare_gain(nodes))} on average"


def _spares_reason(job: Job, nodes: int) -> str:
    """The reason for a change in the number of spares only."""
    before, now = max(0, job.nodes - job.working), max(0, nodes - job.working)
    count = abs(now - before)
    worth = flops_text(abs(job.spare_gain(nodes) - job.spare_gain(job.nodes)))
    spares = f"{count} hot spare{'s' if count > 1 else ''}, worth {worth} on average"
    if job.lost_worker:
        return f"lost a node; {nodes_text(min(nodes, job.working))} train, and there is no node for {spares}"
    if now > before:
        return f"gets {spares}: no job gains more from {'the nodes' if count > 1 else 'the node'}"
    return f"gives up {spares}: another job gains more, or the node is kept free; all that train go on"


def _reason(scenario: Scenario, job: Job, nodes: int, spares: int, share: int | None) -> str:
    layout = scenario.layout(job, nodes)
    now, then = flops_text(job.now), flops_text(job.f(nodes, layout))
    seconds = f"{scenario.d_transition(job, nodes, layout):g} s"
    lost = "lost a worker; " if job.lost_worker else ""
    if job.changes(layout) and job.nodes:
        return f"{lost}{_layout_reason(scenario, job, nodes, layout)} ({now} to {then}); the restart takes {seconds}"
    if nodes == job.nodes:
        if job.lost_worker:
            return f"lost a worker; a spare takes its place, so it stays on {nodes_text(nodes)} ({now}) after {seconds}"
        return f"stays on {nodes_text(nodes)} ({now}): no other plan gains more than its transition costs"
    if job.nodes == 0:
        return f"starts on {nodes_text(nodes)}{f' as {layout}' if layout else ''} ({then})"
    others = "in other jobs" if share is None else "in its owner's other jobs, or are others' by weight"
    if nodes > job.nodes:
        where = "than anywhere else" if share is None else "than in its owner's other jobs"
        verb, why = "grows", f"the nodes bring more weighted FLOP/s here {where}"
    elif not job.lost_worker:
        verb, why = "shrinks", f"its nodes bring more weighted FLOP/s {others}"
    elif share is not None and nodes >= share:
        verb, why = "shrinks", "the other nodes are others' by weight"
    elif spares:
        verb, why = "shrinks", "a replacement would cost more than it brings before the next failure"
    else:
        verb, why = "shrinks", "a node taken from another job would cost more weighted FLOP/s than it brings here"
    change = f"{verb} from {job.nodes} to {nodes_text(nodes)} ({now} to {then})"
    return f"{lost}{change}: {why}; the transition takes {seconds}"


def _layout_reason(scenario: Scenario, job: Job, nodes: int, layout: str | None) -> str:
    size = f"on {nodes_text(nodes)}" if nodes == job.nodes else f"from {job.nodes} to {nodes_text(nodes)}"
    stays = job.f(nodes, job.layout)
    why = f"it would do {flops_text(stays)} there" if stays else "it cannot run there"
    return f"goes from {job.layout} to {layout} {size}: as {job.layout} {why}"


def _stop_reason(scenario: Scenario, job: Job, share: int | None) -> str:
    smallest = next((size for size in job.flops if size <= scenario.nodes and job.runs(size)), None)
    before = "stays without nodes" if job.nodes == 0 else f"stops and gives up its {nodes_text(job.nodes)}"
    if smallest is None:
        return f"{before}: none of its sizes fits into {nodes_text(scenario.nodes)}"
    if share is not None and smallest > share:
        return f"{before}: its smallest size is {nodes_text(smallest)}, more than its owner's share"
    whose = "other jobs" if share is None else "its owner's other jobs"
    return f"{before}: its smallest size is {nodes_text(smallest)}, which bring more weighted FLOP/s in {whose}"
