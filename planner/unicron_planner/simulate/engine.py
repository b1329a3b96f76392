"""Replays a trace under a policy: event-driven, deterministic, with the planner that the controller uses.

Every job is in one phase, and the WAF of the cluster is split by phase at every moment: run (counts), detect (a failure
that is not noticed yet), transition, recompute (work done before), idle. The loss by missing nodes, a poor split or a
lower speed is `sub_healthy`. The parts add up to the ideal: the WAF of the best split of all nodes without failures.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from unicron_planner.ahead.expected import solve_expected
from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.simulate.causes import HARMLESS
from unicron_planner.simulate.policies import ITERATION, Policy, detection_seconds
from unicron_planner.simulate.trace import Trace, TraceEvent
from unicron_planner.solver.solve import solve

RUN, DETECT, TRANSITION, RECOMPUTE, IDLE = "run", "detect", "transition", "recompute", "idle"
NO_FAILURE = 4  # above every severity
LOSS_NAMES = {DETECT: "detection", TRANSITION: "transition", RECOMPUTE: "recompute"}


@dataclass(frozen=True)
class Result:
    """The result of one policy on a trace."""

    policy: str
    mean_waf: float
    ideal_waf: float
    efficiency: float
    lost: dict[str, float]
    """Shares of the ideal; with `efficiency` they add up to 1."""
    series: tuple[tuple[float, float], ...]
    """Steps of (seconds, WAF)."""
    failures: tuple[float, ...]
    """Seconds of the failures that hit a job."""
    plans: int
    """Number of times that nodes were redistributed."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `unicronctl simulate`."""
        found = vars(self) | {"failures": len(self.failures)}
        return {name: value for name, value in found.items() if name != "series"}


def node_slots(trace: Trace, nodes: int) -> tuple[list[tuple[float, TraceEvent, int]], set[int], int]:
    """(events with node numbers, nodes that are there at the start, number of nodes ever there).

    Names get numbers by order of appearance. A node whose first event is a join is absent until then. If all numbers
    are taken, a new name takes the number of a node that is gone, and without such a node the cluster grows. A node
    that returns after its number was given to another gets a new number."""
    first: dict[str, str] = {}
    for event in trace.events:
        first.setdefault(event.node, event.event)
    numbers = {name: number for number, name in enumerate(list(first)[:nodes])}
    names = dict(enumerate(numbers))
    absent = {number for name, number in numbers.items() if first[name] == "join"}
    up, most = set(range(nodes)) - absent, nodes
    gone: list[int] = []
    replaced: set[str] = set()
    start, out = set(up), []
    for event in trace.events:
        number = numbers.get(event.node)
        if event.event == "join":
            if number is None:
                number = gone[0] if gone else most
                if number in names:
                    del numbers[names[number]]
                    replaced.add(names[number])
                numbers[event.node], names[number] = number, event.node
                most = max(most, number + 1)
            back = number in gone
            if back:
                gone.remove(number)
            up.add(number)
            if event.seconds <= 0 and not back:
                start.add(number)
                continue
        elif number is None:
            if event.node in replaced:  # it is away
                continue
            raise PlanError(
                f"the trace fails node {event.node}, which has not joined, beside {nodes} others: give a scenario with "
                "more nodes"
            )
        elif event.failure.severity == 1 and number in up:
            up.remove(number)
            gone.append(number)
        out.append((event.seconds, event, number))
    return out, start, most


@dataclass
class SimulatedJob:
    """One job of a replay: its phase, its nodes, and the work that it has to do again."""

    spec: Job
    size: int = 0
    """Nodes that it runs on, as planned."""
    nodes: set[int] = field(default_factory=set)
    """Nodes that it holds, dead ones included until they are noticed."""
    target: int = 0
    """Nodes of its share at the start; systems that do not redistribute give it no more."""
    phase: str = IDLE
    level: float = 0.0
    """F while it runs."""
    epoch: int = 0
    """Number of phases so far: the end of an earlier one is ignored."""
    until: float = 0.0
    """When the present phase ends."""
    worst: int = NO_FAILURE
    """The severity of the worst failure that is not noticed yet."""
    ready: float = 0.0
    """When the present transition is over, whether a failure comes or not."""
    worked: float = 0.0
    """Seconds of progress, for checkpoints."""
    debt: float = 0.0
    """Seconds to compute again."""


class Simulation:
    """One policy on one trace."""

    def __init__(self, scenario: Scenario, trace: Trace, policy: Policy):
        self.scenario, self.trace, self.policy = scenario, trace, policy
        self.events, self.up, most = node_slots(trace, scenario.nodes)
        fresh = tuple(replace(job, nodes=0, lost_worker=False) for job in scenario.jobs)
        self.fresh = replace(scenario, jobs=fresh)
        self.ideal = solve(replace(self.fresh, nodes=most)).waf
        if self.ideal <= 0:
            raise PlanError("no job of the scenario can run on this cluster: there is nothing to simulate")
        self.free = set(self.up)
        self.jobs = [SimulatedJob(spec) for spec in fresh]
        self.owner: dict[int, SimulatedJob] = {}
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.now, self.plans = 0.0, 0
        self.work = 0.0
        self.lost = dict.fromkeys((*LOSS_NAMES.values(), "sub_healthy"), 0.0)
        self.series: list[tuple[float, float]] = []
        self.failures: list[float] = []
        self.placement = _placement_of(policy)

    def run(self) -> Result:
        """Replays the whole trace."""
        self._start()
        for when, event, number in self.events:
            if self.policy.notice and event.notice >= ITERATION:
                self._push(max(0.0, when - ITERATION), functools.partial(self._leave_node, number))
            self._push(when, functools.partial(self._trace_event, event, number))
        while self.queue and self.queue[0][0] < self.trace.until:
            when, _, act = heapq.heappop(self.queue)
            self._advance(when)
            act()
        self._advance(self.trace.until)
        total = self.ideal * self.trace.until
        lost = {name: value / total for name, value in self.lost.items()}
        efficiency = self.work / total
        lost["sub_healthy"] = 1.0 - efficiency - sum(value for name, value in lost.items() if name != "sub_healthy")
        if abs(lost["sub_healthy"]) < 1e-12:
            lost["sub_healthy"] = 0.0
        return Result(
            self.policy.name,
            self.work / self.trace.until,
            self.ideal,
            efficiency,
            lost,
            tuple(self.series),
            tuple(self.failures),
            self.plans,
        )

    # ---------------------------------------------------------------- time
    def _push(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (when, next(self.order), act))

    def _advance(self, when: float) -> None:
        """Accounts for the time up to `when`."""
        span = when - self.now
        if span > 0:
            room, running = self.ideal, 0.0
            for phase in (RUN, RECOMPUTE, TRANSITION, DETECT):
                level = min(sum(job.level for job in self.jobs if job.phase == phase), room)
                room -= level
                if phase == RUN:
                    self.work += level * span
                    running = level
                else:
                    self.lost[LOSS_NAMES[phase]] += level * span
            if not self.series or self.series[-1][1] != running:
                self.series.append((self.now, running))
            for job in self.jobs:
                if job.phase == RUN:
                    job.worked += span
        self.now = when

    def enter_phase(
        self, job: SimulatedJob, phase: str, seconds: float, then: Callable[[SimulatedJob], None] | None
    ) -> None:
        """Puts the job into `phase` for `seconds`, and calls `then` after it unless another event comes first. An event
        during a transition does not shorten it; a planned change during a recompute leaves the rest of it due."""
        if job.phase == RECOMPUTE and phase in (TRANSITION, IDLE) and self.policy.graceful:
            job.debt = job.until - self.now
        if phase == TRANSITION:
            seconds = max(seconds, job.ready - self.now)
            job.ready = self.now + seconds
        elif phase == IDLE:
            job.ready = self.now
        job.phase, job.until = phase, self.now + seconds
        job.epoch += 1
        if then is not None:
            epoch = job.epoch
            self._push(job.until, lambda: then(job) if job.epoch == epoch else None)

    # ---------------------------------------------------------------- what happens
    def _start(self) -> None:
        """Places the jobs at no cost: the replay starts with all of them running."""
        plan = self.placement.first_plan(self)
        for job in self.jobs:
            job.target = plan[job.spec.name]
            job.size = self.largest(job, min(job.target, len(self.free)))
            if self.placement.all_or_none and job.size < job.target:
                job.size = 0
            self.adjust_nodes(job, job.size)
            self._settle_task(job)

    def _trace_event(self, event: TraceEvent, number: int) -> None:
        if event.event == "join":
            if number not in self.up:
                self.up.add(number)
                self.free.add(number)
                holder = self.owner.get(number)
                if holder is not None:  # it came back before its loss was noticed: its state is lost
                    self.drop(holder, number)
                self.placement.on_join(self)
            return
        if number not in self.up or event.failure.name in HARMLESS:
            return
        job = self.owner.get(number)
        if event.failure.severity == 1:
            self.up.discard(number)
            self.free.discard(number)
        if job is None or job.phase == IDLE:
            if job is not None and event.failure.severity == 1:
                self.drop(job, number)
            return
        self.failures.append(self.now)
        self._hit(job, event)

    def _leave_node(self, number: int) -> None:
        """The job leaves the node, whose loss was announced, at an iteration boundary, and loses no work. A job that is
        just recovering is hit by the loss itself."""
        job = self.owner.get(number)
        if number not in self.up or (job is not None and job.phase in (DETECT, TRANSITION)):
            return
        self.up.discard(number)
        self.free.discard(number)
        if job is not None:
            self.drop(job, number)
            if job.phase != IDLE:
                self.resize(job, self.largest(job, len(job.nodes)), lost=False)
                self.placement.on_join(self)

    def _hit(self, job: SimulatedJob, event: TraceEvent) -> None:
        if job.phase != DETECT:
            self.add_lost_work(job)
            self.enter_phase(job, DETECT, detection_seconds(self.policy, event.failure), self._on_detection)
        job.worst = min(job.worst, event.failure.severity)

    def add_lost_work(self, job: SimulatedJob) -> None:
        """Adds the work that the failure makes the job repeat, in seconds of its own work."""
        if self.policy.checkpoint is not None:
            since = job.worked % self.policy.checkpoint
            job.debt += since
            job.worked -= since
        else:
            job.debt = max(job.debt, self.policy.redo * ITERATION)

    def _on_detection(self, job: SimulatedJob) -> None:
        severity, job.worst = job.worst, NO_FAILURE
        if severity > 1:
            self.recover(job, severity)
        else:
            self.placement.on_loss(self, job)

    def recover(self, job: SimulatedJob, severity: int) -> None:
        """Gives the job its nodes again, after the transition of that severity."""
        seconds = self.policy.transition[severity]
        if seconds is None:
            seconds = self.planned_seconds(job, job.size, lost=True)
        job.level = self.throughput(job, job.size)
        self.enter_phase(job, TRANSITION, seconds, self.recompute)

    def recompute(self, job: SimulatedJob) -> None:
        """Repeats the work that is due. A failure before its end makes all of it due again."""
        if job.debt > 0:
            self.enter_phase(job, RECOMPUTE, job.debt, self._on_recompute)
        else:
            self._settle_task(job)

    def _on_recompute(self, job: SimulatedJob) -> None:
        job.debt = 0.0
        self._settle_task(job)

    def _settle_task(self, job: SimulatedJob) -> None:
        job.level = self.throughput(job, job.size)
        self.enter_phase(job, RUN if job.size else IDLE, 0.0, None)

    # ---------------------------------------------------------------- what placements use
    def throughput(self, job: SimulatedJob, size: int) -> float:
        """FLOP/s of the job on `size` nodes under this policy."""
        return self.policy.healthy * job.spec.f(size)

    def planned_seconds(self, job: SimulatedJob, size: int, lost: bool) -> float:
        """Seconds of the scenario's transition to `size` nodes. lost: the job has lost a node."""
        planned = replace(job.spec, nodes=job.size, lost_worker=lost)
        return self.scenario.d_transition(planned, size)

    def drop(self, job: SimulatedJob, number: int) -> None:
        """Takes the node from the job."""
        job.nodes.discard(number)
        self.owner.pop(number, None)

    def adjust_nodes(self, job: SimulatedJob, size: int) -> None:
        """Gives back or takes nodes until the job holds `size`; dead nodes go first."""
        for number in [number for number in job.nodes if number not in self.up]:
            self.drop(job, number)
        for number in sorted(job.nodes, reverse=True)[: max(len(job.nodes) - size, 0)]:
            self.drop(job, number)
            self.free.add(number)
        for number in sorted(self.free)[: max(size - len(job.nodes), 0)]:
            self.free.discard(number)
            job.nodes.add(number)
            self.owner[number] = job

    def is_short(self, job: SimulatedJob) -> bool:
        """Whether the job has fewer living nodes than planned."""
        return len(job.nodes) < job.size or any(number not in self.up for number in job.nodes)

    def largest(self, job: SimulatedJob, room: int) -> int:
        """The most nodes, up to `room`, on which the job can run."""
        return job.spec.options(room)[-1]

    def resize(self, job: SimulatedJob, size: int, lost: bool) -> None:
        """Continues the job on `size` nodes, after a transition; with none it waits. lost: it has lost a node."""
        seconds = self.policy.transition[1]
        if seconds is None:
            seconds = self.planned_seconds(job, size, lost)
        self.adjust_nodes(job, size)
        job.size, job.level = size, self.throughput(job, size)
        if size:
            self.enter_phase(job, TRANSITION, seconds, self.recompute)
        else:
            self.enter_phase(job, IDLE, 0.0, None)


# ---------------------------------------------------------------- placements
class Placement(ABC):
    """The decisions about nodes in which systems differ."""

    all_or_none = False
    """A job runs on all nodes of its share or on none."""

    def first_plan(self, run: Simulation) -> dict[str, int]:
        """Nodes by job at the start: by default the planner's split of the whole cluster, to the system's advantage."""
        return solve(run.fresh).assignment

    @abstractmethod
    def on_loss(self, run: Simulation, job: SimulatedJob) -> None:
        """The system has noticed that the job has lost nodes."""

    @abstractmethod
    def on_join(self, run: Simulation) -> None:
        """A node has come and is free."""


class WholeJobs(Placement):
    """A job runs on all its nodes or not at all."""

    all_or_none = True

    def on_loss(self, run: Simulation, job: SimulatedJob) -> None:
        """Gives the job all its nodes again, with spares for the lost ones, or none until they are repaired."""
        living = len([number for number in job.nodes if number in run.up])
        run.adjust_nodes(job, min(job.target, living + len(run.free)))
        if len(job.nodes) < job.target:
            job.level = 0.0
            run.enter_phase(job, IDLE, 0.0, None)
            return
        job.size = job.target
        run.recover(job, 1)

    def on_join(self, run: Simulation) -> None:
        for job in run.jobs:
            if job.phase == IDLE and job.target:
                self.on_loss(run, job)


class Own(Placement):
    """Each job keeps its nodes, shrinks and grows by its own losses."""

    def on_loss(self, run: Simulation, job: SimulatedJob) -> None:
        """Continues the job on the nodes that are left, and spares, at the largest size that it can run."""
        alive = len([number for number in job.nodes if number in run.up])
        run.resize(job, run.largest(job, min(alive + len(run.free), job.target)), lost=True)
        self.on_join(run)

    def on_join(self, run: Simulation) -> None:
        """Gives free nodes to the jobs that lack most."""
        for job in sorted(run.jobs, key=lambda job: (job.size - job.target, job.spec.name)):
            if job.phase == DETECT or not run.free:
                continue
            size = run.largest(job, min(len(job.nodes) + len(run.free), job.target))
            if size > job.size:
                if not run.policy.graceful and job.phase == RUN:
                    run.add_lost_work(job)
                run.resize(job, size, lost=False)


@dataclass
class Redistributing(Placement):
    """All nodes are shared out at every change: by the planner (`how` is "optimal"), looking ahead or not, or by a
    naive split."""

    how: str
    ahead: bool
    _plans: dict[tuple[int, tuple[int, ...], frozenset[str]], dict[str, int]] = field(default_factory=dict)

    def first_plan(self, run: Simulation) -> dict[str, int]:
        return self._plan(run, set())

    def on_loss(self, run: Simulation, job: SimulatedJob) -> None:
        self._redistribute(run, {job.spec.name})

    def on_join(self, run: Simulation) -> None:
        self._redistribute(run, set())

    def _redistribute(self, run: Simulation, hit: set[str]) -> None:
        """Decides for the whole cluster. Failures that were not noticed yet come to light, besides those of `hit`."""
        run.plans += 1
        lost = hit | {job.spec.name for job in run.jobs if run.is_short(job)}
        plan = self._plan(run, lost)
        shrinking_first = sorted(run.jobs, key=lambda job: plan[job.spec.name] - len(job.nodes))
        for job in shrinking_first:
            size, has_lost = plan[job.spec.name], job.spec.name in lost
            if has_lost:
                job.worst = NO_FAILURE
            if size != job.size or has_lost:
                run.resize(job, size, has_lost)

    def _plan(self, run: Simulation, lost: set[str]) -> dict[str, int]:
        jobs = tuple(replace(job.spec, nodes=job.size, lost_worker=job.spec.name in lost) for job in run.jobs)
        scenario = replace(run.scenario, nodes=len(run.up), jobs=jobs)
        if self.how != "optimal":
            return split(scenario, self.how)
        key = (len(run.up), tuple(job.size for job in run.jobs), frozenset(lost))
        if key not in self._plans:
            found = solve_expected(scenario) if self.ahead else solve(scenario)
            self._plans[key] = found.assignment
        return self._plans[key]


# ---------------------------------------------------------------- naive splits, for comparison
def model_size(job: Job) -> float:
    """Billions of parameters if the job's name contains them ("gpt-13b"), else its minimum size."""
    match = re.search(r"(\d+(?:\.\d+)?)\s*b(?![a-z0-9])", job.name.lower())
    return float(match[1]) if match and float(match[1]) > 0 else float(max(job.min_nodes, 1))


SHARES = {"equally": lambda job: 1.0, "by_weight": lambda job: job.weight, "by_size": model_size}


def split(scenario: Scenario, how: str) -> dict[str, int]:
    """Nodes by job in proportion to its share, each rounded down to a size that it can run. The rest raises the jobs to
    their next size, those furthest below their share first. Throughput and present nodes do not matter."""
    if how not in SHARES:
        raise PlanError(f"unknown split {how!r}: use {', '.join(SHARES)}")
    shares = {job.name: SHARES[how](job) for job in scenario.jobs}
    total = sum(shares.values())
    wanted = {name: scenario.nodes * share / total if total else 0.0 for name, share in shares.items()}
    out = {job.name: job.options(int(wanted[job.name] + 1e-9))[-1] for job in scenario.jobs}
    left = scenario.nodes - sum(out.values())
    for job in sorted(scenario.jobs, key=lambda job: (out[job.name] - wanted[job.name], job.name)):
        higher = [size for size in job.options(out[job.name] + left) if size > out[job.name]]
        if higher and (wanted[job.name] > out[job.name]):
            left -= higher[0] - out[job.name]
            out[job.name] = higher[0]
    return out


def _placement_of(policy: Policy) -> Placement:
    if policy.placement == "fixed":
        return WholeJobs()
    if policy.placement == "own":
        return Own()
    return Redistributing(policy.placement, policy.ahead)
