"""Events that can happen next to a cluster, and the scenario after each.

An event is a tuple: ("lost", job, ...) one node of each job named (twice where a job loses two), ("spare",) a spare
node lost, ("join",) a node joins, ("finish", job) a job ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from unicron_planner.problem.objective import PlanError, Scenario

Event = tuple[str, ...]


def single_events(scenario: Scenario) -> list[Event]:
    """Every event that can come next, one at a time."""
    events: list[Event] = [("lost", job.name) for job in scenario.jobs if job.nodes > 0]
    if scenario.nodes > sum(job.nodes for job in scenario.jobs):
        events.append(("spare",))
    events.append(("join",))
    return events + [("finish", job.name) for job in scenario.jobs if len(scenario.jobs) > 1]


def pairs_of_losses(scenario: Scenario) -> list[Event]:
    """Two nodes lost at once, of the same or of two jobs."""
    running = sorted((job for job in scenario.jobs if job.nodes > 0), key=lambda job: job.name)
    return [
        ("lost", first.name, second.name)
        for i, first in enumerate(running)
        for second in running[i:]
        if first is not second or first.nodes > 1
    ]


def normal(event: Event) -> Event:
    """The form under which an event is stored: the losses sorted by name."""
    return ("lost", *sorted(event[1:])) if event[0] == "lost" else event


def after(scenario: Scenario, event: Event) -> Scenario:
    """The scenario to plan for once `event` has happened. A job that lost a node keeps its x_t (see Job.nodes)."""
    kind = event[0]
    if kind == "lost":
        for name, count in Counter(event[1:]).items():
            job = scenario.job(name)
            if job.nodes < count:
                raise PlanError(f"job {name} has no more than {job.nodes} to lose")
            scenario = scenario.with_job(replace(job, lost_worker=True, keep=min(job.keep, job.nodes - count)))
        return _with_nodes(scenario, 1 - len(event))
    if kind == "spare":
        return _with_nodes(scenario, -1)
    if kind == "join":
        return _with_nodes(scenario, 1)
    if kind == "finish":
        gone = scenario.job(event[1])
        if len(scenario.jobs) == 1:
            raise PlanError(f"{gone.name} is the only job: nothing is left to plan for when it finishes")
        return replace(scenario, jobs=tuple(job for job in scenario.jobs if job is not gone))
    raise PlanError(f"unknown event {kind!r}: use lost, spare, join or finish")


def _with_nodes(scenario: Scenario, change: int) -> Scenario:
    if scenario.nodes + change < 0:
        raise PlanError("there is no node left to lose")
    return replace(scenario, nodes=scenario.nodes + change)
