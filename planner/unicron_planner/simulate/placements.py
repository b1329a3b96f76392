"""Placements: the nodes that a system gives each job first, when one is lost, and when one comes.

A placement sees and changes the replay through :class:`Replay` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from unicron_planner.ahead.expected import solve_expected
from unicron_planner.problem.objective import Scenario
from unicron_planner.simulate.policies import Policy
from unicron_planner.simulate.simulated_job import DETECT, IDLE, NO_FAILURE, RUN, TRANSITION, SimulatedJob
from unicron_planner.simulate.splits import split
from unicron_planner.solver.solve import solve


class Replay(Protocol):
    """The part of a replay that placements use (:mod:`unicron_planner.simulate.engine`). fresh: the scenario with no
    node given out. up: nodes that live; free: those of them that no job holds. plans: how often all nodes were shared
    out."""

    scenario: Scenario
    fresh: Scenario
    policy: Policy
    jobs: list[SimulatedJob]
    up: set[int]
    free: set[int]
    plans: int

    def largest(self, job: SimulatedJob, room: int) -> int: ...
    def throughput(self, job: SimulatedJob, size: int) -> float: ...
    def planned_seconds(self, job: SimulatedJob, size: int, lost: bool) -> float: ...
    def is_short(self, job: SimulatedJob) -> bool: ...
    def add_lost_work(self, job: SimulatedJob) -> None: ...
    def adjust_nodes(self, job: SimulatedJob, size: int) -> None: ...
    def enter_phase(
        self, job: SimulatedJob, phase: str, seconds: float, then: Callable[[SimulatedJob], None] | None
    ) -> None: ...
    def recover(self, job: SimulatedJob, severity: int) -> None: ...
    def recompute(self, job: SimulatedJob) -> None: ...
    def resize(self, job: SimulatedJob, size: int, lost: bool) -> None: ...


class Placement(Protocol):
    """The decisions about nodes that systems differ in. all_or_none: a job runs on all nodes of its share or on
    none."""

    all_or_none: bool

    def first_plan(self, run: Replay) -> dict[str, int]:
        """Nodes by job at the start."""

    def on_loss(self, run: Replay, job: SimulatedJob) -> None:
        """The system has noticed that the job has lost nodes."""

    def on_join(self, run: Replay) -> None:
        """A node has come and is free."""


class NoPlan:
    """A system that shares out nothing: the base of those that only differ in what they make of a loss."""

    all_or_none = False

    def first_plan(self, run: Replay) -> dict[str, int]:
        """The planner's split of the whole cluster, to the system's advantage."""
        return solve(run.fresh).assignment


class WholeJobs(NoPlan):
    """A job runs on all its nodes or not at all."""

    all_or_none = True

    def on_loss(self, run: Replay, job: SimulatedJob) -> None:
        """The job gets all its nodes again, with spares for the lost ones, or none until they are repaired."""
        living = len([number for number in job.nodes if number in run.up])
        run.adjust_nodes(job, min(job.target, living + len(run.free)))
        if len(job.nodes) < job.target:
            job.level = 0.0
            run.enter_phase(job, IDLE, 0.0, None)
            return
        job.size = job.target
        run.recover(job, 1)

    def on_join(self, run: Replay) -> None:
        for job in run.jobs:
            if job.phase == IDLE and job.target:
                self.on_loss(run, job)


class Own(NoPlan):
    """Each job keeps its nodes, shrinks and grows by its own losses."""

    def on_loss(self, run: Replay, job: SimulatedJob) -> None:
        """The job goes on with what is left, and spares, at the largest size that it can run."""
        alive = len([number for number in job.nodes if number in run.up])
        run.resize(job, run.largest(job, min(alive + len(run.free), job.target)), lost=True)
        self.on_join(run)

    def on_join(self, run: Replay) -> None:
        """Free nodes go to the job that misses most."""
        for job in sorted(run.jobs, key=lambda job: (job.size - job.target, job.spec.name)):
            if job.phase == DETECT or not run.free:
                continue
            size = run.largest(job, min(len(job.nodes) + len(run.free), job.target))
            if size > job.size:
                if not run.policy.graceful and job.phase == RUN:
                    run.add_lost_work(job)
                run.resize(job, size, lost=False)


@dataclass
class Redistributing:
    """All nodes are shared out at every change: by the planner (`how` is "optimal"), looking ahead or not, or by a
    naive split."""

    how: str
    ahead: bool
    all_or_none: bool = False
    _plans: dict[tuple[int, tuple[int, ...], frozenset[str]], dict[str, int]] = field(default_factory=dict)

    def first_plan(self, run: Replay) -> dict[str, int]:
        return self._plan(run, set())

    def on_loss(self, run: Replay, job: SimulatedJob) -> None:
        self._redistribute(run, {job.spec.name})

    def on_join(self, run: Replay) -> None:
        self._redistribute(run, set())

    def _redistribute(self, run: Replay, hit: set[str]) -> None:
        """Decides for the whole cluster. Failures that are still unnoticed come to light, beside those of `hit`."""
        run.plans += 1
        lost = hit | {job.spec.name for job in run.jobs if run.is_short(job)}
        plan = self._plan(run, lost)
        changed = [job for job in run.jobs if plan[job.spec.name] != job.size or job.spec.name in lost]
        seconds = {
            job.spec.name: run.planned_seconds(job, plan[job.spec.name], job.spec.name in lost) for job in changed
        }
        shrinking_first = sorted(changed, key=lambda job: plan[job.spec.name] - len(job.nodes))
        for job in shrinking_first:
            size = plan[job.spec.name]
            run.adjust_nodes(job, size)
            if job.spec.name in lost:
                job.worst = NO_FAILURE
            job.size, job.level = size, run.throughput(job, size)
            if size == 0:
                run.enter_phase(job, IDLE, 0.0, None)
            else:
                run.enter_phase(job, TRANSITION, seconds[job.spec.name], run.recompute)

    def _plan(self, run: Replay, lost: set[str]) -> dict[str, int]:
        jobs = tuple(replace(job.spec, nodes=job.size, lost_worker=job.spec.name in lost) for job in run.jobs)
        scenario = replace(run.scenario, nodes=len(run.up), jobs=jobs)
        if self.how != "optimal":
            return split(scenario, self.how)
        key = (len(run.up), tuple(job.size for job in run.jobs), frozenset(lost))
        if key not in self._plans:
            found = solve_expected(scenario) if self.ahead else solve(scenario)
            self._plans[key] = found.assignment
        return self._plans[key]


def placement_of(policy: Policy) -> Placement:
    """A policy's placement, for one replay."""
    if policy.placement == "fixed":
        return WholeJobs()
    if policy.placement == "own":
        return Own()
    return Redistributing(policy.placement, policy.ahead)
