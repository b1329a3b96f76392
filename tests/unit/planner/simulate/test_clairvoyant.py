"""The bound of what a plan that knows the future could get: never below what any policy gets, and exact by hand."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.simulate import POLICIES, clairvoyant, simulate
from unicron_planner.simulate.cases import case
from unicron_planner.simulate.causes import CAUSES
from unicron_planner.simulate.clairvoyant import spans
from unicron_planner.simulate.generate import GENERATORS
from unicron_planner.simulate.trace import TraceEvent, make

BOUND = POLICIES["clairvoyant"]
OURS = ("unicron", "unicron-ahead", "equally", "by_weight", "by_size")
LINEAR = {k: 1e15 * k for k in range(1, 9)}
STEPS = {2: 2e15, 4: 4.4e15, 8: 9e15}


def fail(when: float, node: str, cause: str) -> TraceEvent:
    return TraceEvent(when, "fail", node, CAUSES[cause])


def cluster(nodes: int, *jobs: Job, transition: float = 100.0) -> Scenario:
    return Scenario(nodes=nodes, jobs=jobs, mtbf_node_hours=1000.0, transition_seconds=transition)


EVENTS = st.lists(
    st.tuples(st.floats(1, 4e4), st.booleans(), st.integers(0, 5), st.sampled_from(sorted(CAUSES))), max_size=16
)


@settings(max_examples=cases(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS, st.integers(6, 8), st.sampled_from([LINEAR, STEPS]), st.floats(1, 4000))
def test_no_policy_passes_the_bound(rows, nodes, flops, transition):
    trace = make(
        [
            TraceEvent(when, "join", f"n{node}") if join else fail(when, f"n{node}", cause)
            for when, join, node, cause in rows
        ],
        until=5e4,
    )
    scenario = cluster(nodes, Job("a", flops), Job("b", LINEAR, weight=0.7, max_nodes=3), transition=transition)
    bound = simulate(scenario, trace, BOUND)
    for name in OURS:
        assert simulate(scenario, trace, POLICIES[name]).mean_waf <= bound.mean_waf * (1 + 1e-9), name
    assert bound.efficiency <= 1 + 1e-12


AT_ONCE = {
    "two failures are repaired together": [fail(1000, "n0", "connection_reset"), fail(1000, "n0", "nccl_timeout")],
    "one comes before another is noticed": [fail(1000, "n0", "connection_reset"), fail(1000.2, "n0", "link_flapping")],
    "a node is back before anybody has missed it": [
        fail(1000, "n0", "host_hardware_error"),
        TraceEvent(1000.1, "join", "n0"),
    ],
    "one comes before a lost node is missed": [fail(1000, "n1", "node_failed"), fail(1001, "n0", "others")],
}


@pytest.mark.parametrize("events", AT_ONCE.values(), ids=AT_ONCE)
def test_nor_does_one_for_which_failures_come_together(events):
    """The bound is sought below what the policies get: it must not be found there."""
    job = Job("a", {1: 1e15, 2: 2e15}, transition={"restart": 900.0, "move": 300.0, "continue": 200.0})
    nodes = len({event.node for event in events})
    scenario, trace = cluster(nodes, job, transition=1000.0), make(events, until=10000)
    got = {name: simulate(scenario, trace, POLICIES[name]).mean_waf for name in OURS}
    least = clairvoyant.bound(scenario, trace, BOUND, 0.9 * got["unicron"]).mean_waf
    assert least > 0 and {name: waf for name, waf in got.items() if waf > least * (1 + 1e-9)} == {}


def test_the_last_node_may_go_in_the_second_of_another_failure():
    jobs = Job("a", {1: 7e14}, transition={"restart": 30.0}), Job("b", {1: 2.4e15}, weight=0.5)
    failures = [fail(420, "n0", "others"), fail(420, "n0", "kernel_error")]
    trace = make([TraceEvent(120, "join", "n0"), *failures], until=660)
    scenario = cluster(1, *jobs, transition=900.0)
    bound = simulate(scenario, trace, BOUND)
    assert 0 < simulate(scenario, trace, POLICIES["by_weight"]).mean_waf <= bound.mean_waf


def test_a_failure_on_a_node_that_goes_in_the_same_second_disturbs_nobody_else():
    events = [fail(1000, "n0", "others"), fail(1000, "n1", "others"), fail(1000, "n0", "node_failed")]
    found, _ = spans(cluster(4, Job("a", LINEAR)), make(events, until=2000))
    assert [(span.nodes, [cause.name for cause in span.failures]) for span in found] == [(4, []), (3, ["others"])]
    found, _ = spans(cluster(4, Job("a", LINEAR)), make(events[::2], until=2000))
    assert found[1].failures == ()


def test_one_lost_node_costs_its_share_and_one_change():
    """One job on 4 nodes; from 1,000 to 5,000 s one is gone. Two changes of 100 s: the job shrinks to 3, and grows."""
    trace = make([fail(1000, "n0", "ecc_error"), TraceEvent(5000, "join", "n0")], until=10000)
    bound = simulate(cluster(4, Job("a", LINEAR)), trace, BOUND)
    exact = 4 * 1000 + 3 * (4000 - 100) + 4 * (5000 - 100)
    assert bound.mean_waf == pytest.approx(exact * 1e15 / 10000, rel=3e-4)
    assert bound.mean_waf >= exact * 1e15 / 10000 * (1 - 1e-12)


def test_a_failure_in_place_costs_the_job_that_minds_least():
    """Two jobs of 2 nodes, one of which counts a tenth; the failure takes no node, and hits that one at best."""
    trace = make([fail(1000, "n0", "exited_abnormally")], until=10000)
    jobs = Job("a", LINEAR, max_nodes=2), Job("b", LINEAR, weight=0.1, max_nodes=2)
    lost = 0.2e15 * 100  # a change takes as long as the repair, without what detection takes
    bound = simulate(cluster(4, *jobs), trace, BOUND)
    exact = (2.2e15 * 10000 - lost) / 10000
    assert exact * (1 - 1e-12) <= bound.mean_waf <= exact * (1 + 3e-4)


def test_an_idle_node_may_be_the_one_that_fails():
    trace = make([fail(1000, "n0", "exited_abnormally")], until=10000)
    bound = simulate(cluster(4, Job("a", LINEAR, max_nodes=3)), trace, BOUND)
    assert bound.mean_waf == pytest.approx(3e15)


def best_by_hand(scenario: Scenario, trace) -> float:
    """The best plan of one job that changes at events: for each size, from the best of each size before."""
    found, most = spans(scenario, trace)
    (job,) = scenario.jobs
    best: dict[int, float] = {}
    for span in found:
        lost = min(scenario.transition_seconds, span.seconds)
        before, best = best, {}
        for size in (size for size in job.options(most) if size <= span.nodes):
            kept = [total - job.f(size) * lost * (size != old) for old, total in before.items()]
            best[size] = max(kept, default=0.0) + job.f(size) * span.seconds
    return max(best.values())


@pytest.mark.parametrize("flops", [LINEAR, STEPS], ids=["linear", "steps"])
@pytest.mark.parametrize("transition", [10.0, 900.0, 3000.0])
def test_the_bound_of_one_job_is_near_the_best_plan(flops, transition):
    events = []
    for number, when in enumerate((1000, 2500, 3000, 6000)):
        events += [
            fail(when, f"n{number}", "node_failed"),
            TraceEvent(when + 2000 + 700 * number, "join", f"n{number}"),
        ]
    trace = make(events, until=12000)
    scenario = cluster(5, Job("a", flops), transition=transition)
    exact = best_by_hand(scenario, trace) / trace.until
    bound = simulate(scenario, trace, BOUND).mean_waf
    assert exact * (1 - 1e-12) <= bound <= exact * 1.06


@pytest.mark.parametrize("name,days", [("trace-a", 56), ("rsc1", 60), ("llama3", 60)])
def test_the_planner_reaches_99_percent_of_it(name, days):
    trace = GENERATORS[name](16, days, 0)
    bound = simulate(case(), trace, BOUND)
    assert simulate(case(), trace, POLICIES["unicron"]).mean_waf >= 0.99 * bound.mean_waf
