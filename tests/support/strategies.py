"""Random scenarios, and the plan by trying everything, in exact arithmetic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from unicron_planner.problem.objective import Job, Scenario

Pick = Callable[[Sequence[Any]], Any]  # one of a sequence: Hypothesis chooses, or a seed does, which is much faster
RATES = (*(k * 1e14 for k in range(7)), 1.9e15, 3.7e14)  # equal values, so that plans tie
KINDS = ("continue", "restart", "move", "grow")


def _job(pick: Pick, name: str, most: int) -> Job:
    sizes = dict.fromkeys(pick(range(1, most + 1)) for _ in range(pick(range(1, 6))))
    linear = pick((False, True))  # scales linearly: many exact ties
    low = pick(range(5))
    kinds = [pick(KINDS) for _ in range(pick(range(4)))]
    waiting, saved = pick((0, 0, 1, 2)), pick((0.0, 1e13, 2.5e14))
    return Job(
        name=name,
        flops={size: size * 1e15 if linear else pick(RATES) for size in sizes},
        weight=pick((1.0, 0.5, 0.8, 1.1, 2.0, 0.0)),
        min_nodes=low,
        max_nodes=pick((None, low + 1, low + 4)),
        nodes=pick(range(7)),
        lost_worker=pick((False, True)),
        transition_seconds=pick((None, 0.0, 30.0, 1e6)),
        transition={kind: pick((0.0, 7.0, 45.5)) for kind in kinds},
        restart_only=pick((False, True)),
        spares={max(sizes) + count: saved * count for count in range(1, waiting + 1)},
    )


def _scenario(pick: Pick, most_jobs: int, most_nodes: int) -> Scenario:
    names = dict.fromkeys(pick("abcdefgh") for _ in range(pick(range(1, most_jobs + 1))))
    return Scenario(
        nodes=pick(range(most_nodes + 1)),
        jobs=tuple(_job(pick, name, 9) for name in names),
        mtbf_node_hours=pick((1000.0, 1.0, 0.01, 37.5)),  # 0.01 h: G < 0
        transition_seconds=pick((60.0, 0.0, 12.5)),
    )


@st.composite
def jobs(draw, name: str, most: int = 9) -> Job:
    return _job(lambda values: draw(st.sampled_from(values)), name, most)


@st.composite
def scenarios(draw, most_jobs: int = 4, most_nodes: int = 9) -> Scenario:
    return _scenario(lambda values: draw(st.sampled_from(values)), most_jobs, most_nodes)


def seeded(seed: int) -> Scenario:
    """One of as many scenarios as are wanted."""
    return _scenario(random.Random(seed).choice, 4, 9)


def exact(value: float) -> Fraction:
    return Fraction(repr(float(value)))


def f(job: Job, nodes: int) -> Fraction:
    """F(t,x) as in the paper, written again."""
    listed = nodes in job.flops and nodes >= job.min_nodes and (job.max_nodes is None or nodes <= job.max_nodes)
    return exact(job.weight) * exact(job.flops[nodes]) if nodes and listed else Fraction(0)


def sizes_of(job: Job, nodes: int) -> list[int]:
    high = nodes if job.max_nodes is None else min(nodes, job.max_nodes)
    return [0, *(k for k in job.flops if max(job.min_nodes, 1) <= k <= high)]


def g(scenario: Scenario, job: Job, nodes: int) -> Fraction:
    """G(t,x'), written again."""
    running = exact(scenario.mtbf_node_hours) * 3600 / max(scenario.nodes, 1)
    gain = (f(job, nodes) + kept(job, nodes)) * running
    return gain - (f(job, job.nodes) * exact(scenario.d_transition(job, nodes)) if changed(job, nodes) else 0)


def kept(job: Job, nodes: int) -> Fraction:
    """What its hot spares save."""
    return exact(job.weight) * exact(job.spares.get(nodes, 0.0)) if nodes in sizes_of(job, nodes) else Fraction(0)


def changed(job: Job, nodes: int) -> bool:
    """Whether anybody who trains is disturbed: a spare that comes or goes disturbs nobody."""
    first = min(job.spares, default=10**6)
    return job.lost_worker or min(nodes, first - 1) != min(job.nodes, first - 1)


def brute_force(scenario: Scenario, barred: tuple[str, int] | None = None) -> tuple[dict[str, int], Fraction]:
    """Everything tried: the largest G, then fewest jobs disturbed, smallest move, and more for the first name.
    barred: a job and a size that it must not get."""
    ordered = sorted(scenario.jobs, key=lambda job: job.name)
    choices = [
        [
            (k, g(scenario, job, k), -int(changed(job, k)), -abs(k - job.nodes))
            for k in sizes_of(job, scenario.nodes)
            if (job.name, k) != barred
        ]
        for job in ordered
    ]
    best = None
    for picks in itertools.product(*choices):
        sizes, gains, disturbed, moves = zip(*picks, strict=True)
        if sum(sizes) > scenario.nodes:
            continue
        rank = (sum(gains, Fraction(0)), sum(disturbed), sum(moves), sizes)
        if best is None or rank > best:
            best = rank
    return {job.name: size for job, size in zip(ordered, best[3], strict=True)}, best[0]


def scale(scenario: Scenario) -> float:
    """The size of the numbers that objectives are made of, for tolerances."""
    longest = max(
        [scenario.d_running, scenario.transition_seconds, *(job.transition_seconds or 0.0 for job in scenario.jobs)]
    )
    return sum(max([job.weight * rate for rate in job.flops.values()]) for job in scenario.jobs) * longest + 1.0


SHAPES = ("linear", "free", "noisy", "flat", "cliffs")


def shaped(shape: str, count: int, nodes: int, seed: int) -> Scenario:
    """A larger scenario with a job that has lost a worker; every size can be run."""
    draw, made = random.Random(f"{shape}/{seed}"), []
    for i in range(count):
        rate = {
            "linear": lambda k: k,
            "free": lambda k: k,
            "noisy": lambda k: k**0.9 * draw.uniform(0.8, 1),
            "flat": lambda k: draw.choice([3, 4]),
            "cliffs": lambda k: k // (nodes // 8),
        }[shape]
        made.append(
            Job(
                f"j{i:02}",
                {k: 1e15 * rate(k) for k in range(1, nodes + 1)},
                lost_worker=i == 3,
                nodes=nodes // count // (3 if shape == "free" else 1),
                transition_seconds=draw.choice([60.0, 600.0, 6e4]),
                weight=1.0 if shape in ("linear", "free") else draw.choice([0.7, 1.3]),
            )
        )
    return Scenario(nodes=nodes - 1, jobs=tuple(made), mtbf_node_hours=5000.0)
