"""When the controller plans anew, and what it tells the planner: jobs and nodes as Slurm and the agents show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unicron_ctl.controller import planning
from unicron_ctl.controller.ahead import Ahead
from unicron_ctl.controller.placement import OCCUPIES, held_by_others, usable
from unicron_ctl.controller.state import JobState

if TYPE_CHECKING:
    from unicron_ctl.controller.cluster import Cluster
    from unicron_ctl.controller.engine import Engine


class Replanning:
    """One per engine, beside its :class:`Cluster`."""

    def __init__(self, engine: Engine, cluster: Cluster) -> None:
        self._engine, self._cluster = engine, cluster
        self.ahead = Ahead()

    def replan(self, jobs: Sequence[JobState]) -> None:
        """A new plan when what it depends on has changed: the nodes that are there, the jobs, what they can take."""
        assert self._cluster.seen is not None
        engine, state = self._engine, self._engine.state
        nodes, inputs = self.usable_nodes(jobs), self.inputs(jobs)
        key = f"{len(nodes)} nodes: " + ", ".join(
            f"{i.job} w{i.weight:g} {i.min_nodes}-{i.max_nodes}{' measured' if i.rate else ''}" for i in inputs
        )
        reckoning = (len(nodes), engine.config.mtbf_node_hours, engine.config.transition_seconds)
        if key == state.plan_inputs:
            self.ahead.settle(inputs, state.assignment, *reckoning)
            return
        plan, looked_up = self.ahead.plan(inputs, *reckoning)
        trigger = f"was: {state.plan_inputs}; is: {key}" if state.plan_inputs else f"first plan: {key}"
        engine.emit(
            "replanned",
            assignment=plan.assignment,
            reasons=plan.reasons,
            objective=plan.objective,
            waf=plan.waf,
            inputs=key,
            trigger=trigger,
            spares=plan.spares,
            looked_up=looked_up,
            reason=trigger,
        )
        self.ahead.settle(inputs, plan.assignment, *reckoning)

    def usable_nodes(self, jobs: Sequence[JobState]) -> list[str]:
        """The nodes that can be given to these jobs; none while Slurm has not answered."""
        return (
            usable(
                self._cluster.seen.nodes,
                self._cluster.seen.elements,
                [job.job for job in jobs],
                self._cluster.put_aside(),
            )
            if self._cluster.seen
            else []
        )

    def inputs(self, jobs: Sequence[JobState]) -> list[planning.JobInput]:
        """The jobs as the planner sees them."""
        if self._cluster.seen is None:
            return [self._without_slurm(job) for job in jobs]
        nodes = set(self.usable_nodes(jobs))
        return [self._input(job, nodes) for job in jobs]

    @staticmethod
    def _without_slurm(job: JobState) -> planning.JobInput:
        count = len(job.elements(job.members))
        s = job.settings
        return planning.JobInput(
            job.job, s.weight, s.min_nodes, s.max_nodes, count, count, job.measured.get(count, 0.0), count
        )

    def _input(self, job: JobState, nodes: set[str]) -> planning.JobInput:
        """The job as the planner sees it: never more nodes than it has elements that could run."""
        elements = self._cluster.elements(job.job)
        possible = sum(
            1
            for e in elements.values()
            if e.state in OCCUPIES
            or (e.state == "PENDING" and not held_by_others(e))
            or e.element in self._cluster.dead(job)
        )
        alive = sum(1 for e in elements.values() if e.state == "RUNNING" and e.node in nodes)
        most = max(1, min(job.settings.max_nodes, possible))
        before = min(self._engine.state.assignment.get(job.job, alive), most)
        measured_nodes = len(job.elements(job.members))
        rate = job.measured.get(measured_nodes, 0.0)
        if not rate and job.measured:  # not yet at this size: the last size that was measured
            measured_nodes, rate = list(job.measured.items())[-1]
        return planning.JobInput(
            job.job,
            job.settings.weight,
            min(job.settings.min_nodes, most),
            most,
            max(before, alive),
            alive,
            rate,
            measured_nodes,
            self._rates(job),
        )

    def _rates(self, job: JobState) -> dict[int, float]:
        """Measured rates by node count; sizes at which only an earlier run of the same name has been seen count too."""
        if self._engine.config.throughput != "measured":
            return {}
        rates: dict[int, float] = {}
        for known in self._engine.state.jobs.values():
            same = (known.settings.name, known.settings.user) == (job.settings.name, job.settings.user)
            if same and known is not job:
                rates |= known.measured
        return {count: rate for count, rate in {**rates, **job.measured}.items() if rate > 0}
