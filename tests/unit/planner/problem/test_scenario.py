"""Scenario files: the contract is read, and nothing hostile gets through without one clear line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.problem.scenario import check_minima, from_dict, load
from unicron_planner.solver.solve import solve

CONTRACT = """
[cluster]
nodes = 16                   # n'
mtbf_node_hours = 1000.0
transition_seconds = 60.0
[[job]]
name = "gpt-7b"
weight = 1.0
min_nodes = 2
nodes = 4
lost_worker = false
transition_seconds = 30.0
flops = { 2 = 1.0e15, 4 = 1.9e15 }
"""


def write(tmp_path, text):
    path = tmp_path / "s.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_contract(tmp_path):
    scenario = load(write(tmp_path, CONTRACT))
    job = scenario.jobs[0]
    assert (scenario.nodes, scenario.mtbf_node_hours, scenario.transition_seconds) == (16, 1000.0, 60.0)
    assert (job.name, job.min_nodes, job.nodes, job.flops) == ("gpt-7b", 2, 4, {2: 1.0e15, 4: 1.9e15})
    assert scenario.d_transition(job, 2) == 30.0


def test_everything_optional_is_read():
    names = {"name": "x", "flops": {"1": 1.0}, "nodes": 1, "max_nodes": 2, "node_names": ["n1", "n2"]}
    data = {
        "cluster": {"nodes": 3},
        "job": [
            names | {"restart_only": True, "owner": "ann", "keep": 1, "unit": 1},
            {
                "name": "y",
                "flops": {"1": 1.0, "2": 1.5},
                "transition": {"move": 3.0},
                "weight": 2.0,
                "lost_worker": True,
            },
        ],
    }
    assert from_dict(data) == Scenario(
        nodes=3,
        jobs=(
            Job(
                "x",
                {1: 1.0},
                node_names=("n1", "n2"),
                restart_only=True,
                max_nodes=2,
                nodes=1,
                owner="ann",
                keep=1,
            ),
            Job("y", {1: 1.0, 2: 1.5}, transition={"move": 3.0}, weight=2.0, lost_worker=True),
        ),
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (("nodes = 16 ", "nodes = -1 "), "0 or more"),
        (("nodes = 16 ", "nodes = 1.5 "), "whole number"),
        (("nodes = 16 ", "nodes = 99999999999 "), "not supported"),
        (("nodes = 16 ", "nods = 16 "), "did you mean nodes"),
        (("nodes = 16 ", ""), "nodes is missing"),
        (("1000.0", "nan"), "finite"),
        (("1000.0", "0.0"), "above 0"),
        (("1000.0", "inf"), "finite"),
        (("weight = 1.0", "weight = nan"), "weight"),
        (("weight = 1.0", "weight = -2"), "weight"),
        (("weight = 1.0", "weight = true"), "weight"),
        (("min_nodes = 2", "min_nodes = -2"), "min_nodes"),
        (("lost_worker = false", "lost_worker = 3"), "lost_worker"),
        (("2 = 1.0e15", "2 = nan"), "finite"),
        (("2 = 1.0e15", "2 = -1.0"), "0 or more"),
        (("2 = 1.0e15", "2 = inf"), "finite"),
        (("2 = 1.0e15", "two = 1.0"), "not a node count"),
        (("2 = 1.0e15", "-2 = 1.0"), "0 or more"),
        (("2 = 1.0e15", "02 = 1.0, 2 = 2.0"), "twice"),
        (("2 = 1.0e15", "2 = 1.7e308"), "too large"),
        (("flops = { 2 = 1.0e15, 4 = 1.9e15 }", "flops = {}"), "no throughput"),
        (("flops = { 2 = 1.0e15, 4 = 1.9e15 }", "flops = 3"), "must be a table"),
        (("flops = { 2 = 1.0e15, 4 = 1.9e15 }", ""), "no throughput"),
        (("transition_seconds = 30.0", "transition = { fly = 3.0 }"), "unknown transition kind"),
        (("transition_seconds = 30.0", "max_nodes = 1"), "max_nodes"),
        (("transition_seconds = 30.0", "node_names = 3"), "node_names"),
        (('name = "gpt-7b"', ""), "no name"),
        (('name = "gpt-7b"', 'name = ""'), "printable"),
        (('name = "gpt-7b"', 'name = "a\\nb"'), "printable"),
        (("[[job]]", "[job]"), "array of tables"),
        (("[cluster]", "[cluster"), "not valid TOML"),
        (("[cluster]", "[clusters]"), "unknown key"),
    ],
)
def test_hostile_scenarios_are_refused_in_one_line(tmp_path, change, words):
    assert change[0] in CONTRACT
    with pytest.raises(PlanError, match=words) as caught:
        load(write(tmp_path, CONTRACT.replace(*change, 1)))
    assert "\n" not in str(caught.value) and "s.toml" in str(caught.value)


def test_no_jobs_and_double_names(tmp_path):
    with pytest.raises(PlanError, match="no jobs"):
        load(write(tmp_path, "[cluster]\nnodes = 4\n"))
    with pytest.raises(PlanError, match="jobs are named gpt-7b"):
        load(write(tmp_path, CONTRACT + CONTRACT[CONTRACT.index("[[job]]") :]))
    with pytest.raises(PlanError, match="No such file"):
        load(tmp_path / "missing.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file"):
        load(tmp_path / "binary")


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["cluster", "job", "nodes", "name", "flops", "2", "layouts"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_structure_is_planned_or_refused(data):
    try:
        plan = solve(from_dict(data))
    except PlanError as error:
        assert "\n" not in str(error)
    else:
        assert math.isfinite(plan.objective)


def test_minima_beyond_the_cluster_are_refused_for_files_only():
    scenario = Scenario(nodes=4, jobs=(Job("a", {3: 1.0}, min_nodes=3), Job("b", {3: 2.0}, min_nodes=3)))
    with pytest.raises(PlanError, match="add up to 6"):
        check_minima(scenario)
    assert solve(scenario).assignment == {"a": 0, "b": 3}
