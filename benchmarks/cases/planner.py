"""Plans, look-ahead tables and simulations at full size."""

from __future__ import annotations

import random
import resource
import time
from dataclasses import replace

import msgspec

from benchmarks.report import Report, median_seconds
from unicron_planner.ahead.lookahead import Lookahead
from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.simulate import POLICIES, simulate
from unicron_planner.simulate.generate import rsc1
from unicron_planner.simulate.trace import DAY
from unicron_planner.solver.solve import solve


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    jobs: int = 64
    nodes: int = 2048
    days: float = 365.0
    """Simulated time of 128 nodes and 8 jobs, under each policy."""
    runs: int = 7
    """Runs of each figure; the median counts."""


SMALLEST = Sizes(8, 128, 10.0, 1)
SHAPES = ("concave", "linear", "steps", "noisy")


def measure(sizes: Sizes, report: Report) -> None:
    """Measure plans, then the simulator."""
    plans(sizes, report)
    scenario, trace = cluster(8, 128), rsc1(128, sizes.days * DAY, seed=1)
    report.text(f"{sizes.days:g} simulated days: 128 nodes, 8 jobs, {len(trace.events)} events")
    for name, policy in POLICIES.items():
        began = time.perf_counter()
        result = simulate(scenario, trace, policy)
        report.figure(f"  {name} (efficiency {result.efficiency:.4f})", time.perf_counter() - began, "s", 10)


def cluster(jobs: int, nodes: int, shape: str = "concave", running: bool = True) -> Scenario:
    """Return a full cluster of jobs with throughputs of one shape, for any size (`steps`: powers of two)."""
    draw = random.Random(f"{jobs}/{nodes}/{shape}/0")
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
        weight = 1.0 if shape == "linear" else weight
        least = draw.randint(1, 8)
        made.append(Job(f"job{index:03}", flops, weight=weight, min_nodes=least, nodes=nodes // jobs))
    scenario = Scenario(nodes=nodes, jobs=tuple(made), mtbf_node_hours=30000.0)
    if not running:
        return scenario
    plan = solve(scenario)
    return replace(scenario, jobs=tuple(replace(job, nodes=plan.assignment[job.name]) for job in scenario.jobs))


def lose_node(scenario: Scenario) -> Scenario:
    """Return the same cluster after a node of its largest job has failed."""
    hit = max(scenario.jobs, key=lambda job: job.nodes)
    return replace(scenario.with_job(replace(hit, lost_worker=True)), nodes=scenario.nodes - 1)


def plans(sizes: Sizes, report: Report) -> None:
    """Measure a plan, a look-ahead table, a look-up and memory."""
    jobs, nodes, runs, clock = sizes.jobs, sizes.nodes, sizes.runs, time.perf_counter
    for shape in SHAPES:
        scenario = cluster(jobs, nodes, shape)
        after = lose_node(scenario)
        seconds = median_seconds(lambda after=after: solve(after), runs, clock)
        report.figure(f"plan, {jobs} jobs x {nodes:,} nodes, {shape}", 1e3 * seconds, "ms", 100)
        table = Lookahead(scenario)
        seconds = median_seconds(lambda scenario=scenario: Lookahead(scenario), min(3, runs), clock)
        report.figure(f"look-ahead table ({len(table.entries)} events), {shape}", seconds, "s", 2)
    hard = cluster(jobs, nodes, "linear", running=False)
    hard = replace(hard, jobs=tuple(replace(job, nodes=nodes // jobs // 2) for job in hard.jobs))
    seconds = median_seconds(lambda: solve(hard), runs, clock)
    report.figure("hardest plan known: linear, half of the nodes free", 1e3 * seconds, "ms")
    events = list(table.entries)
    seconds = median_seconds(lambda: [table.get(event) for event in events], 100, clock)
    report.figure("look-up of one plan", 1e6 * seconds / len(events), "us", 50)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    report.figure("largest memory of this process", memory, "GiB", 1)
