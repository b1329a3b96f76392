"""Generators of failure traces, deterministic by seed. Each names its source; what is our own choice is marked
[choice]."""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from unicron_planner.problem.objective import PlanError
from unicron_planner.simulate.causes import CAUSES
from unicron_planner.simulate.trace import DAY, Trace, TraceEvent, make

# Unicron (docs/design/paper.md, section 1): share of tasks by outcome in percent, without those that finished.
UNICRON_MIX = {
    "nccl_timeout": 10.1,
    "link_flapping": 3.9,
    "task_hang": 3.1,
    "cuda_error": 1.6,
    "nvlink_error": 4.5,
    "gpu_driver_error": 0.6,
    "connection_refused": 2.1,
    "connection_reset": 1.0,
    "other_network_error": 4.0,
    "illegal_memory_access": 2.1,
    "ecc_error": 5.0,
    "invalid_dma_mapping": 2.1,
    "others": 3.3,
}
# Llama 3 (arXiv 2407.21783, table 5): 419 unexpected interruptions in 54 days on 16,384 GPUs, as causes of our table.
LLAMA3_COUNTS = {
    "gpu_lost": 148 + 17,
    "ecc_error": 72 + 19,
    "other_software_error": 54 + 2,
    "other_network_error": 35,
    "node_failed": 32 + 2 + 3 + 2,
    "nic_error": 7,
    "nccl_timeout": 7,
    "numerical_error": 6,
    "host_hardware_error": 6 + 2 + 2,
    "local_disk_error": 3,
}
LLAMA3_PER_NODE_DAY = 419 / 54 / (16384 / 8)
# Meta RSC-1 (arXiv 2410.21680): 6.50 failures per 1,000 node-days.
RSC1_PER_NODE_DAY = 6.50 / 1000
DAYS = 365.0  # of a generated trace, by default
FIXED_DAYS = {"trace-a": 56.0, "trace-b": 7.0}  # their failures are counted
REPAIR_HOURS = 24.0  # median; "hours to days" (Unicron), so log-normal within 1 h..7 d [choice]


def repair_seconds(draw: random.Random, median_hours: float = REPAIR_HOURS) -> float:
    """A drained node's seconds of absence: log-normal with that median and sigma 1, cut to 1 h..7 d [choice]."""
    return 3600.0 * min(max(median_hours * draw.lognormvariate(0.0, 1.0), 1.0), 168.0)


def _events(
    draw: random.Random, times: list[float], nodes: int, pick: Callable[[], str], repair: float = REPAIR_HOURS
) -> list[TraceEvent]:
    """Failures at `times` on nodes that are up; each lost node joins again after its repair."""
    up = list(range(nodes))
    away: list[tuple[float, int]] = []
    out = []
    for when in sorted(times):
        while away and away[0][0] <= when:
            insort(up, heappop(away)[1])
        if not up:
            continue
        node, cause = draw.choice(up), CAUSES[pick()]
        out.append(TraceEvent(when, "fail", f"n{node}", cause))
        if cause.severity == 1:
            back = when + repair_seconds(draw, repair)
            up.remove(node)
            heappush(away, (back, node))
            out.append(TraceEvent(back, "join", f"n{node}"))
    return out


def poisson(
    nodes: int,
    seconds: float,
    per_node_day: float,
    mix: Mapping[str, float],
    seed: int,
    name: str,
    repair: float = REPAIR_HOURS,
) -> Trace:
    """Failures at a constant rate per node and day, causes drawn by weight."""
    if nodes < 1 or seconds <= 0:
        raise PlanError("a trace needs at least one node and a time above 0")
    draw = random.Random(f"{name}/{seed}")
    rate, when, times = nodes * per_node_day / DAY, 0.0, []
    while (when := when + draw.expovariate(rate)) < seconds:
        times.append(when)
    names, weights = list(mix), list(mix.values())
    return make(_events(draw, times, nodes, lambda: draw.choices(names, weights)[0], repair), seconds, name)


def llama3(nodes: int, seconds: float, seed: int = 0) -> Trace:
    """Rate and causes of the Llama 3 run."""
    return poisson(nodes, seconds, LLAMA3_PER_NODE_DAY, LLAMA3_COUNTS, seed, "llama3")


def rsc1(nodes: int, seconds: float, seed: int = 0) -> Trace:
    """Rate of Meta's RSC-1, causes of Unicron's mix (the paper's own causes are not broken down the same way)."""
    return poisson(nodes, seconds, RSC1_PER_NODE_DAY, UNICRON_MIX, seed, "rsc1")


def unicron(
    nodes: int, seconds: float, seed: int = 0, per_node_day: float = 43 / 56 / 16, repair: float = REPAIR_HOURS
) -> Trace:
    """Unicron's mix of causes; by default at the rate of trace-a."""
    return poisson(nodes, seconds, per_node_day, UNICRON_MIX, seed, "unicron", repair)


def trace_of_counts(
    nodes: int, seconds: float, severe: int, other: int, seed: int, name: str, repair: float = REPAIR_HOURS
) -> Trace:
    """Exactly `severe` failures of severity 1 and `other` others, at uniform times, causes by Unicron's mix."""
    draw = random.Random(f"{name}/{seed}")
    kinds = [True] * severe + [False] * other
    draw.shuffle(kinds)
    times = sorted(draw.uniform(0.0, seconds) for _ in kinds)
    names = {flag: [c for c in UNICRON_MIX if (CAUSES[c].severity == 1) == flag] for flag in (True, False)}
    queue = iter(kinds)

    def pick() -> str:
        flag = next(queue)
        return draw.choices(names[flag], [UNICRON_MIX[c] for c in names[flag]])[0]

    return make(_events(draw, times, nodes, pick, repair), seconds, name)


def trace_a(seed: int = 0, nodes: int = 16, repair: float = REPAIR_HOURS) -> Trace:
    """Unicron's trace-a as recalled: 8 weeks, 10 failures of severity 1 and 33 others."""
    return trace_of_counts(nodes, FIXED_DAYS["trace-a"] * DAY, 10, 33, seed, "trace-a", repair)


def trace_b(seed: int = 0, nodes: int = 16, repair: float = REPAIR_HOURS) -> Trace:
    """Unicron's trace-b as recalled: 7 days, 26 failures of severity 1 and 80 others."""
    return trace_of_counts(nodes, FIXED_DAYS["trace-b"] * DAY, 26, 80, seed, "trace-b", repair)


GENERATORS = {
    "trace-a": lambda nodes, days, seed: trace_a(seed, nodes),
    "trace-b": lambda nodes, days, seed: trace_b(seed, nodes),
    "unicron": lambda nodes, days, seed: unicron(nodes, days * DAY, seed),
    "llama3": lambda nodes, days, seed: llama3(nodes, days * DAY, seed),
    "rsc1": lambda nodes, days, seed: rsc1(nodes, days * DAY, seed),
}
