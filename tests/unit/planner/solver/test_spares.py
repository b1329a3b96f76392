"""The worth of hot spares, and that the plan weighs them against what their nodes would bring elsewhere."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.problem.scenario import from_dict
from unicron_planner.solver.solve import solve
from unicron_planner.solver.spares import worth

MTBF, WAIT = 1000.0, 3600.0


def linear(nodes: int) -> dict[int, float]:
    return {count: 1e15 * count for count in range(1, nodes + 1)}


def mean_flops(flops: dict[int, float], members: int, spares: int, mean: float) -> float:
    """T on average, by the sum itself: n places are empty with Poisson's chance, the last one stands for all more."""
    chances = [math.exp(-mean) * mean**n / math.factorial(n) for n in range(members)]
    chances.append(1.0 - sum(chances))
    return sum(chance * flops.get(members - max(0, n - spares), 0.0) for n, chance in enumerate(chances))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(0, 5), st.floats(0.0, 1e6))
def test_a_spare_is_worth_what_the_sum_says(members, spares, wait):
    flops = linear(members)
    found = worth(flops, members, spares, 1, MTBF, wait)
    mean = members * wait / (3600.0 * MTBF)
    bare = mean_flops(flops, members, 0, mean)
    assert sorted(found) == [members + count for count in range(1, spares + 1)]
    for nodes, saved in found.items():
        exact = mean_flops(flops, members, nodes - members, mean) - bare
        assert saved == pytest.approx(max(0.0, exact), abs=1e-6 * flops[members])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.0, 1e16), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 30), st.floats(0.0, 1e7)
)
def test_more_spares_never_save_less_nor_more_than_there_is_to_lose(rates, spares, least, wait):
    flops = {count: rate for count, rate in enumerate(sorted(rates), 1)}
    members = len(flops)
    found = list(worth(flops, members, spares, min(least, members), MTBF, wait).values())
    assert found == sorted(found) and found[0] >= 0.0
    assert found[-1] <= flops[members] * (1 + 1e-9)


def test_what_loses_nothing_by_a_node_needs_no_spare():
    assert worth(dict.fromkeys(range(1, 9), 1e15), 8, 1, 1, MTBF, WAIT) == {9: pytest.approx(0.0, abs=1.0)}
    assert worth(linear(8), 8, 1, 1, MTBF, 0.0) == {9: 0.0}


def test_a_job_that_cannot_run_on_fewer_nodes_gains_most():
    some, all_ = (worth(linear(8), 8, 1, least, MTBF, WAIT)[9] for least in (1, 8))
    assert all_ == pytest.approx(8 * some, rel=0.02)


def test_in_a_large_job_somebody_is_always_out_and_a_spare_is_worth_a_member():
    found = worth(linear(2000), 2000, 1, 1, MTBF, 6 * 3600.0)  # twelve nodes are out on average
    assert found[2001] == pytest.approx(1e15, rel=0.001)


def plan(other: float, wait: float, members: int = 3, least: int = 1) -> dict[str, int]:
    """A job that asks for a spare, and one whose next node brings `other` FLOP/s; a node fewer than both could use."""
    flops = linear(members)
    first = Job("a", flops, min_nodes=least, nodes=members + 1, spares=worth(flops, members, 1, least, MTBF, wait))
    second = Job("b", {1: 1e15, 2: 1e15 + other}, nodes=1)
    return solve(Scenario(members + 2, (first, second), MTBF, 5.0)).assignment


def test_the_node_goes_where_it_brings_more():
    assert plan(other=1e15, wait=60.0) == {"a": 3, "b": 2}
    assert plan(other=0.0, wait=60.0) == {"a": 4, "b": 1}
    assert plan(other=1e14, wait=6 * 3600.0, members=16, least=16) == {"a": 17, "b": 1}, "standing still costs more"


def test_a_spare_that_comes_or_goes_disturbs_nobody_and_the_reason_says_so():
    flops = linear(3)
    for nodes, other, word in ((4, 1e15, "gives up 1 hot spare"), (3, 0.0, "gets 1 hot spare")):
        first = Job("a", flops, nodes=nodes, spares=worth(flops, 3, 1, 1, MTBF, 60.0))
        scenario = Scenario(5, (first, Job("b", {1: 1e15, 2: 1e15 + other}, nodes=1)), MTBF, 5.0)
        found = solve(scenario)
        assert word in found.reasons["a"] and first.kind(found.assignment["a"]) is None
        assert found.waf == sum(job.f(found.assignment[job.name]) for job in scenario.jobs)


def test_after_a_loss_the_spare_is_what_is_missing(snapshot):
    job = Job("a", linear(3), nodes=4, lost_worker=True, spares=worth(linear(3), 3, 1, 1, MTBF, 60.0))
    found = solve(Scenario(3, (job,), MTBF, 5.0))
    assert found.assignment == {"a": 3}
    assert found.reasons["a"] == snapshot
    with_more = solve(Scenario(4, (job,), MTBF, 5.0))
    assert with_more.assignment == {"a": 4} and "1 of them waits" in with_more.reasons["a"]


def test_a_scenario_with_spares_comes_back_from_its_file():
    scenario = Scenario(5, (Job("a", linear(3), nodes=3, spares={4: 1e14, 5: 1.5e14}),), MTBF, 5.0)
    cluster = {"nodes": 5, "mtbf_node_hours": MTBF, "transition_seconds": 5.0}
    job = {"name": "a", "nodes": 3, "flops": {str(size): rate for size, rate in linear(3).items()}}
    assert from_dict({"cluster": cluster, "job": [{**job, "spares": {"4": 1e14, "5": 1.5e14}}]}) == scenario
