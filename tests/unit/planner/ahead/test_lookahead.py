"""The look-ahead table says what solving anew would say."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.depth import cases
from tests.support.processes import wait_for
from tests.support.strategies import SHAPES, scale, scenarios, shaped
from unicron_planner.ahead import lookahead
from unicron_planner.ahead.expected import after_failure, candidates, solve_expected
from unicron_planner.ahead.lookahead import Keeper, Lookahead
from unicron_planner.ahead.next_events import after, pairs_of_losses, single_events
from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.solver import tables
from unicron_planner.solver.solve import solve

QUICK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=cases(100), **QUICK)
@given(scenarios(most_jobs=5, most_nodes=12))
def test_equals_solving_anew_for_every_event(scenario):
    table = Lookahead(scenario)
    possible = [
        event
        for event in single_events(scenario) + pairs_of_losses(scenario)
        if event[0] != "lost" or scenario.nodes >= len(event) - 1
    ]
    assert set(table.entries) == set(possible)
    for event in possible:
        anew = solve(after(scenario, event))
        assert table.get(event).assignment == anew.assignment, event
        assert table.get(event).plan == anew


@settings(max_examples=cases(60), **QUICK)
@given(scenarios(most_jobs=5, most_nodes=12))
def test_reading_off_the_tables_is_as_good_but_for_names(scenario):
    """The path for large clusters of jobs that scale alike: same gain, same disturbance, same move."""
    before, lookahead.MOST_TRACE_SIZES = lookahead.MOST_TRACE_SIZES, 0
    try:
        table = Lookahead(scenario, pairs=False)
    finally:
        lookahead.MOST_TRACE_SIZES = before
    for event, entry in table.entries.items():
        then = after(scenario, event)
        anew = solve(then)
        assert entry.plan.objective == pytest.approx(anew.objective, rel=1e-9, abs=1e-11 * scale(then))
        assert sum(entry.assignment.values()) <= then.nodes
        cost = [
            (
                sum(plan[job.name] != job.nodes for job in then.jobs if not job.lost_worker),
                sum(abs(plan[job.name] - job.nodes) for job in then.jobs),
            )
            for plan in (entry.assignment, anew.assignment)
        ]
        assert cost[0] == cost[1]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_solving_anew_on_a_larger_cluster(shape, narrow, monkeypatch):
    """narrow: the first try looks at almost nothing, so that the tables have to be widened until they are proven."""
    scenario = shaped(shape, 8, 96, seed=2)
    with monkeypatch.context() as patch:
        if narrow:
            patch.setattr(tables.Bound, "core_gap", lambda bound, per_job: 0)
        table = Lookahead(scenario, pairs=False)
    assert len(table.entries) >= 17
    for event, entry in table.entries.items():
        assert entry.assignment == solve(after(scenario, event)).assignment, event


def cluster(spare: int = 1) -> Scenario:
    flops = {k: 1e15 * k**0.9 for k in range(1, 9)}
    return Scenario(nodes=8 + spare, jobs=(Job("a", flops, nodes=4), Job("b", flops, nodes=4)), mtbf_node_hours=500.0)


def test_losses_are_found_in_any_order():
    table = Lookahead(cluster())
    assert table.get(("lost", "b", "a")) is table.get(("lost", "a", "b"))
    assert table.get(("lost", "nobody")) is None
    assert ("spare",) in table.entries and ("lost", "a", "a") in table.entries
    assert ("spare",) not in Lookahead(cluster(spare=0)).entries


def test_many_jobs_have_no_pairs():
    many = Scenario(nodes=20, jobs=tuple(Job(f"j{i:02}", {1: 1.0}, nodes=1) for i in range(20)))
    assert max(len(event) for event in Lookahead(many).entries) == 2


@pytest.mark.parametrize("event, words", [(("lost", "x"), "no job"), (("explode",), "unknown event")])
def test_impossible_events_are_refused(event, words):
    with pytest.raises(PlanError, match=words):
        after(cluster(), event)


def test_after_a_loss_the_size_before_it_is_charged():
    then = after(cluster(), ("lost", "a"))
    assert (then.nodes, then.job("a").nodes, then.job("a").lost_worker) == (8, 4, True)


def test_keeper_answers_before_and_after_the_table_is_there():
    others = set(threading.enumerate())
    keeper = Keeper()
    try:
        with pytest.raises(RuntimeError):
            keeper.get(("join",))
        keeper.update(cluster())
        wait_for(keeper._fresh, "the table")
        entry, ready = keeper.get(("lost", "a"))
        assert ready and entry.plan == solve(after(cluster(), ("lost", "a")))
        newer = cluster(spare=0)
        keeper.update(newer)
        entry, _ = keeper.get(("lost", "a"))  # ready or not, the answer is for the newer scenario
        assert entry.plan == solve(after(newer, ("lost", "a")))
        wait_for(lambda: keeper.get(("lost", "a"))[1], "the newer table")
    finally:
        keeper.stop()
    assert "unicron-lookahead" not in {thread.name for thread in threading.enumerate() if thread not in others}


def test_keeper_survives_a_scenario_that_cannot_be_planned(monkeypatch):
    keeper = Keeper()
    try:
        monkeypatch.setattr(lookahead, "Lookahead", lambda *a: (_ for _ in ()).throw(ValueError("broken")))
        keeper.update(cluster())
        wait_for(lambda: isinstance(keeper._error, ValueError), "the search has failed")
        monkeypatch.undo()
        entry, ready = keeper.get(("join",))
        assert not ready and entry.assignment == solve(after(cluster(), ("join",))).assignment
        keeper.update(cluster(2))
        wait_for(keeper._fresh, "the table")
    finally:
        keeper.stop()


def cliffs(mtbf: float) -> Scenario:
    """Eight nodes are far better than seven, a ninth brings little."""
    flops = {4: 4e15, 8: 7.8e15, 9: 7.85e15}
    jobs = tuple(Job(name, flops) for name in "abc")
    return Scenario(nodes=25, jobs=jobs, mtbf_node_hours=mtbf, transition_seconds=1200)


def test_a_spare_is_kept_where_the_next_failure_makes_it_worth_more():
    assert sum(solve(cliffs(50.0)).assignment.values()) == 25
    assert solve_expected(cliffs(50.0)).assignment == {"a": 8, "b": 8, "c": 8}
    assert sum(solve_expected(cliffs(1e6)).assignment.values()) == 25


def test_expectation_is_the_mean_over_nodes():
    scenario, assignment = cliffs(50.0), {"a": 9, "b": 8, "c": 8}
    running = replace(scenario, jobs=tuple(replace(job, nodes=assignment[job.name]) for job in scenario.jobs))
    want = sum(assignment[name] / 25 * solve(after(running, ("lost", name))).objective for name in "abc")
    assert after_failure(scenario, assignment) == pytest.approx(want)
    found = candidates(scenario)
    assert all(a != b for a, b in itertools.combinations(found, 2))
    assert [sum(c.values()) for c in found] == sorted([sum(c.values()) for c in found], reverse=True)
