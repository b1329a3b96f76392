"""An upper bound on the work that any plan gets out of a cluster whose future is known.

Sizes change only at events of the trace; between two events no other moment is better. A change costs D_transition at
the throughput of the new size, as for every policy of the simulator. A failure of severity 1 takes its node. Any other
failure costs one job, which the plan chooses, the repair in place or a change, unless a node is idle. The time until a
loss is noticed, and which nodes a job has, are left out; what happens while an earlier failure may not be noticed yet
is charged at the lowest cost. So the bound is above every real plan.

Only the number of nodes at each moment couples the jobs. With a price for it (Lagrange multipliers) each job is a
shortest path over (event, size), and the sum is a bound for any prices; a subgradient method looks for prices that make
it small. So no solver is needed, and a year of 400 nodes takes a minute. The sum of the best splits at each moment,
without any cost of changes, is another bound; the smaller one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.simulate.causes import HARMLESS, Cause
from unicron_planner.simulate.engine import Result, node_slots
from unicron_planner.simulate.policies import ITERATION, POLICIES, Policy, detection_seconds
from unicron_planner.simulate.trace import Trace
from unicron_planner.solver.solve import solve

STEPS = 150  # of the search for prices
CLOSE = 2e-4  # the search ends within this share of what has been reached
TINY = 1e-9  # instead of 0: what cannot be run stays minus infinity
PATIENCE = 8  # steps without a smaller bound before the step size is halved
LONGEST_DETECTION = max(max(policy.detect.values()) for policy in POLICIES.values())  # seconds that a loss may be

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """The time between two events."""

    begin: float
    seconds: float
    nodes: int
    """Nodes that are up."""
    failures: tuple[Cause, ...] = ()
    """Failures of these nodes at its beginning."""
    soon: bool = False
    """A node was lost just before, which may not be noticed yet."""


def spans(scenario: Scenario, trace: Trace) -> tuple[list[Span], int]:
    """(all spans of the replay, the number of nodes that were ever there)."""
    events, up, most = node_slots(trace, scenario.nodes)
    out: list[Span] = []
    begin, soon, lost, present = 0.0, False, -np.inf, set(up)
    failed: list[tuple[int, Cause]] = []

    def until(when: float) -> None:
        nonlocal begin, soon
        if when > begin:
            out.append(Span(begin, when - begin, len(present), tuple(cause for _, cause in failed), soon))
            begin, soon = when, False
            failed.clear()

    for when, event, number in events:
        if when >= trace.until:
            break
        there = number in present
        if event.event == "join":
            if there:
                continue
            until(when)
            soon |= when <= lost + LONGEST_DETECTION
            present.add(number)
        elif there and event.failure.name not in HARMLESS:
            until(when)
            soon |= when <= lost + LONGEST_DETECTION
            if event.failure.severity == 1:
                present.discard(number)
                lost = when
                failed[:] = [each for each in failed if each[0] != number]  # it disturbs no node that is left
            else:
                failed.append((number, event.failure))
    until(trace.until)
    return out, most


class _Jobs:
    """All jobs as arrays, one row each; the columns are sizes. Sizes that cannot be run are minus infinity."""

    def __init__(self, scenario: Scenario, policy: Policy, most: int):
        self.sizes = np.arange(most + 1, dtype=float)
        self.work = np.full((len(scenario.jobs), most + 1), -np.inf)
        self.grow, self.shrink, self.start, self.move, self.least = (np.zeros(self.work.shape) for _ in range(5))
        for row, job in enumerate(scenario.jobs):
            sizes = job.options(most)
            for before, size, after in zip([0, *sizes], sizes, [*sizes[1:], None], strict=False):
                self.work[row, size] = policy.healthy * job.f(size)
                if size and not job.spares:  # with hot spares a change may disturb nobody
                    self._seconds(scenario, row, job, before, size, after)
        self.level = np.where(np.isfinite(self.work), self.work, 0.0)

    def _seconds(self, scenario: Scenario, row: int, job: Job, before: int, size: int, after: int | None) -> None:
        """Sets the seconds of a change to `size` from a smaller size, a larger one, none and the same, and their
        minimum. The cost does not depend on how much smaller or larger."""

        def seconds(nodes: int, lost: bool) -> float:
            return scenario.d_transition(replace(job, nodes=nodes, lost_worker=lost), size)

        self.start[row, size] = seconds(0, False)
        self.grow[row, size] = seconds(before, False) if before else 0.0
        self.shrink[row, size] = seconds(after, True) if after else 0.0
        self.move[row, size] = seconds(size, True)
        ways = [self.start, self.move, *([self.grow] if before else ()), *([self.shrink] if after else ())]
        self.least[row, size] = min(way[row, size] for way in ways)


@dataclass
class _Prices:
    """Prices by span."""

    node: Floats
    """For a node, weighted FLOP/s."""
    hit: Floats
    """For the job that the failure at its beginning hits, FLOP."""
    whole: Floats
    """For work, as a share of it: all jobs together do no more than the best split."""


@dataclass
class _Steps:
    """The best way into one span, by job and size: from which size, and whether the failure then hits the job."""

    source: Floats
    hit: Floats


class _Search:
    """Searches for prices that make the bound small."""

    def __init__(self, scenario: Scenario, policy: Policy, found: list[Span], best: Mapping[int, float]):
        most = max(best)
        self.scenario, self.spans, self.most = scenario, found, most
        self.jobs = _Jobs(scenario, policy, most)
        self.seconds = np.array([span.seconds for span in found])
        self.nodes = np.array([span.nodes for span in found], dtype=float)
        self.best = policy.healthy * np.array([best[span.nodes] for span in found])
        self.failed = np.array([bool(span.failures) for span in found])
        self.failed[0] = False  # nothing was running yet
        self.repair = _repairs(policy, found)

    def least(self, reached: float) -> float:
        """The smallest bound that the search finds, weighted FLOP."""
        slopes = self._slopes()
        none, all_of_it = np.zeros(len(self.spans)), np.ones(len(self.spans))
        starts = [_Prices(slopes, none.copy(), none.copy()), _Prices(none.copy(), none.copy(), all_of_it)]
        prices = min(starts, key=lambda each: self._value(each)[0])
        units = self._units(slopes)
        least, since, pace = np.inf, 0, 1.0
        for _ in range(STEPS):
            value, over = self._value(prices)
            since = 0 if value < least * (1 - 1e-7) else since + 1
            least = min(least, value)
            length = sum(float(np.sum(unit * part**2)) for unit, part in zip(units, over, strict=True))
            if least - reached <= CLOSE * abs(least) or not length:
                break
            if since >= PATIENCE:
                pace, since = pace / 2, 0
            step = pace * (value - reached) / length
            node, hit, whole = (step * unit * part for unit, part in zip(units, over, strict=True))
            prices.node = np.maximum(0.0, prices.node + node)
            prices.hit = np.maximum(0.0, prices.hit + hit)
            prices.whole = np.clip(prices.whole + whole, 0.0, 1.0)
        return float(least)

    def _units(self, slopes: Floats) -> tuple[Floats, Floats, Floats]:
        """The square of each price's scale, so that one step length suits all."""
        best = float(self.best.max())
        slope = max(float(np.mean(slopes)), 1e-3 * best / max(self.most, 1))
        mean = float(np.mean(self.seconds))
        stake = best / len(self.scenario.jobs) * max(self.scenario.transition_seconds, 1.0)
        return slope**2 * mean / self.seconds, np.full(len(self.spans), stake**2), mean / self.seconds

    def _slopes(self) -> Floats:
        """The gain by the last node, without any change."""
        less = {span.nodes: solve(replace(self.scenario, nodes=max(span.nodes - 1, 0))).waf for span in self.spans}
        lower: Floats = np.array([less[span.nodes] for span in self.spans])
        slopes: Floats = self.best - lower
        return slopes

    def _value(self, prices: _Prices) -> tuple[float, tuple[Floats, Floats, Floats]]:
        """(the bound; by how much the jobs together violate each constraint, in the order of the prices: nodes times
        seconds in each span, failures that have hit no job, FLOP)."""
        rows, steps = np.arange(len(self.scenario.jobs)), [_Steps(np.zeros(0), np.zeros(0))]
        value = self._gain(0, prices)
        for number in range(1, len(self.spans)):
            before, step = self._step(number, prices.hit[number], value)
            value = before + self._gain(number, prices)
            steps.append(step)
        at = value.argmax(axis=1)
        spare = np.where(self.failed, np.maximum(self.nodes - 1.0, 0.0), 0.0)
        given = prices.node * self.nodes + prices.whole * self.best
        total = value[rows, at].sum() + np.dot(given, self.seconds) + np.dot(prices.hit, spare)
        over, unhit, more = -self.nodes, -spare, -self.best
        for number in range(len(self.spans) - 1, -1, -1):
            over[number] += at.sum()
            more[number] += self.jobs.level[rows, at].sum()
            if self.failed[number]:
                unhit[number] += at.sum() - steps[number].hit[rows, at].sum()
            if number:
                at = steps[number].source[rows, at].astype(int)
        return float(total), (over * self.seconds, unhit, more * self.seconds)

    def _gain(self, number: int, prices: _Prices) -> Floats:
        """The gain in one span, by job and size: work less the price of the nodes. An idle node may fail, too."""
        span, sizes = self.spans[number], self.jobs.sizes
        gain = self.jobs.work * (span.seconds * max(1.0 - prices.whole[number], TINY))
        gain = gain - (prices.node[number] * span.seconds + prices.hit[number]) * sizes
        return np.where(sizes <= span.nodes, gain, -np.inf)

    def _step(self, number: int, reward: float, value: Floats) -> tuple[Floats, _Steps]:
        """Takes the values of one span into the next."""
        jobs, seconds = self.jobs, self.spans[number].seconds
        grow, shrink, start, move = jobs.grow, jobs.shrink, jobs.start, jobs.move
        if self.spans[number].soon:  # a policy that has not noticed the loss yet pays one change instead of two
            grow = shrink = start = move = jobs.least
        level, index = jobs.level, np.broadcast_to(jobs.sizes, value.shape)
        runs = index > 0
        smaller, smaller_at = _best_below(np.where(runs, value, -np.inf))
        larger, larger_at = _best_below(value[:, ::-1])
        larger, larger_at = larger[:, ::-1], self.most - larger_at[:, ::-1]
        paid = runs * reward
        ways = [
            (value, index, False),
            (smaller - level * np.minimum(grow, seconds) + paid, smaller_at, True),
            (larger - level * np.minimum(shrink, seconds) + paid, larger_at, True),
            (np.where(runs, value[:, :1], -np.inf) - level * np.minimum(start, seconds) + paid, 0 * index, True),
        ]
        if self.failed[number]:
            repair = np.minimum(move, min(self.repair[number], seconds))
            ways.append((np.where(runs, value - level * repair, -np.inf) + paid, index, True))
        values = np.stack([way[0] for way in ways])
        chosen = values.argmax(axis=0)[None]
        source = np.take_along_axis(np.stack([way[1] for way in ways]), chosen, axis=0)[0]
        hits = np.array([way[2] for way in ways])[chosen[0]] & runs
        return values.max(axis=0), _Steps(source, hits.astype(float))


def _best_below(value: Floats) -> tuple[Floats, Floats]:
    """For each column the largest value in the columns before it, and its column."""
    most = np.maximum.accumulate(value, axis=1)
    columns = np.arange(value.shape[1], dtype=float)
    where = np.maximum.accumulate(np.where(value >= most, columns, 0.0), axis=1)
    none = np.full((value.shape[0], 1), -np.inf)
    return np.hstack([none, most[:, :-1]]), np.hstack([np.zeros_like(none), where[:, :-1]])


def _repairs(policy: Policy, found: list[Span]) -> Floats:
    """For each span, the least seconds that the repair of its failures in place costs a job; infinite if only a change
    repairs them. Failures at one moment, or before an earlier one is noticed, are repaired together."""
    out, known = [], list[float]()  # when failures are noticed
    for span in found:
        noticed = [span.begin + detection_seconds(policy, cause) for cause in span.failures]
        known = [*(when for when in known if when > span.begin), *noticed]
        transitions = [policy.transition[cause.severity] for cause in span.failures]
        least = min((seconds for seconds in transitions if seconds is not None), default=np.inf)
        out.append(min(known, default=span.begin) - span.begin + policy.redo * ITERATION + least)
    return np.array(out)


def bound(scenario: Scenario, trace: Trace, policy: Policy, reached: float) -> Result:
    """The bound as a Result, in `mean_waf`. reached: the mean weighted FLOP/s of some policy; the search ends near it.
    `lost`: the share lost to missing nodes (sub_healthy) and, at least, to changes. Raises PlanError."""
    fresh = replace(scenario, jobs=tuple(replace(job, nodes=0, lost_worker=False) for job in scenario.jobs))
    found, most = spans(scenario, trace)
    best = {nodes: solve(replace(fresh, nodes=nodes)).waf for nodes in {span.nodes for span in found} | {most}}
    unchanged = policy.healthy * sum(best[span.nodes] * span.seconds for span in found)
    search = _Search(fresh, policy, found, best)
    least = min(unchanged, search.least(min(reached * trace.until, unchanged)))
    ideal = best[most] * trace.until
    return Result(
        policy.name,
        least / trace.until,
        best[most],
        least / ideal,
        {
            "detection": 0.0,
            "transition": (unchanged - least) / ideal,
            "recompute": 0.0,
            "sub_healthy": 1.0 - unchanged / ideal,
        },
        tuple((span.begin, policy.healthy * best[span.nodes]) for span in found),
        tuple(span.begin for span in found if span.failures),
        0,
    )
