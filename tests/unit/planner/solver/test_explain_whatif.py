"""Explanations name the true second-best plan; suppositions in words do what they say."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.depth import cases
from tests.support.strategies import brute_force, scale, scenarios, sizes_of
from unicron_planner.ahead.whatif import suppose, suppose_all
from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.solver.explain import duration_text, explain, runner_up
from unicron_planner.solver.solve import solve


@settings(max_examples=cases(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(most_jobs=3))
def test_runner_up_is_the_best_of_all_others(scenario):
    plan = solve(scenario)
    for job in scenario.jobs:
        second = runner_up(scenario, job.name, plan)
        if sizes_of(job, scenario.nodes) == [plan.assignment[job.name]]:
            assert second is None
            continue
        assignment, objective = brute_force(scenario, barred=(job.name, plan.assignment[job.name]))
        assert second.assignment == assignment
        assert second.objective == pytest.approx(float(objective), rel=1e-9, abs=1e-12 * scale(scenario))


def cluster() -> Scenario:
    flops = {k: 1e15 * k**0.9 for k in range(1, 9)}
    return Scenario(
        nodes=9,
        mtbf_node_hours=500.0,
        jobs=(
            Job("gpt-7b", flops, nodes=4, node_names=("n1", "n2", "n3", "n4")),
            Job("big job", flops, weight=1.1, nodes=4, node_names=("n5", "n6", "n7", "n8")),
        ),
    )


def test_explanation_in_words():
    text = explain(cluster(), "gpt-7b").text
    assert text.startswith("gpt-7b gets ") and "second-best plan gives it" in text and "less on average" in text
    assert explain(cluster(), "gpt-7b").margin > 0
    with pytest.raises(PlanError, match="no job 'x'"):
        explain(cluster(), "x")
    alone = Scenario(nodes=1, jobs=(Job("a", {4: 1.0}),))
    assert "no other size" in explain(alone, "a").text
    same = Scenario(nodes=3, jobs=(Job("a", {1: 1.0, 2: 2.0}), Job("b", {1: 1.0, 2: 2.0})))
    assert "equally well" in explain(same, "a").text


@pytest.mark.parametrize(
    "text, nodes, lost",
    [
        ("node n3 fails", 8, {"gpt-7b"}),
        ("node n9 fails", 8, set()),
        ("a spare fails", 8, set()),
        ("Node joins.", 10, set()),
        ("job big job loses a node", 8, {"big job"}),
        ("the node n5 is lost", 8, {"big job"}),
    ],
)
def test_suppositions(text, nodes, lost):
    then = suppose(cluster(), text)
    assert then.nodes == nodes
    assert {job.name for job in then.jobs if job.lost_worker} == lost


def test_suppositions_add_up():
    then = suppose_all(cluster(), ["node n3 fails", "node n5 fails", "job gpt-7b finishes"])
    assert then.nodes == 7 and [job.name for job in then.jobs] == ["big job"]
    assert then.jobs[0].node_names == ("n6", "n7", "n8") and then.jobs[0].nodes == 4
    with pytest.raises(PlanError, match="no spare"):
        suppose_all(cluster(), ["node n3 fails", "node n3 fails", "node n3 fails"])


@pytest.mark.parametrize("text", ["", "n3 fails", "node n3 explodes", "job x finishes", "job gpt-7b starts"])
def test_nonsense_is_refused(text):
    with pytest.raises(PlanError) as caught:
        suppose(cluster(), text)
    assert "\n" not in str(caught.value)


def test_durations():
    assert [duration_text(value) for value in (5, 300, 7200, 864000)] == ["5 s", "5 min", "2 h", "10 days"]
