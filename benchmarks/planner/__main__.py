"""Plans, look-ahead tables and simulations at full size, beside the straightforward way of computing the same.

Prints what was asked and what was measured, and exits with 1 if anything missed its mark or a result was wrong. A
figure is the median of several runs, after one run to warm up.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.marks import print_figure
from unicron_planner.ahead.lookahead import Lookahead
from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.simulate import POLICIES, simulate
from unicron_planner.simulate.generate import rsc1, unicron
from unicron_planner.simulate.trace import DAY
from unicron_planner.solver.solve import solve

SHAPES = ("concave", "linear", "steps", "noisy")


def cluster(jobs: int, nodes: int, shape: str = "concave", seed: int = 0, running: bool = True) -> Scenario:
    """A full cluster whose jobs can run at any size (`steps`: powers of two), with throughputs of one shape."""
    draw = random.Random(f"{jobs}/{nodes}/{shape}/{seed}")
    made = []
    for index in range(jobs):
        best, bend, weight = draw.uniform(0.5, 2), draw.uniform(50, 3000), round(draw.uniform(0.5, 2), 1)
        sizes = range(1, nodes + 1) if shape != "steps" else [2**i for i in range(nodes.bit_length()) if 2**i <= nodes]
        if shape == "linear":
            flops = {x: 1e15 * x for x in sizes}
        elif shape == "noisy":
            flops = {x: 1e15 * best * x**0.9 * draw.uniform(0.8, 1.0) for x in sizes}
        else:
            flops = {x: 1e15 * best * x / (1 + x / bend) for x in sizes}
        made.append(
            Job(
                name=f"job{index:03}",
                weight=1.0 if shape == "linear" else weight,
                min_nodes=draw.randint(1, 8),
                nodes=nodes // jobs,
                flops=flops,
            )
        )
    scenario = Scenario(nodes=nodes, jobs=tuple(made), mtbf_node_hours=30000.0)
    if not running:
        return scenario
    plan = solve(scenario)
    return replace(scenario, jobs=tuple(replace(job, nodes=plan.assignment[job.name]) for job in scenario.jobs))


def lost(scenario: Scenario) -> Scenario:
    """The same cluster after a node of its largest job has failed."""
    hit = max(scenario.jobs, key=lambda job: job.nodes)
    return replace(scenario.with_job(replace(hit, lost_worker=True)), nodes=scenario.nodes - 1)


def triple_loop(scenario: Scenario) -> float:
    """The recurrence as it is written down, in plain Python: O(m n^2). Returns the objective."""
    n = scenario.nodes
    before = [0.0] * (n + 1)
    for job in scenario.jobs:
        gains = [scenario.g(job, k) for k in range(n + 1)]
        after = [-math.inf] * (n + 1)
        for j in range(n + 1):
            best = -math.inf
            for k in range(j + 1):
                value = before[j - k] + gains[k]
                if value > best:
                    best = value
            after[j] = best
        before = after
    return before[n]


def timed(work: Callable[[], object], runs: int) -> float:
    """Median seconds of `runs` runs."""
    work()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Report:
    """Lines of figures with their marks."""

    def __init__(self) -> None:
        self.missed = 0

    def line(self, what: str, value: float, unit: str, most: float | None = None, least: float | None = None) -> None:
        """One figure (:func:`print_figure`)."""
        self.missed += not print_figure(what, value, unit, most, least)


def measure_plans(report: Report, full: bool) -> None:
    """Plan, look-ahead table, look-up and memory at 64 jobs x 2,048 nodes, and the triple loop in the same run."""
    for shape in SHAPES:
        scenario = cluster(64, 2048, shape)
        after = lost(scenario)
        report.line(f"plan, 64 jobs x 2,048 nodes, {shape}", 1e3 * timed(lambda s=after: solve(s), 7), "ms", 100)
        table = [Lookahead(scenario)]
        seconds = timed(lambda s=scenario, t=table: t.__setitem__(0, Lookahead(s)), 3)
        report.line(f"look-ahead table ({len(table[0].entries)} events), {shape}", seconds, "s", 2)
    hard = cluster(64, 2048, "linear", running=False)
    hard = replace(hard, jobs=tuple(replace(job, nodes=16) for job in hard.jobs))
    report.line("hardest plan known: linear, half of the nodes free", 1e3 * timed(lambda: solve(hard), 7), "ms")
    events = list(table[0].entries)
    start = time.perf_counter()
    for _ in range(100):
        for event in events:
            table[0].get(event)
    report.line("look-up of one plan", 1e6 * (time.perf_counter() - start) / 100 / len(events), "us", 50)
    report.line("largest memory of this process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "GiB", 1)
    jobs, nodes = (64, 2048) if full else (8, 2048)
    scenario = lost(cluster(jobs, nodes))
    ours = timed(lambda: solve(scenario), 7)
    start = time.perf_counter()
    objective = triple_loop(scenario)
    loop = time.perf_counter() - start
    report.line(f"triple loop in Python, {jobs} jobs x {nodes} nodes", loop, "s")
    report.line("plan of the same", 1e3 * ours, "ms")
    report.line("ratio, same run", loop / ours, "x", least=100)
    difference = abs(objective - solve(scenario).objective) / abs(objective)
    report.line("relative difference of the two objectives", difference, "", 1e-9)


def measure_growth() -> None:
    """How time grows with jobs and with nodes."""
    print("\ngrowth (concave), ms per plan / ms per look-ahead table")
    for jobs, nodes in ((8, 2048), (16, 2048), (32, 2048), (64, 2048), (64, 256), (64, 512), (64, 1024), (64, 4096)):
        scenario = cluster(jobs, nodes)
        after = lost(scenario)
        plan = timed(lambda s=after: solve(s), 3)
        table = timed(lambda s=scenario: Lookahead(s, pairs=False), 1)
        print(f"  {jobs:>3} jobs x {nodes:>5} nodes {1e3 * plan:>10.1f} {1e3 * table:>10.1f}", flush=True)


def measure_simulator(report: Report) -> None:
    """A year of 128 nodes and 8 jobs under every policy."""
    scenario = cluster(8, 128)
    trace = rsc1(128, 365 * DAY, seed=1)
    print(f"\nsimulated year: 128 nodes, 8 jobs, {len(trace.events)} events")
    for name, policy in POLICIES.items():
        start = time.perf_counter()
        result = simulate(scenario, trace, policy)
        report.line(f"  {name} (efficiency {result.efficiency:.4f})", time.perf_counter() - start, "s", 10)


def measure_ahead() -> None:
    """Where weighing the next failure pays: sizes with a cliff, long transitions, frequent failures."""
    print("\nplanning for the next failure too (unicron-ahead) beside the current state alone (unicron), efficiency")
    nodes = 26
    for label, hours, seconds, rate in (
        ("failures every 2 h, 20 min transitions", 60.0, 1200.0, 0.6),
        ("failures every 2 h, 1 min transitions", 60.0, 60.0, 0.6),
        ("failures every 2 weeks, 20 min transitions", 9000.0, 1200.0, 0.005),
    ):
        jobs = tuple(Job(name=f"job{i}", flops={4: 4e15, 8: 7.8e15, 9: 7.85e15, 10: 7.9e15}) for i in range(3))
        scenario = Scenario(nodes=nodes, jobs=jobs, mtbf_node_hours=hours, transition_seconds=seconds)
        pairs = []
        for seed in range(5):
            trace = unicron(nodes, 30 * DAY, seed, per_node_day=rate, repair=3.0)
            pairs.append(
                [simulate(scenario, trace, POLICIES[name]).efficiency for name in ("unicron-ahead", "unicron")]
            )
        ahead, plain = (statistics.mean(values) for values in zip(*pairs, strict=True))
        print(f"  {label:<52}{ahead:.4f} beside {plain:.4f} ({100 * (ahead / plain - 1):+.2f} %)", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; 0 if every mark was reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="triple loop on 8 jobs instead of 64, no growth table")
    options = parser.parse_args(arguments)
    report = Report()
    measure_plans(report, full=not options.quick)
    if not options.quick:
        measure_growth()
    measure_simulator(report)
    measure_ahead()
    print(f"\n{report.missed} missed" if report.missed else "\nall marks reached")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
