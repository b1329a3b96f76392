"""Replays a trace under a policy: event-driven, deterministic, with the planner that the controller uses.

Every job is in one phase, and the WAF of the cluster is split by phase at every moment: run (counts), detect (a failure
that nobody has noticed yet), transition, recompute (work done before), idle. What is not at work because nodes are
gone, badly split or slower than they could be is `sub_healthy`. The parts add up to the ideal: the WAF of the best
split of all nodes without failures.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from unicron.planner.ahead.expected import solve_expected
from unicron.planner.ahead.next_events import Event
from unicron.planner.problem.model import Job, PlanError, Scenario
from unicron.planner.simulate.causes import REPORTED
from unicron.planner.simulate.placement import split
from unicron.planner.simulate.policies import ITERATION, Policy, detection_seconds
from unicron.planner.simulate.trace import Trace, TraceEvent
from unicron.planner.solver.solve import solve

RUN, DETECT, TRANSITION, RECOMPUTE, IDLE = "run", "detect", "transition", "recompute", "idle"
LOST = {DETECT: "detection", TRANSITION: "transition", RECOMPUTE: "recompute"}


@dataclass
class Task:
    """A job in the simulator. size: nodes it runs on (as planned); nodes: those it holds, dead ones included until
    they are noticed. level: F while it runs. worst: severity of what is not noticed. ready: when the transition under
    way is over, failures or not. worked: seconds of progress, for checkpoints. debt: seconds to be computed again."""

    job: Job
    size: int = 0
    nodes: set[int] = field(default_factory=set)
    target: int = 0
    phase: str = IDLE
    level: float = 0.0
    epoch: int = 0
    until: float = 0.0
    worst: int = 4
    ready: float = 0.0
    worked: float = 0.0
    debt: float = 0.0


@dataclass(frozen=True)
class Result:
    """What one policy made of a trace. Shares are of the ideal and add up to 1 with `efficiency`. series: (seconds,
    WAF), steps; failures: seconds of the failures that hit a job; plans: how often nodes were redistributed."""

    policy: str
    mean_waf: float
    ideal_waf: float
    efficiency: float
    lost: dict[str, float]
    series: tuple[tuple[float, float], ...]
    failures: tuple[float, ...]
    plans: int

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `unicronctl simulate`."""
        return {
            "policy": self.policy,
            "mean_waf": self.mean_waf,
            "ideal_waf": self.ideal_waf,
            "efficiency": self.efficiency,
            "lost": self.lost,
            "failures": len(self.failures),
            "plans": self.plans,
        }


def node_slots(trace: Trace, nodes: int) -> tuple[list[tuple[float, TraceEvent, int]], set[int], int]:
    """(events with node numbers, nodes that are there at the start, nodes ever there).

    Names get numbers by order of appearance. A node whose first event is a join is absent until then. When all numbers
    are taken, a new name takes the place of a node that is gone; where none is, the cluster grows. Who comes back after
    its place was taken is a new name."""
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
        self.tasks = [Task(job) for job in fresh]
        self.owner: dict[int, Task] = {}
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.now, self.plans = 0.0, 0
        self.work = 0.0
        self.lost = dict.fromkeys((*LOST.values(), "sub_healthy"), 0.0)
        self.series: list[tuple[float, float]] = []
        self.failures: list[float] = []
        self.memory: dict[tuple[int, tuple[int, ...], frozenset[str]], dict[str, int]] = {}

    def run(self) -> Result:
        """Replays the whole trace."""
        self._start()
        for when, event, number in self.events:
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
                level = min(sum(task.level for task in self.tasks if task.phase == phase), room)
                room -= level
                if phase == RUN:
                    self.work += level * span
                    running = level
                else:
                    self.lost[LOST[phase]] += level * span
            if not self.series or self.series[-1][1] != running:
                self.series.append((self.now, running))
            for task in self.tasks:
                if task.phase == RUN:
                    task.worked += span
        self.now = when

    def _enter_phase(self, task: Task, phase: str, seconds: float, then: Callable[[Task], None] | None) -> None:
        """The task is in `phase` for `seconds`, then `then` happens, unless something else comes in between. What comes
        during a transition ends it no sooner; a planned change during a recompute leaves the rest of it due."""
        if task.phase == RECOMPUTE and phase in (TRANSITION, IDLE) and self.policy.graceful:
            task.debt = task.until - self.now
        if phase == TRANSITION:
            seconds = max(seconds, task.ready - self.now)
            task.ready = self.now + seconds
        elif phase == IDLE:
            task.ready = self.now
        task.phase, task.until = phase, self.now + seconds
        task.epoch += 1
        if then is not None:
            epoch = task.epoch
            self._push(task.until, lambda: then(task) if task.epoch == epoch else None)

    # ---------------------------------------------------------------- what happens

    def _start(self) -> None:
        """The first placement costs nothing: the replay starts with all jobs running."""
        # Baselines that cannot redistribute get the planner's split of the whole cluster (to their advantage).
        rigid = self.policy.placement in ("fixed", "own")
        plan = solve(self.fresh).assignment if rigid else self._plan(self.policy.placement, set())
        for task in self.tasks:
            task.target = plan[task.job.name]
            task.size = self._largest(task, min(task.target, len(self.free)))
            if self.policy.placement == "fixed" and task.size < task.target:
                task.size = 0
            self._adjust_nodes(task, task.size)
            self._settle_task(task)

    def _trace_event(self, event: TraceEvent, number: int) -> None:
        if event.event == "join":
            if number not in self.up:
                self.up.add(number)
                self.free.add(number)
                holder = self.owner.get(number)
                if holder is not None:  # it came back before anyone noticed that it was gone: its state is lost
                    self._drop(holder, number)
                self._joined()
            return
        if number not in self.up or event.failure.name in REPORTED:
            return
        task = self.owner.get(number)
        if event.failure.severity == 1:
            self.up.discard(number)
            self.free.discard(number)
        if task is None or task.phase == IDLE:
            if task is not None and event.failure.severity == 1:
                self._drop(task, number)
            return
        self.failures.append(self.now)
        self._hit(task, event)

    def _hit(self, task: Task, event: TraceEvent) -> None:
        if task.phase != DETECT:
            self._owe(task)
            self._enter_phase(task, DETECT, detection_seconds(self.policy, event.failure), self._noticed)
        task.worst = min(task.worst, event.failure.severity)

    def _owe(self, task: Task) -> None:
        """What the failure makes the job compute again, in seconds of its own work."""
        if self.policy.checkpoint is not None:
            since = task.worked % self.policy.checkpoint
            task.debt += since
            task.worked -= since
        else:
            task.debt = max(task.debt, self.policy.redo * ITERATION)

    def _noticed(self, task: Task) -> None:
        severity, task.worst = task.worst, 4
        if severity > 1:
            self._recover(task, severity)
        elif self.policy.placement == "fixed":
            self._replace_or_wait(task)
        elif self.policy.placement == "own":
            self._shrink(task)
        else:
            self._redistribute(event=("lost", task.job.name))

    def _recover(self, task: Task, severity: int) -> None:
        """Gives the job its nodes again, after the transition of that severity."""
        seconds = self.policy.transition[severity]
        if seconds is None:
            seconds = self._planned_seconds(task, task.size, lost=True)
        task.level = self._f(task, task.size)
        self._enter_phase(task, TRANSITION, seconds, self._recompute)

    def _recompute(self, task: Task) -> None:
        """All that is due; until then a failure makes all of it due again."""
        if task.debt > 0:
            self._enter_phase(task, RECOMPUTE, task.debt, self._recomputed)
        else:
            self._settle_task(task)

    def _recomputed(self, task: Task) -> None:
        task.debt = 0.0
        self._settle_task(task)

    def _settle_task(self, task: Task) -> None:
        task.level = self._f(task, task.size)
        self._enter_phase(task, RUN if task.size else IDLE, 0.0, None)

    def _joined(self) -> None:
        if self.policy.placement == "fixed":
            for task in self.tasks:
                if task.phase == IDLE and task.target:
                    self._replace_or_wait(task)
        elif self.policy.placement == "own":
            self._grow()
        else:
            self._redistribute(event=("join",))

    # ---------------------------------------------------------------- placements

    def _f(self, task: Task, size: int) -> float:
        return self.policy.healthy * task.job.f(size)

    def _planned_seconds(self, task: Task, size: int, lost: bool) -> float:
        job = replace(task.job, nodes=task.size, lost_worker=lost)
        return self.scenario.d_transition(job, size)

    def _drop(self, task: Task, number: int) -> None:
        task.nodes.discard(number)
        self.owner.pop(number, None)

    def _adjust_nodes(self, task: Task, size: int) -> None:
        """Gives back or takes nodes until the task holds `size`; dead nodes go first."""
        for number in [number for number in task.nodes if number not in self.up]:
            self._drop(task, number)
        for number in sorted(task.nodes, reverse=True)[: max(len(task.nodes) - size, 0)]:
            self._drop(task, number)
            self.free.add(number)
        for number in sorted(self.free)[: max(size - len(task.nodes), 0)]:
            self.free.discard(number)
            task.nodes.add(number)
            self.owner[number] = task

    def _dead(self, task: Task) -> bool:
        return len(task.nodes) < task.size or any(number not in self.up for number in task.nodes)

    def _replace_or_wait(self, task: Task) -> None:
        """fixed: all its nodes again, with spares for the lost ones, or none until they are repaired."""
        self._adjust_nodes(task, min(task.target, len([n for n in task.nodes if n in self.up]) + len(self.free)))
        if len(task.nodes) < task.target:
            task.level = 0.0
            self._enter_phase(task, IDLE, 0.0, None)
            return
        task.size = task.target
        self._recover(task, 1)

    def _shrink(self, task: Task) -> None:
        """own: goes on with what is left, and spares, at the largest size that it can run."""
        alive = len([number for number in task.nodes if number in self.up])
        size = self._largest(task, min(alive + len(self.free), task.target))
        self._resize(task, size, 1, lost=True)
        self._grow()

    def _grow(self) -> None:
        """own: free nodes go to the job that misses most."""
        for task in sorted(self.tasks, key=lambda task: (task.size - task.target, task.job.name)):
            if task.phase == DETECT or not self.free:
                continue
            size = self._largest(task, min(len(task.nodes) + len(self.free), task.target))
            if size > task.size:
                if not self.policy.graceful and task.phase == RUN:
                    self._owe(task)
                self._resize(task, size, 1, lost=False)

    def _largest(self, task: Task, room: int) -> int:
        return task.job.options(room)[-1]

    def _resize(self, task: Task, size: int, severity: int, lost: bool) -> None:
        seconds = self.policy.transition[severity]
        if seconds is None:
            seconds = self._planned_seconds(task, size, lost)
        self._adjust_nodes(task, size)
        task.size, task.level = size, self._f(task, size)
        if size:
            self._enter_phase(task, TRANSITION, seconds, self._recompute)
        else:
            self._enter_phase(task, IDLE, 0.0, None)

    def _redistribute(self, event: Event) -> None:
        """The planner, or a naive split, decides for the whole cluster. Failures that are still unnoticed come to
        light."""
        self.plans += 1
        lost = {task.job.name for task in self.tasks if self._dead(task)}
        if event[0] == "lost":
            lost.add(event[1])
        plan = self._plan(self.policy.placement, lost)
        changed = [task for task in self.tasks if plan[task.job.name] != task.size or task.job.name in lost]
        seconds = {
            task.job.name: self._planned_seconds(task, plan[task.job.name], task.job.name in lost) for task in changed
        }
        shrinking_first = sorted(changed, key=lambda task: plan[task.job.name] - len(task.nodes))
        for task in shrinking_first:
            size = plan[task.job.name]
            self._adjust_nodes(task, size)
            if task.job.name in lost:
                task.worst = 4
            task.size, task.level = size, self._f(task, size)
            if size == 0:
                self._enter_phase(task, IDLE, 0.0, None)
            else:
                self._enter_phase(task, TRANSITION, seconds[task.job.name], self._recompute)

    def _plan(self, placement: str, lost: set[str]) -> dict[str, int]:
        jobs = tuple(replace(task.job, nodes=task.size, lost_worker=task.job.name in lost) for task in self.tasks)
        scenario = replace(self.scenario, nodes=len(self.up), jobs=jobs)
        if placement != "optimal":
            return split(scenario, placement)
        key = (len(self.up), tuple(task.size for task in self.tasks), frozenset(lost))
        if key not in self.memory:
            if self.policy.ahead:
                self.memory[key] = solve_expected(scenario).assignment
            else:
                self.memory[key] = solve(scenario).assignment
        return self.memory[key]
