"""The plan is optimal, and among equals the one that the rules name."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from tests.support.depth import cases
from tests.support.strategies import SHAPES, brute_force, scale, scenarios, seeded, shaped, sizes_of
from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.solver import keys, tables
from unicron_planner.solver.keys import Row
from unicron_planner.solver.solve import solve

QUICK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


def one(**changes) -> Scenario:
    values = {"name": "a", "flops": {2: 1.0e15, 4: 1.9e15}, "nodes": 4, "min_nodes": 2} | changes
    return Scenario(nodes=16, jobs=(Job(**values),), mtbf_node_hours=1000.0, transition_seconds=60.0)


def equals_brute_force(scenario: Scenario) -> None:
    plan = solve(scenario)
    assignment, objective = brute_force(scenario)
    assert plan.assignment == assignment
    assert plan.objective == pytest.approx(float(objective), rel=1e-9, abs=1e-12 * scale(scenario))


@settings(max_examples=cases(200), **QUICK)
@given(scenarios())
def test_equals_brute_force_with_ties(scenario):
    """Hypothesis looks for the odd case, and shrinks it."""
    equals_brute_force(scenario)


def test_equals_brute_force_many_times():
    """To draw a scenario costs Hypothesis more than to plan it and to try everything."""
    for seed in range(cases(3000)):
        equals_brute_force(seeded(seed))


@settings(max_examples=cases(200), **QUICK)
@given(scenarios(), st.randoms(use_true_random=False))
def test_equals_brute_force_with_measured_rates(scenario, draw):
    """Rates with 17 digits: no exact ties, but the same optimum."""
    noisy = replace(
        scenario,
        jobs=tuple(
            replace(
                job, flops={k: rate * draw.uniform(0.9, 1.1) for k, rate in job.flops.items() if k not in job.spares}
            )
            for job in scenario.jobs
        ),
    )
    _, objective = brute_force(noisy)
    assert solve(noisy).objective == pytest.approx(float(objective), rel=1e-9, abs=1e-11 * scale(noisy))


def larger(seed: int) -> Scenario:
    """8 to 12 jobs on 24 to 48 nodes, whole numbers throughout, so that a solver for integers can judge."""
    draw = random.Random(seed)
    nodes = draw.randint(24, 48)
    jobs = []
    for i in range(draw.randint(8, 12)):
        sizes = draw.sample(range(1, 17), draw.randint(2, 8))
        flops = {k: float(draw.randint(0, 900)) for k in sizes}
        jobs.append(
            Job(
                name=f"j{i}",
                flops=flops,
                weight=float(draw.randint(1, 3)),
                min_nodes=draw.randint(1, 4),
                nodes=draw.choice([0, *sizes]),
                lost_worker=draw.random() < 0.2,
                transition_seconds=float(draw.choice([5, 60, 4000])),
            )
        )
    return Scenario(nodes=nodes, jobs=tuple(jobs), mtbf_node_hours=float(nodes * draw.choice([1, 10])) / 3.6)


def test_equals_cp_sat_on_larger_cases():
    for seed in range(cases(100)):
        scenario = larger(seed)
        model, terms, used = cp_model.CpModel(), [], []
        for job in scenario.jobs:
            picks = {k: model.new_bool_var(f"{job.name}.{k}") for k in sizes_of(job, scenario.nodes)}
            model.add_exactly_one(picks.values())
            terms += [round(scenario.g(job, k)) * var for k, var in picks.items()]
            used += [k * var for k, var in picks.items()]
        model.add(sum(used) <= scenario.nodes)
        model.maximize(sum(terms))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model) == cp_model.OPTIMAL
        assert solve(scenario).objective == pytest.approx(solver.objective_value, rel=1e-9), f"seed {seed}"


def test_the_formula():
    """G = F(x') D_running - 1[...] F(x_t) D_transition, D_running = mtbf / nodes."""
    scenario = one()
    assert scenario.d_running == 1000 * 3600 / 16
    assert scenario.g(scenario.jobs[0], 4) == 1.9e15 * 225000
    assert scenario.g(scenario.jobs[0], 2) == 1.0e15 * 225000 - 1.9e15 * 60
    lost = one(lost_worker=True, weight=2.0, transition_seconds=30.0)
    assert lost.g(lost.jobs[0], 4) == 2 * 1.9e15 * 225000 - 2 * 1.9e15 * 30
    assert lost.g(lost.jobs[0], 0) == -2 * 1.9e15 * 30
    plan = solve(scenario)
    assert (plan.assignment, plan.waf, plan.spares) == ({"a": 4}, 1.9e15, 12)


def test_gain_can_be_negative():
    """The job lost a worker, and whatever is done costs more than the short period brings: the least bad is chosen."""
    scenario = Scenario(
        nodes=4,
        jobs=(Job("a", {2: 1.0, 4: 1.5}, nodes=4, lost_worker=True, transition_seconds=1e6),),
        mtbf_node_hours=0.01,
    )
    plan = solve(scenario)
    assert plan.assignment == {"a": 4}
    assert plan.objective < 0


def test_below_the_minimum_nothing_runs():
    assert solve(one(min_nodes=8)).assignment == {"a": 0}
    assert solve(one(min_nodes=3)).assignment == {"a": 4}
    assert solve(one(max_nodes=3)).assignment == {"a": 2}


def test_ties_disturb_fewest_then_move_least_then_by_name():
    flops = {k: 1e15 * k for k in range(1, 9)}
    two = tuple(Job(name, flops, nodes=4) for name in ("b", "a"))
    still = Scenario(nodes=8, jobs=two, transition_seconds=0.0)
    assert solve(still).assignment == {"b": 4, "a": 4}
    grown = Scenario(nodes=10, jobs=two, transition_seconds=0.0)
    assert solve(grown).assignment == {"a": 6, "b": 4}  # one job disturbed, not two; the first by name
    few = Scenario(
        nodes=7,
        transition_seconds=0.0,
        jobs=(  # one job moving by 4 rather than two moving by 1
            Job("a", {1: 1.0, 5: 3.0}, nodes=1),
            Job("b", {1: 1.0, 2: 2.0}, nodes=1),
            Job("c", {1: 1.0, 2: 2.0}, nodes=1),
        ),
    )
    assert solve(few).assignment == {"a": 5, "b": 1, "c": 1}
    shrunk = Scenario(nodes=7, jobs=two, transition_seconds=0.0)
    assert solve(shrunk).assignment == {"a": 4, "b": 3}


def test_transition_costs_by_kind():
    job = Job(
        "a",
        {2: 1e15, 3: 1.5e15, 4: 2e15},
        nodes=3,
        lost_worker=True,
        transition_seconds=60.0,
        transition={"move": 500.0, "continue": 5.0},
    )
    assert [job.kind(k) for k in (0, 2, 3, 4)] == ["continue", "continue", "move", "grow"]
    scenario = Scenario(nodes=3, jobs=(job,), mtbf_node_hours=0.2)
    assert [scenario.d_transition(job, k) for k in (2, 3, 4)] == [5.0, 500.0, 60.0]
    assert solve(scenario).assignment == {"a": 2}  # 240 s until the next failure: a replacement isn't worth 500 s


def test_no_nodes_and_unrunnable_jobs():
    assert solve(Scenario(nodes=0, jobs=(Job("a", {1: 1.0}, nodes=1, lost_worker=True),))).assignment == {"a": 0}
    plan = solve(Scenario(nodes=3, jobs=(Job("a", {8: 1.0}), Job("b", {1: 1.0}))))
    assert plan.assignment == {"a": 0, "b": 1}
    assert "none of its sizes" in plan.reasons["a"]


@pytest.mark.parametrize("scenario", [one(), one(lost_worker=True), one(nodes=2), one(nodes=0), one(min_nodes=20)])
def test_every_job_has_a_reason(scenario):
    reasons = solve(scenario).reasons
    assert set(reasons) == {"a"}
    assert "\n" not in reasons["a"] and len(reasons["a"]) > 10


@settings(max_examples=cases(60), **QUICK)
@given(st.integers(0, 200), st.lists(st.integers(-100, 100), min_size=1, max_size=200))
def test_block_kernel_equals_the_definition(nodes, values):
    row = Row(tables.np.arange(len(values)), tables.np.array(values) * 1000 + 7)
    table = tables.np.cumsum(tables.np.arange(nodes + 1) % 5)
    want = [
        max(int(table[j - k]) + int(row.keys[k]) for k in range(min(j, len(values) - 1) + 1)) for j in range(nodes + 1)
    ]
    assert tables.add(table, row).tolist() == want


@settings(max_examples=cases(300), **QUICK)
@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=40),
    st.lists(st.integers(0, 60), min_size=2, max_size=40),
    st.integers(0, 90),
)
def test_leaving_out_pairs_of_too_much_slack(entries, slacks, gap):
    """If an entry and a size are within the gap together, their sum is in the table; nothing is invented."""
    table, slack = tables.np.array(entries) * -1000, tables.np.array(slacks)
    row = Row(tables.np.arange(len(slacks)), slack * -1000)
    names = ("DENSE", "STATE_COST", "SPARSE")
    before = [getattr(tables, name) for name in names]
    tables.DENSE, tables.STATE_COST, tables.SPARSE = 1, 0, 10.0
    try:
        out = tables._add_within(table, row, slack, tables.np.array(entries), gap)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(tables, name, value)
    for j in range(len(entries)):
        pairs = [(entries[j - k] + slacks[k]) for k in range(min(j + 1, len(slacks)))]
        if min(pairs) <= gap:
            assert out[j] == -1000 * min(pairs)
        else:
            assert out[j] <= -1000 * min(pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_leaving_sizes_out_changes_nothing(shape):
    """At a size where bounds, sparse passes and blocks all come into play: the same as the whole table."""
    scenario = shaped(shape, 12, 300, seed=1)
    rows = keys.rows(scenario)
    whole = tables.suffixes(rows, scenario.nodes)
    sizes, best = tables.optimum(rows, scenario.nodes)
    assert best == int(whole[0][-1]) == tables.value_of(rows, sizes)
    assert sizes == tables.trace(rows, whole, scenario.nodes)


def test_huge_and_tiny_numbers_are_planned_or_refused():
    """A job 10^9 times smaller than its neighbour is still served; one below the resolution may wait, nothing
    breaks."""
    small = Scenario(nodes=4, jobs=(Job("a", {1: 1.1e6, 2: 3.3333333e6}), Job("b", {2: 1.23456789012345e15})))
    assert solve(small).assignment == {"a": 2, "b": 2}
    tiny = Scenario(nodes=4, jobs=(Job("a", {1: 1e-300, 2: 3e-300}), Job("b", {2: 1e15})))
    assert solve(tiny).assignment["b"] == 2
    with pytest.raises(PlanError, match="too large"):
        Scenario(nodes=4, jobs=(Job("a", {1: 1e308}),))
