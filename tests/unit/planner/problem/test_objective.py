"""The planner's input: what it refuses with a line that helps, and each formula at its bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unicron_planner.problem.objective import Job, PlanError, Rates, Scenario, number, whole


def job(**changes: Any) -> Job:
    return Job(**{"name": "a", "flops": {1: 1.0, 2: 1.5, 4: 2.0}, **changes})


def scenario(*jobs: Job, nodes: int = 4, **changes: Any) -> Scenario:
    return Scenario(**{"nodes": nodes, "jobs": jobs or (job(),), "mtbf_node_hours": 10.0, **changes})


def refusal_of(make: Any, *arguments: Any, **changes: Any) -> str:
    """Why it cannot be made; empty when it can."""
    try:
        make(*arguments, **changes)
    except PlanError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


# ---------------------------------------------------------------- what is refused
def test_numbers_that_cannot_be_planned_with_are_refused():
    for value, more, why in (
        (0.5, {}, ""),
        (0, {}, ""),
        (True, {}, "must be a number"),
        ("1", {}, "must be a number"),
        (None, {}, "must be a number"),
        (math.nan, {}, "must be a finite number"),
        (math.nan, {"finite": False}, "must be a finite number"),
        (math.inf, {}, "must be a finite number"),
        (math.inf, {"finite": False}, ""),
        (10**400, {}, "is too large"),
        (-0.25, {}, "must be 0 or more"),
        (0, {"positive": True}, "must be above 0"),
        (0.25, {"positive": True}, ""),
        (1, {"positive": True}, ""),
    ):
        found = refusal_of(number, value, "it", **more)
        assert why in found and bool(found) == bool(why), (value, more)
    for value, least, why in (
        (0, 0, ""),
        (3, 3, ""),
        (2, 3, "must be 3 or more"),
        (True, 0, "must be a whole number"),
        (1.0, 0, "must be a whole number"),
        (10**7, 0, ""),
        (10**7 + 1, 0, "more than 10 million"),
    ):
        found = refusal_of(whole, value, "it", least=least)
        assert why in found and bool(found) == bool(why), (value, least)


def test_a_throughput_has_a_rate_at_some_size_and_none_at_no_nodes():
    for flops, why in (
        ({1: 0.5}, ""),
        ({0: 0.0, 1: 0.5}, ""),
        ({}, "has no throughput"),
        ([1.0], "has no throughput"),
        (None, "has no throughput"),
        ({0: 1.0, 1: 0.5}, "flops at 0 nodes"),
        ({0: 0.0}, "at any size above 0 nodes"),
    ):
        found = refusal_of(Rates, flops)
        assert why in found and bool(found) == bool(why), flops
    rates = Rates({4: 2, 0: 0, 1: 1})
    assert dict(rates) == {1: 1.0, 4: 2.0} and list(rates.sizes) == [1, 4] and list(rates.rates) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": 5}, "name must be printable"),
        ({"name": ""}, "name must be printable"),
        ({"name": "a\nb"}, "name must be printable"),
        ({"owner": 5}, "owner must be printable"),
        ({"owner": "a\nb"}, "owner must be printable"),
        ({"owner": "ann"}, ""),
        ({"unit": 0}, "unit must be 1 or more"),
        ({"unit": 1}, ""),
        ({"max_nodes": 2, "min_nodes": 3}, "is below min_nodes 3"),
        ({"max_nodes": 2, "min_nodes": 2}, ""),
        ({"lost_worker": 1}, "must be true or false"),
        ({"restart_only": 1}, "must be true or false"),
        ({"transition_seconds": -1.0}, "transition_seconds must be 0 or more"),
        ({"transition_seconds": 5.0}, ""),
        ({"transition": [5.0]}, "transition must be a table"),
        ({"transition": {"jump": 5.0}}, "unknown transition kind 'jump'"),
        ({"transition": {"grow": 5.0}}, ""),
        ({"spares": [5]}, "spares must be a table"),
        ({"spares": {1: 0.5}, "flops": {1: 1.0}}, "spares must be 2 or more"),
        ({"spares": {2: 0.5}, "flops": {1: 1.0}}, ""),
        ({"spares": {5: -1.0}}, "spares at 5 nodes must be 0 or more"),
        ({"spares": {3: 0.5}}, "must begin above the largest node count"),
        ({"spares": {3: 0.5}, "flops": {4: 1.0}}, "must begin above the largest node count"),
        ({"spares": {3: 0.5}, "flops": {3: 1.0}}, "must begin above the largest node count"),
        ({"layouts": ["TP2"], "flops": {}}, "layouts must be a table"),
        ({"layout": "TP2"}, "its layouts are: none"),
        ({"layout": "TP2", "layouts": {"TP1": {1: 1.0}}, "flops": {}}, "its layouts are: TP1"),
        ({"layout": "TP1", "layouts": {"TP1": {1: 1.0}}, "flops": {}}, ""),
        ({"layouts": {"TP1": {1: 1.0}}, "flops": {1: 1.0}}, ""),
        ({"layouts": {"TP1": {1: 1.0}}, "flops": {1: 2.0}}, "give flops or layouts, not both"),
    ],
)
def test_a_job_that_cannot_be_planned_for_is_refused(changes: dict[str, Any], why: str):
    found = refusal_of(job, **changes)
    assert why in found and bool(found) == bool(why)


def test_a_cluster_that_cannot_be_planned_for_is_refused():
    assert "mtbf_node_hours must be" in refusal_of(scenario, mtbf_node_hours=0.0)
    assert "there are no jobs" in refusal_of(Scenario, nodes=1, jobs=())
    assert "jobs are named b" in refusal_of(scenario, job(), job(name="b"), job(name="b"))
    assert "weight x flops x time" in refusal_of(scenario, job(weight=1e300, flops={1: 1e10}))
    assert "too large" in refusal_of(scenario, job(flops={1: 1.0}, spares={2: 1e308}))


# ---------------------------------------------------------------- a job
def test_spares_work_as_the_nodes_below_them_and_what_they_save_counts_where_the_job_runs():
    one = job(flops={1: 1.0, 2: 2.0}, spares={4: 0.5, 3: 0.25}, weight=2.0, max_nodes=3)
    assert dict(one.flops) == {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0} and one.working == 2
    assert [one.spare_gain(nodes) for nodes in (0, 2, 3, 4, 7)] == [0.0, 0.0, 0.5, 0.0, 0.0]
    assert one.f(3) == one.f(2) == 4.0, "those who train count"
    again = job(flops=one.flops, spares=one.spares)
    assert dict(again.flops) == dict(one.flops)
    split = job(flops={}, layouts={"TP1": {1: 1.0}, "TP2": {1: 2.0}}, spares={2: 0.5})
    assert dict(split.flops) == {1: 2.0, 2: 2.0} and dict(split.layouts["TP1"]) == {1: 1.0, 2: 1.0}
    assert job().working >= 10**7 and job().spare_gain(2) == 0.0


def test_a_job_brings_the_best_of_its_layouts_where_it_runs():
    one = job(flops={}, layouts={"TP1": {1: 0.25, 2: 0.5}, "TP2": {2: 0.75, 4: 0.5}}, weight=2.0, max_nodes=2)
    assert dict(one.flops) == {1: 0.25, 2: 0.75, 4: 0.5}
    assert [one.f(nodes) for nodes in (0, 1, 2, 4, 7)] == [0.0, 0.5, 1.5, 0.0, 0.0]
    assert [one.f(nodes, "TP2") for nodes in (0, 1, 2)] == [0.0, 0.0, 1.5] and one.f(2, "TP1") == 1.0


def test_sizes_that_a_job_can_be_given():
    one = job(min_nodes=2, max_nodes=4, flops={1: 1.0, 2: 1.5, 4: 2.0, 8: 3.0})
    assert [nodes for nodes in range(10) if one.runs(nodes)] == [0, 2, 4]
    assert [one.options(nodes) for nodes in (1, 2, 3, 8)] == [[0], [0, 2], [0, 2], [0, 2, 4]]
    assert job().runs(4) and not job(flops={2: 1.0}).runs(1), "without a most"
    assert [job(nodes=nodes, lost_worker=lost).holds for nodes, lost in ((3, False), (3, True), (0, True))] == [3, 2, 0]


def test_what_disturbs_a_job_and_how_it_gets_to_another_size():
    layouts = {"flops": {}, "layouts": {"TP1": {1: 1.0, 2: 1.5}, "TP2": {1: 1.0, 2: 1.5}}, "layout": "TP1"}
    spares = {"spares": {5: 0.5, 6: 0.5}}
    for changes, nodes, layout, kind in (
        ({"nodes": 2}, 2, None, None),
        ({"nodes": 2}, 4, None, "grow"),
        ({"nodes": 2}, 1, None, "continue"),
        ({"nodes": 2}, 0, None, "continue"),
        ({"nodes": 2, "lost_worker": True}, 2, None, "move"),
        ({"nodes": 2, "lost_worker": True}, 1, None, "continue"),
        ({"nodes": 1, "lost_worker": True}, 0, None, "continue"),
        ({"nodes": 0}, 0, None, None),
        ({"nodes": 0, "lost_worker": True}, 0, None, None),
        ({"nodes": 0}, 1, None, "restart"),
        ({"nodes": 1, "restart_only": True}, 2, None, "restart"),
        ({"nodes": 1, "restart_only": True}, 1, None, None),
        ({"nodes": 2, **layouts}, 2, "TP1", None),
        ({"nodes": 2, **layouts}, 2, "TP2", "restart"),
        ({"nodes": 1, **layouts}, 1, "TP2", "restart"),
        ({"nodes": 2, **layouts}, 2, None, None),
        ({"nodes": 0, **layouts}, 0, "TP2", None),
        ({"nodes": 2, **layouts, "layout": None}, 2, "TP2", None),
        ({"nodes": 4, **spares}, 5, None, None),
        ({"nodes": 6, **spares}, 5, None, None),
        ({"nodes": 6, **spares}, 4, None, None),
        ({"nodes": 6, **spares}, 2, None, "continue"),
        ({"nodes": 2, **spares}, 6, None, "grow"),
        ({"nodes": 6, "lost_worker": True, **spares}, 5, None, "move"),
    ):
        one = job(**changes)
        assert one.kind(nodes, layout) == kind, (changes, nodes, layout)
        assert one.disturbed(nodes, layout) == (kind is not None or (one.lost_worker and not one.nodes))
    two = job(nodes=2, **layouts)
    assert not two.disturbed(2, "TP1") and two.disturbed(2, "TP2") and not job(nodes=0, **layouts).disturbed(0, "TP2")


# ---------------------------------------------------------------- a cluster
def test_the_seconds_until_the_next_failure_and_those_of_a_transition():
    assert scenario().d_running == 9000.0 and scenario(nodes=0).d_running == 36000.0
    own = {"transition": {"grow": 5.0, "continue": 7.0}}
    for changes, nodes, seconds in (
        ({"nodes": 1, **own}, 2, 5.0),
        ({"nodes": 2, **own}, 1, 7.0),
        ({"nodes": 2, **own}, 0, 60.0),
        ({"nodes": 2, **own}, 2, 60.0),
        ({"nodes": 0, **own}, 2, 60.0),
        ({"nodes": 0, "transition_seconds": 0.0, **own}, 2, 0.0),
        ({"nodes": 0, "transition_seconds": 9.0}, 2, 9.0),
    ):
        one = job(**changes)
        assert scenario(one, transition_seconds=60.0).d_transition(one, nodes) == seconds, (changes, nodes)


def test_what_a_size_is_worth_over_the_time_until_the_next_failure():
    one = job(nodes=2, flops={1: 1.0, 2: 2.0}, spares={3: 0.5})
    plan = scenario(one, transition_seconds=100.0)
    assert [plan.g(one, nodes) for nodes in (2, 3, 1, 0)] == [18000.0, 22500.0, 8800.0, -200.0]
    assert plan.g(one, 4) == -math.inf


def test_the_layout_that_brings_most_the_way_there_included_and_the_present_one_among_equals():
    equal = {"TP1": {2: 1.0}, "TP2": {2: 1.0}, "TP4": {2: 1.0, 4: 2.0}}
    for layout, changes, nodes, chosen in (
        ("TP2", equal, 2, "TP2"),
        (None, equal, 2, "TP1"),
        ("TP2", equal, 4, "TP4"),
        ("TP2", equal, 0, None),
        ("TP1", {"TP1": {2: 1.0}, "TP2": {2: 1.001}}, 2, "TP1"),
        ("TP1", {"TP1": {2: 1.0}, "TP2": {2: 1.5}}, 2, "TP2"),
    ):
        one = job(flops={}, layouts=changes, layout=layout, nodes=2)
        assert scenario(one, transition_seconds=100.0).layout(one, nodes) == chosen, (layout, changes, nodes)
        if layout is not None and nodes == 2 and changes is equal:
            assert scenario(one, transition_seconds=0.0).layout(one, nodes) == layout, "the way costs nothing"
    assert scenario().layout(job(), 2) is None


def test_jobs_are_found_and_replaced_by_name():
    plan = scenario(job(), job(name="b", owner="ann"), job(name="c", owner="ann"))
    assert plan.job("b").name == "b" and " a, b, c" in refusal_of(plan.job, "d")
    changed = plan.with_job(job(name="b", nodes=2))
    assert [(one.name, one.nodes) for one in changed.jobs] == [("a", 0), ("b", 2), ("c", 0)]
    assert {owner: [one.name for one in jobs] for owner, jobs in plan.owners.items()} == {"": ["a"], "ann": ["b", "c"]}
