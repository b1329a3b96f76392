"""Random scenarios, and the plan by trying everything, in exact arithmetic."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

from hypothesis import strategies as st

from planner.model import Job, Scenario

RATES = st.one_of(
    st.integers(0, 6).map(lambda k: k * 1e14),  # equal values, so that plans tie
    st.sampled_from([1.9e15, 3.7e14, 0.0]),
)


@st.composite
def jobs(draw, name: str, most: int = 9):
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=5, unique=True))
    if draw(st.booleans()):
        flops = {size: size * 1e15 for size in sizes}  # scales linearly: many exact ties
    else:
        flops = {size: draw(RATES) for size in sizes}
    low = draw(st.integers(0, 4))
    kinds = draw(
        st.dictionaries(
            st.sampled_from(["continue", "restart", "move", "grow"]), st.sampled_from([0.0, 7.0, 45.5]), max_size=3
        )
    )
    return Job(
        name=name,
        flops=flops,
        weight=draw(st.sampled_from([1.0, 0.5, 0.8, 1.1, 2.0, 0.0])),
        min_nodes=low,
        max_nodes=draw(st.sampled_from([None, low + 1, low + 4])),
        nodes=draw(st.integers(0, 6)),
        lost_worker=draw(st.booleans()),
        transition_seconds=draw(st.sampled_from([None, 0.0, 30.0, 1e6])),
        transition=kinds,
        restart_only=draw(st.booleans()),
    )


@st.composite
def scenarios(draw, most_jobs: int = 4, most_nodes: int = 9):
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=most_jobs, unique=True))
    return Scenario(
        nodes=draw(st.integers(0, most_nodes)),
        jobs=tuple(draw(jobs(name)) for name in names),
        mtbf_node_hours=draw(st.sampled_from([1000.0, 1.0, 0.01, 37.5])),  # 0.01 h: G < 0
        transition_seconds=draw(st.sampled_from([60.0, 0.0, 12.5])),
    )


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
    changed = job.lost_worker or nodes != job.nodes
    return f(job, nodes) * running - (f(job, job.nodes) * exact(scenario.d_transition(job, nodes)) if changed else 0)


def brute_force(scenario: Scenario, barred: tuple[str, int] | None = None) -> tuple[dict[str, int], Fraction]:
    """Everything tried: the largest G, then fewest jobs disturbed, smallest move, and more for the first name.
    barred: a job and a size that it must not get."""
    ordered = sorted(scenario.jobs, key=lambda job: job.name)
    best = None
    for sizes in itertools.product(*(sizes_of(job, scenario.nodes) for job in ordered)):
        pairs = list(zip(ordered, sizes, strict=True))
        if sum(sizes) > scenario.nodes or (barred and any((job.name, k) == barred for job, k in pairs)):
            continue
        rank = (
            sum((g(scenario, job, k) for job, k in pairs), Fraction(0)),
            -sum(job.lost_worker or k != job.nodes for job, k in pairs),
            -sum(abs(k - job.nodes) for job, k in pairs),
            sizes,
        )
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
