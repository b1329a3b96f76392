"""The simulator: the shares add up, the same input gives the same result, and small cases come out as by hand."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_detector.failures.severity import TABLE_PATH
from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.simulate import POLICIES, simulate
from unicron_planner.simulate import load as load_trace
from unicron_planner.simulate.cases import CASES, case
from unicron_planner.simulate.causes import CAUSES, find
from unicron_planner.simulate.clairvoyant import spans
from unicron_planner.simulate.engine import split
from unicron_planner.simulate.figure import draw, page
from unicron_planner.simulate.generate import DAY, GENERATORS, llama3, rsc1, trace_a, trace_b, trace_of_counts, unicron
from unicron_planner.simulate.policies import ITERATION, policy
from unicron_planner.simulate.trace import TraceEvent, make, with_notice, write
from unicron_planner.solver.solve import solve

SYSTEMS = sorted(set(POLICIES) - {"clairvoyant"})  # that one is a bound
FLOPS = {k: 1e15 * k for k in range(1, 5)}


def small(**changes) -> Scenario:
    values = {
        "nodes": 4,
        "jobs": (Job("a", FLOPS, max_nodes=3), Job("b", FLOPS, max_nodes=1)),
        "mtbf_node_hours": 1000.0,
        "transition_seconds": 100.0,
    } | changes
    return Scenario(**values)


def fail(when: float, node: str, cause: str) -> TraceEvent:
    return TraceEvent(when, "fail", node, CAUSES[cause])


def total(result) -> float:
    return result.efficiency + sum(result.lost.values())


@settings(max_examples=cases(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.floats(0, 4e5), st.booleans(), st.integers(0, 5), st.sampled_from(sorted(CAUSES))), max_size=25
    ),
    st.sampled_from(sorted(POLICIES)),
    st.integers(3, 8),
)
def test_shares_add_up_whatever_happens(rows, name, nodes):
    events = [
        TraceEvent(when, "join", f"n{node}") if join else fail(when, f"n{node}", cause)
        for when, join, node, cause in rows
    ]
    scenario = small(nodes=nodes)
    trace = make(events, until=5e5)
    try:
        result = simulate(scenario, trace, POLICIES[name])
    except PlanError as error:
        assert "more nodes" in str(error)
        return
    assert total(result) == pytest.approx(1.0, abs=1e-9)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in (result.efficiency, *result.lost.values()))
    assert result.mean_waf == pytest.approx(result.efficiency * result.ideal_waf)
    assert result == simulate(scenario, trace, POLICIES[name])


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_without_failures_only_healthy_speed_and_split_count(name):
    result = simulate(small(), make([]), POLICIES[name])
    if POLICIES[name].placement in ("optimal", "own", "fixed"):
        assert result.efficiency == pytest.approx(POLICIES[name].healthy)
    assert result.lost["detection"] == result.lost["transition"] == result.lost["recompute"] == 0.0


def test_one_lost_node_by_hand():
    """a on 3 nodes, b on 1. At 1,000 s a node of a fails: 0.3 s to detect, 100 s to regroup on 2, half an iteration
    again; at 5,000 s it joins: 100 s more. Until 10,000 s."""
    trace = make([fail(1000, "n0", "ecc_error"), TraceEvent(5000, "join", "n0")], until=10000)
    result = simulate(small(), trace, POLICIES["unicron"])
    assert result.ideal_waf == 4e15
    work = 4 * 1000 + 1 * (0.3 + 100 + 15) + 3 * (4000 - 115.3) + 1 * 100 + 4 * 4900
    assert result.mean_waf == pytest.approx(work * 1e15 / 10000)
    assert result.lost["detection"] == pytest.approx(3 * 0.3 / 40000)
    assert result.lost["transition"] == pytest.approx((2 * 100 + 3 * 100) / 40000)
    assert result.lost["recompute"] == pytest.approx(2 * 0.5 * ITERATION / 40000)
    assert result.failures == (1000,) and result.plans == 2


def test_megatron_waits_for_repair_and_goes_back_to_a_checkpoint():
    """Fails at 5,000 s (last checkpoint at 3,600 s), noticed after 30 min; the node joins at 10,000 s; then 23 min to
    restart and 1,400 s to compute again."""
    scenario = small(nodes=3, jobs=(Job("a", FLOPS, max_nodes=3),))
    trace = make([fail(5000, "n0", "ecc_error"), TraceEvent(10000, "join", "n0")], until=20000)
    result = simulate(scenario, trace, POLICIES["megatron"])
    assert result.efficiency * 20000 == pytest.approx(5000 + 20000 - 10000 - 1380 - 1400)
    assert result.lost["detection"] * 20000 == pytest.approx(1800)
    assert result.lost["transition"] * 20000 == pytest.approx(1380)
    assert result.lost["recompute"] * 20000 == pytest.approx(1400)
    assert result.lost["sub_healthy"] * 20000 == pytest.approx(10000 - 6800)


def runs_from(result) -> list[float]:
    """When work is done again, seconds."""
    return [round(when, 6) for when, waf in result.series if waf]


def test_a_failure_during_a_transition_ends_it_no_sooner():
    """One node of 3 is lost at 1,000 s: 0.3 s to detect, 100 s to regroup, half an iteration again. At 1,010 s a
    connection breaks, which by itself would take 5.3 s."""
    scenario = small(nodes=3, jobs=(Job("a", FLOPS),))
    events = [fail(1000, "n0", "ecc_error"), fail(1010, "n1", "connection_reset")]
    result = simulate(scenario, make(events, until=9000), POLICIES["unicron"])
    assert runs_from(result) == [0, 1000.3 + 100 + ITERATION / 2]


def test_what_is_stopped_in_a_transition_starts_anew():
    """The job moves at 1,000 s, which takes 600 s; the other node goes at 1,010 s, and the first is back 10 s later."""
    job = Job("a", {1: 1e15}, transition={"move": 600.0, "restart": 30.0})
    events = [fail(1000, "n0", "ecc_error"), fail(1010, "n1", "ecc_error"), TraceEvent(1020, "join", "n0")]
    result = simulate(small(nodes=2, jobs=(job,)), make(events, until=9000), POLICIES["unicron"])
    assert runs_from(result) == [0, 1020 + 30 + ITERATION / 2]


def test_a_failure_during_a_recompute_makes_all_of_it_due_again():
    """Fails 1,700 s after the last checkpoint; 30 min to detect, 23 to restart; of 1,700 s to compute again 1,620 are
    done at 6,500 s."""
    scenario = small(nodes=2, jobs=(Job("a", {2: 1e15}),))
    events = [fail(when, "n0", "exited_abnormally") for when in (1700, 6500)]
    result = simulate(scenario, make(events, until=20000), POLICIES["megatron"])
    assert result.lost["recompute"] * 20000 == pytest.approx(1620 + 1700)
    assert runs_from(result) == [0, 6500 + 1800 + 1380 + 1700]


def test_a_planned_change_during_a_recompute_leaves_the_rest_of_it_due():
    """1.8 s to detect, 100 s to restart; of 15 s to compute again 5 are done when the fourth node joins."""
    noticed = 1000 + 1.8
    events = [TraceEvent(noticed + 105, "join", "n0"), fail(1000, "n1", "exited_abnormally")]
    events += [fail(1, f"n{number}", "hardware_warning") for number in (2, 3)]
    scenario = small(jobs=(Job("a", FLOPS),))
    result = simulate(scenario, make(events, until=9000), POLICIES["unicron"])
    assert runs_from(result) == [0, noticed + 105 + 100 + 10]
    assert result.lost["recompute"] * 9000 * 4 == pytest.approx(3 * 5 + 4 * 10)


def test_megatron_takes_a_hot_spare():
    scenario = small(nodes=4, jobs=(Job("a", FLOPS, max_nodes=3),))
    result = simulate(scenario, make([fail(5000, "n0", "node_failed")], until=20000), POLICIES["megatron"])
    assert result.lost["sub_healthy"] == pytest.approx(0, abs=1e-9)
    assert result.lost["transition"] * 20000 == pytest.approx(1380)


def test_transient_failures_leave_nodes_in_place():
    result = simulate(small(), make([fail(1000, "n0", "nccl_timeout")], until=10000), POLICIES["unicron"])
    assert result.plans == 0
    assert result.lost["detection"] == pytest.approx(3 * 3 * ITERATION / 40000)
    assert result.lost["sub_healthy"] == pytest.approx(0, abs=1e-12)


def test_a_spare_that_fails_costs_nothing():
    """Five nodes, four in use: of five names the last is the spare's."""
    warnings = [fail(10, f"n{i}", "hardware_warning") for i in range(5)]  # give the nodes their order, disturb nobody
    trace = make([*warnings, fail(2000, "n4", "ecc_error")], until=9000)
    for name in ("unicron", "megatron", "oobleck"):
        result = simulate(small(nodes=5), trace, POLICIES[name])
        assert result.efficiency == pytest.approx(1.0) and result.failures == ()


def test_unicron_is_best_on_the_recalled_traces():
    for maker in (trace_a, trace_b):
        results = {name: simulate(case(5), maker(), POLICIES[name]).efficiency for name in SYSTEMS}
        assert max(results.values()) - results["unicron"] < 1e-3, results


def test_two_losses_at_once_are_planned_for_once():
    """The second is unnoticed when the plan for the first finds it; later trouble is judged by itself."""
    scenario = small(nodes=6, jobs=(Job("a", FLOPS, max_nodes=3), Job("b", FLOPS, max_nodes=3)))
    names = [fail(1, f"n{i}", "hardware_warning") for i in range(6)]  # gives the nodes their order
    losses = [fail(1000, "n0", "ecc_error"), fail(1000.1, "n3", "lost_connection")]
    result = simulate(
        scenario, make([*names, *losses, fail(5000, "n4", "nccl_timeout")], until=9000), POLICIES["unicron"]
    )
    assert result.plans == 1 and result.failures == (1000, 1000.1, 5000)
    assert result.lost["detection"] == pytest.approx((3 * 0.3 + 3 * 0.2 + 1 * 90) / (6 * 9000))  # b has 1


def test_naive_splits():
    scenario = small(nodes=8, jobs=(Job("x-1b", FLOPS), Job("y-3b", FLOPS, weight=3.0)))
    assert split(scenario, "equally") == {"x-1b": 4, "y-3b": 4}
    assert split(scenario, "by_weight") == {"x-1b": 2, "y-3b": 4}
    assert split(scenario, "by_size") == {"x-1b": 2, "y-3b": 4}
    assert sum(split(small(nodes=7), "equally").values()) <= 7


@pytest.mark.parametrize("number", CASES)
def test_each_job_of_a_case_keeps_a_node_where_it_must_run_and_nothing_better_does(number):
    free, fed = solve(case(number)), solve(case(number, all_run=True))
    assert min(fed.assignment.values()) >= 1 and fed.waf <= free.waf
    assert (min(free.assignment.values()) == 0) == (number >= 3), "these starve four of six"
    others = [solve(case(number, nodes, all_run=True)).assignment.values() for nodes in (4, 6)]
    assert [sum(count > 0 for count in counts) for counts in others] == [4, 6], "as many as there are nodes"


def test_jobs_that_must_run_get_the_best_plan_of_those_that_let_them():
    """Against all plans of three small jobs."""
    rates = {"a": {1: 1.0, 2: 5.0, 3: 9.0, 4: 12.0}, "b": {1: 2.0, 2: 3.0, 3: 3.5}, "c": {2: 1.0, 3: 1.1}}
    for holds in itertools.product(range(3), repeat=3):
        jobs = tuple(
            Job(name, table, nodes=held, must_run=True)
            for (name, table), held in zip(rates.items(), holds, strict=True)
        )
        scenario = small(jobs=jobs, nodes=6)
        plans = [
            plan
            for plan in itertools.product(range(1, 5), repeat=3)
            if sum(plan) <= 6 and all(job.runs(count) for job, count in zip(jobs, plan, strict=True))
        ]
        best = max(sum(scenario.g(job, count) for job, count in zip(jobs, plan, strict=True)) for plan in plans)
        found = solve(scenario).assignment
        assert all(found.values())
        assert sum(scenario.g(job, found[job.name]) for job in jobs) == pytest.approx(best)


@pytest.mark.parametrize("number", CASES)
def test_the_planner_is_best_or_tied_in_every_case(number):
    scenario = case(number)
    ours = solve(scenario).waf
    for how in ("equally", "by_weight", "by_size"):
        assert ours >= sum(job.f(split(scenario, how)[job.name]) for job in scenario.jobs) * (1 - 1e-12)


# ---------------------------------------------------------------------------------------------------- traces


def test_causes_are_those_of_the_severity_table():
    table = tomllib.loads(TABLE_PATH.read_text(encoding="utf-8"))
    severities = {cause["name"]: cause["severity"] for cause in table["cause"]}
    assert severities == {cause.name: cause.severity for cause in CAUSES.values()}
    for cause in table["cause"]:
        assert find(cause.get("paper") or cause["name"]) == CAUSES[cause["name"]]


def test_generators_are_deterministic_and_have_the_counts_of_their_sources():
    for name, maker in GENERATORS.items():
        assert maker(16, 30, 3) == maker(16, 30, 3), name
        assert maker(16, 30, 3).events != maker(16, 30, 4).events, name
    for trace, days, severe, other in ((trace_a(5), 56, 10, 33), (trace_b(5), 7, 26, 80)):
        found = [event.cause.severity for event in trace.events if event.event == "fail"]
        assert trace.until == days * DAY
        assert (found.count(1), len(found) - found.count(1)) == (severe, other)
    year = rsc1(128, 365 * DAY, 1)
    assert sum(event.event == "fail" for event in year.events) == pytest.approx(128 * 365 * 6.5e-3, rel=0.15)
    llama = llama3(2048, 54 * DAY, 1)
    assert sum(event.event == "fail" for event in llama.events) == pytest.approx(419, rel=0.15)
    busy = unicron(16, 100 * DAY, 0, per_node_day=1.0, repair=1.0)
    severe = [event.cause.severity == 1 for event in busy.events if event.event == "fail"]
    assert sum(severe) / len(severe) == pytest.approx(12.2 / 43.4, abs=0.05)


def test_a_node_never_fails_while_it_is_away():
    for seed in range(5):
        away = set()
        for event in trace_of_counts(4, 7 * DAY, 20, 20, seed, "t").events:
            if event.event == "join":
                away.discard(event.node)
            else:
                assert event.node not in away
                away |= {event.node} if event.cause.severity == 1 else set()


def test_written_and_read_again(tmp_path):
    trace = trace_b(1)
    write(trace, tmp_path / "trace-b.csv")
    again = load_trace(tmp_path / "trace-b.csv", until=trace.until)
    assert [(e.event, e.node, e.cause) for e in again.events] == [(e.event, e.node, e.cause) for e in trace.events]
    assert simulate(case(5), again, POLICIES["unicron"]).efficiency == pytest.approx(
        simulate(case(5), trace, POLICIES["unicron"]).efficiency, abs=1e-6
    )


def test_public_churn_traces(tmp_path):
    path = tmp_path / "churn.csv"
    path.write_text("0,add,i-1\n0,add,i-2\n60000,remove,i-1\n120000,add,i-3\n", encoding="utf-8")
    result = simulate(small(nodes=2), load_trace(path), POLICIES["unicron"])
    assert result.ideal_waf == 2e15 and 0.99 < result.efficiency < 1 and result.plans == 2


def test_more_nodes_than_the_cluster_has(tmp_path):
    joins = make([TraceEvent(100, "join", f"x{i}") for i in range(6)], until=1000)
    scenario = small(jobs=(Job("a", {k: 1e15 * k for k in range(1, 9)}),))
    assert simulate(scenario, joins, POLICIES["unicron"]).ideal_waf == 6e15
    with pytest.raises(PlanError, match="more nodes"):
        simulate(small(), make([fail(i, f"n{i}", "ecc_error") for i in range(9)]), POLICIES["unicron"])


def test_a_fault_of_no_length_at_the_very_start_keeps_no_node_away():
    """n0 goes and is back at 0 s; later n1 goes for an hour."""
    later = [fail(7200, "n1", "node_failed"), TraceEvent(10800, "join", "n1")]
    events = [fail(0, "n0", "node_failed"), TraceEvent(0, "join", "n0"), *later]
    trace = make(events, until=20000)
    result = simulate(small(), trace, POLICIES["unicron"])
    assert result.series[-1][1] == result.ideal_waf == 4e15
    assert [span.nodes for span in spans(small(), trace)[0]] == [4, 3, 4]


def test_a_newcomer_in_the_place_of_a_node_that_goes_at_the_very_start_is_there():
    events = [fail(0, "n0", "node_failed"), fail(0, "n1", "hardware_warning"), TraceEvent(0, "join", "x")]
    found, most = spans(small(nodes=2), make(events, until=100))
    assert ({span.nodes for span in found}, most) == ({2}, 2)


def test_who_comes_back_after_its_place_was_taken_gets_another():
    """a goes, d comes in its place, a comes back beside it, d goes, a goes; what fails while it is away is nothing."""
    there = [TraceEvent(1, "join", name) for name in "abc"]
    events = [fail(10, "a", "others"), fail(20, "a", "node_failed"), TraceEvent(30, "join", "d")]
    events += [fail(35, "a", "others"), TraceEvent(40, "join", "a"), fail(50, "d", "node_failed")]
    found, most = spans(small(nodes=3), make([*there, *events, fail(60, "a", "node_failed")], until=70))
    assert [(span.begin, span.nodes) for span in found if span.begin >= 20] == [
        (20, 2),
        (30, 3),
        (40, 4),
        (50, 3),
        (60, 2),
    ]
    assert most == 4


def test_other_refusals(tmp_path):
    with pytest.raises(PlanError, match="unknown policy 'x'"):
        policy("x")
    with pytest.raises(PlanError, match="can't read"):
        load_trace(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(PlanError, match="not a text file"):
        load_trace(tmp_path / "binary")
    with pytest.raises(PlanError, match="end of the replay"):
        make([], until=0)
    with pytest.raises(PlanError, match="nothing to simulate"):
        simulate(small(jobs=(Job("a", {9: 1.0}),)), make([]), POLICIES["unicron"])


# ---------------------------------------------------------------------------------------------------- pictures


def test_pictures(tmp_path):
    results = [simulate(case(5), trace_b(), POLICIES[name]) for name in ("unicron", "megatron")]
    draw(results, 7 * DAY, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "a.png").stat().st_size > 10_000
    draw(results, 7 * DAY, tmp_path / "a.svg", "a title")
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    with pytest.raises(PlanError, match=r"\.png or \.svg"):
        draw(results, 7 * DAY, tmp_path / "a.txt")
    with pytest.raises(PlanError, match="can't write"):
        draw(results, 7 * DAY, tmp_path / "no" / "a.png")
    text = page(results, 7 * DAY, "<title> & co")
    assert "&lt;title&gt; &amp; co" in text and "http" not in text and text.count("<svg") == 2


def test_an_announced_loss_costs_no_detection_and_nothing_is_computed_again():
    scenario = case(5, 16)
    leaves = [TraceEvent(3600.0 * hour, "fail", f"n{hour}", CAUSES["node_failed"]) for hour in range(1, 4)]
    comes = [replace(event, seconds=event.seconds + 1800.0, event="join", cause=None) for event in leaves]
    told = with_notice(make([*leaves, *comes], 6 * 3600.0), 120.0)
    knows, suffers = (simulate(scenario, told, policy(name)) for name in ("unicron-notice", "unicron"))
    assert knows.lost["detection"] == knows.lost["recompute"] == 0.0 and not knows.failures
    assert suffers.lost["detection"] > 0.0 and len(suffers.failures) == 3
    assert knows.efficiency > suffers.efficiency
    late = simulate(scenario, with_notice(told, ITERATION / 2), policy("unicron-notice"))
    assert late.efficiency == suffers.efficiency, "a notice that is shorter than an iteration comes too late"


def test_a_notice_is_seconds():
    with pytest.raises(PlanError, match="notice must be 0"):
        with_notice(make([], 1.0), -1.0)
