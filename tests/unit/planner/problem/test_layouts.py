"""Several layouts of one job: how fast each is on how many nodes, and when a restart into another is worth it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_planner.ahead.lookahead import Lookahead
from unicron_planner.problem import layouts, megatron_costs
from unicron_planner.problem.layouts import JobFacts, Split
from unicron_planner.problem.megatron_costs import Gpt, Hardware, Parallel
from unicron_planner.problem.objective import Job, PlanError, Scenario
from unicron_planner.problem.scenario import from_dict
from unicron_planner.solver.explain import explain
from unicron_planner.solver.solve import solve

SMALL = Gpt(layers=24, hidden=2048, heads=16, global_batch=64)
LARGE = Gpt(layers=48, hidden=8192, heads=64, global_batch=64)  # 39 billion parameters
PAIR, ONE = Split("TP2", 2), Split("TP1")


def facts(model: Gpt | None = None, gpus: int = 8, **more) -> JobFacts:
    return JobFacts(gpus, 1e15, model, Hardware(gpus=gpus), **more)


def job(tables: dict[str, dict[int, float]], layout: str | None, nodes: int, restart: float = 600.0, **more) -> Job:
    return Job("a", layouts=tables, layout=layout, nodes=nodes, transition={"restart": restart}, **more)


def scenario(*jobs: Job, nodes: int, hours: float = 10.0) -> Scenario:
    return Scenario(nodes, jobs, mtbf_node_hours=hours, transition_seconds=10.0)


# ------------------------------------------------------------ how fast
def test_the_best_layout_by_size():
    """The more nodes, the more the reduce of the gradients weighs, which larger replicas have less of."""
    splits = [Split("PP4", 1, 4), Split("TP2 PP4", 2, 4), Split("TP8 PP4", 8, 4)]
    found = layouts.rates(splits, facts(replace(SMALL, global_batch=512)), {}, range(1, 9))
    assert max(found, key=lambda name: found[name][1]) == "PP4"
    assert max(found, key=lambda name: found[name][8]) == "TP2 PP4"
    assert found["TP8 PP4"][3] == 0.0 < found["TP8 PP4"][4] == found["TP8 PP4"][5]


def test_memory_rules_layouts_out():
    """The optimizer's state is shared by the replicas: two of TP8 have room where one has not."""
    splits = [Split("TP2", 2), Split("TP8", 8), Split("TP8 PP4", 8, 4)]
    found = layouts.rates(splits, facts(LARGE, recompute=True), {}, range(1, 9))
    assert list(found) == ["TP8", "TP8 PP4"]
    assert [nodes for nodes, rate in found["TP8"].items() if rate] == [2, 3, 4, 5, 6, 7, 8]
    assert [nodes for nodes, rate in found["TP8 PP4"].items() if rate] == [4, 5, 6, 7, 8]
    roomy = replace(facts(LARGE, recompute=True), hardware=Hardware(memory=float("inf")))
    assert len(layouts.rates(splits, roomy, {}, range(1, 9))) == 3


def test_the_bubble_of_a_pipeline():
    """(p - 1) / m of the work, and a v-th of it interleaved (arXiv 2104.04473, section 2.2)."""

    def compute(pp: int, virtual: int = 1) -> float:
        return megatron_costs.parts(SMALL, Hardware(), Parallel(1, pp, 1, virtual=virtual))[0]

    ideal, micro_batches = compute(1) / 4, SMALL.global_batch
    assert compute(4) / ideal - 1 == pytest.approx(3 / micro_batches)
    assert compute(4, virtual=2) / ideal - 1 == pytest.approx(3 / micro_batches / 2)


def test_interleaving_costs_memory_and_messages():
    plain, interleaved = Parallel(1, 4, 1), Parallel(1, 4, 1, virtual=2)
    assert megatron_costs.memory(SMALL, interleaved) > megatron_costs.memory(SMALL, plain)
    assert megatron_costs.parts(SMALL, Hardware(), interleaved)[2] > megatron_costs.parts(SMALL, Hardware(), plain)[2]


def test_tensor_parallelism_over_nodes_goes_by_the_network():
    within, across = Parallel(8, 1, 1), Parallel(8, 1, 1)
    one = megatron_costs.parts(SMALL, Hardware(gpus=8), within)[1]
    four = megatron_costs.parts(SMALL, Hardware(gpus=4), across)[1]
    assert four > 5 * one


def test_what_was_measured_counts_and_scales_the_rest():
    splits = [Split("TP8", 8), Split("TP4", 4)]
    guess = layouts.rates(splits, facts(SMALL), {}, range(1, 5))
    found = layouts.rates(splits, facts(SMALL), {"TP8": {2: guess["TP8"][2] / 4}}, range(1, 5))
    assert found["TP8"][2] == guess["TP8"][2] / 4
    assert found["TP8"][4] == pytest.approx(guess["TP8"][4] / 4, rel=0.3)
    assert found["TP4"][2] < guess["TP4"][2] / 2, "what one layout tells of the machine holds for the others, too"


def test_without_a_model_each_gpu_counts_the_same_and_the_measured_one_wins():
    found = layouts.rates([PAIR, ONE], facts(gpus=1), {}, range(1, 4))
    assert found["TP2"] == {1: 0.0, 2: found["TP1"][2], 3: found["TP1"][2]}, "a GPU without a replica brings nothing"
    found = layouts.rates([PAIR, ONE], facts(gpus=1), {"TP2": {2: 4.0}}, range(1, 4))
    assert found["TP2"][2] == 4.0 > found["TP1"][2] > 3.0


def test_a_layout_that_no_size_can_run_is_not_there():
    assert list(layouts.rates([Split("PP4", 1, 4), ONE], facts(gpus=1), {}, range(1, 4))) == ["TP1"]


# ------------------------------------------------------------ sharded parameters
def test_shards_compute_micro_batches_of_their_own():
    """Four ranks compute as long as four replicas of one."""
    sharded, apart = Parallel(1, 1, 1, shard=4), Parallel(1, 1, 4)
    assert megatron_costs.parts(SMALL, Hardware(), sharded)[0] == megatron_costs.parts(SMALL, Hardware(), apart)[0]
    assert Split("TP2 F4", 2, shard=4).gpus == 8


def test_each_round_gathers_the_parameters_twice_and_scatters_the_gradients():
    """Within a node that is quicker; between replicas each rank reduces its shard alone."""
    one = Parallel(1, 1, 2, shard=4)
    _, within, between = megatron_costs.parts(SMALL, Hardware(gpus=4), one)
    _, across, _ = megatron_costs.parts(SMALL, Hardware(gpus=2), one)
    assert within == pytest.approx(SMALL.global_batch / 8 * 8 * SMALL.parameters * 3 / 4 / Hardware().nvlink)
    assert across == pytest.approx(within * Hardware().nvlink / Hardware().network)
    assert between == pytest.approx(megatron_costs.parts(SMALL, Hardware(), Parallel(1, 1, 2))[2] / 4)


def test_more_shards_make_room_for_a_model():
    """Of 39 billion parameters, at 18 bytes each, a GPU holds a sixteenth and no eighth. More replicas make no room."""
    splits = [Split(f"F{shard}", shard=shard) for shard in (2, 8, 16, 32)]
    found = layouts.rates(splits, facts(LARGE, recompute=True), {}, range(1, 9))
    assert list(found) == ["F16", "F32"]
    assert [nodes for nodes, rate in found["F16"].items() if rate] == [2, 3, 4, 5, 6, 7, 8]
    assert found["F16"][2] == found["F16"][3], "a replica is two nodes"
    assert [nodes for nodes, rate in found["F32"].items() if rate] == [4, 5, 6, 7, 8]


def test_without_need_nobody_shards_further():
    """Every rank computes as much, and has less to gather."""
    splits = [Split(f"F{shard}", shard=shard) for shard in (2, 4)]
    found = layouts.rates(splits, facts(SMALL, gpus=1), {}, range(1, 9))
    assert all(found["F2"][nodes] > found["F4"][nodes] for nodes in range(2, 9))


def test_a_hidden_size_that_the_shards_do_not_divide_rules_them_out():
    odd = replace(SMALL, hidden=2046, heads=1)
    found = layouts.rates([Split("F2", shard=2), Split("F4", shard=4)], facts(odd, gpus=1), {}, range(1, 5))
    assert list(found) == ["F2"]


def test_no_replica_is_without_a_micro_batch():
    few = replace(SMALL, global_batch=6)
    assert facts(few, gpus=1).parallel(Split("F4", shard=4), 16).dp == 2


def test_the_plan_changes_the_shards_with_the_nodes():
    """F4 is the quicker one, and four ranks are a replica: three nodes of two ranks hold one, or three of F2."""
    tables = {"F4": {2: 1.1e15, 3: 1.1e15, 4: 2.2e15}, "F2": {1: 0.5e15, 2: 1e15, 3: 1.5e15, 4: 2e15}}
    plan = solve(scenario(job(tables, "F4", 4, lost_worker=True), nodes=3))
    assert (plan.assignment, plan.layouts) == ({"a": 3}, {"a": "F2"})
    back = solve(scenario(job(tables, "F2", 3), nodes=4))
    assert (back.assignment, back.layouts) == ({"a": 4}, {"a": "F4"})


# ------------------------------------------------------------ what the plan makes of it
TABLES = {"TP2": {1: 0.0, 2: 2e15, 3: 2e15}, "TP1": {1: 0.9e15, 2: 1.8e15, 3: 2.7e15}}


def test_starts_in_the_best_layout_and_the_first_where_several_are():
    assert solve(scenario(job(TABLES, None, 0), nodes=2)).layouts == {"a": "TP2"}
    assert solve(scenario(job(TABLES, None, 0), nodes=3)).layouts == {"a": "TP1"}
    same = {"PP2": {2: 1e15}, "TP2": {2: 1e15}}
    assert solve(scenario(job(same, None, 0), nodes=2)).layouts == {"a": "PP2"}


def test_what_is_left_after_a_loss_goes_on_in_another_layout(snapshot):
    plan = solve(scenario(job(TABLES, "TP2", 2, lost_worker=True), nodes=1))
    assert (plan.assignment, plan.layouts, plan.waf) == ({"a": 1}, {"a": "TP1"}, 0.9e15)
    assert plan.reasons["a"] == snapshot


def test_a_small_gain_is_not_worth_a_restart():
    """Another node is to be had: TP1 would use it, TP2 cannot."""
    small = {"TP2": {2: 2e15, 3: 2e15}, "TP1": {2: 1.8e15, 3: 2.05e15}}
    at = scenario(job(small, "TP2", 2), nodes=3)  # 12,000 s until a failure: 2.5 % of that are 300 s
    assert solve(at).layouts == {"a": "TP2"} and solve(at).assignment == {"a": 2}
    cheap = scenario(job(small, "TP2", 2, restart=200.0), nodes=3)
    assert (solve(cheap).layouts, solve(cheap).assignment) == ({"a": "TP1"}, {"a": 3})
    large = scenario(job(TABLES, "TP2", 2), nodes=3)
    assert (solve(large).layouts, solve(large).assignment) == ({"a": "TP1"}, {"a": 3})


def test_the_same_size_in_another_layout(snapshot):
    tables = {"TP2": {2: 1e15}, "PP2": {2: 1.5e15}}
    plan = solve(scenario(job(tables, "TP2", 2), nodes=2))
    assert plan.layouts == {"a": "PP2"}
    assert plan.reasons["a"] == snapshot
    assert explain(scenario(job(tables, "TP2", 2), nodes=2), "a").nodes == 2


def test_the_table_of_next_events_knows_layouts():
    at = scenario(job(TABLES, "TP2", 2), Job("b", {1: 1e15}, nodes=1, weight=9.0), nodes=3)
    entry = Lookahead(at).get(("lost", "a"))
    assert entry.plan == solve(entry.scenario)
    assert entry.plan.layouts == {"a": "TP1"}


def test_in_a_file():
    data = {
        "cluster": {"nodes": 1},
        "job": [{"name": "a", "nodes": 2, "layout": "TP2", "layouts": {"TP2": {"2": 2e15}, "TP1": {"1": 9e14}}}],
    }
    read = from_dict(data)
    assert solve(read).to_dict()["layouts"] == {"a": "TP1"}
    for change, said in (
        ({"layouts": {"TP2": {}}}, "job a as TP2 has no throughput: give flops = { nodes = FLOP/s, ... }"),
        ({"layouts": 3}, "job a: layouts must be a table"),
    ):
        with pytest.raises(PlanError) as error:
            from_dict({**data, "job": [{**data["job"][0], **change}]})
        assert str(error.value) == said


# ------------------------------------------------------------ whatever the figures
RATES = st.sampled_from([0.0, 1e14, 2e14, 2.1e14, 5e14, 1.7e15])


@st.composite
def relaid(draw, name: str = "a") -> Job:
    names = draw(st.lists(st.sampled_from(["TP4", "TP2", "PP2", "TP1"]), min_size=1, max_size=3, unique=True))
    tables = {one: draw(st.dictionaries(st.integers(1, 5), RATES, min_size=1)) for one in names}
    return Job(
        name,
        layouts=tables,
        layout=draw(st.sampled_from([None, *names])),
        nodes=draw(st.integers(0, 5)),
        lost_worker=draw(st.booleans()),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        transition={"restart": draw(st.sampled_from([0.0, 60.0, 5000.0]))},
    )


@settings(max_examples=cases(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(relaid("a"), relaid("b"), st.integers(0, 7), st.sampled_from([0.1, 10.0, 1000.0]))
def test_the_best_of_all_and_never_worse_than_to_stay(one, other, nodes, hours):
    at = Scenario(nodes, (one, other), mtbf_node_hours=hours)
    plan = solve(at)
    best = max(
        at.g_in(one, a, first) + at.g_in(other, b, second)
        for a, b in itertools.product(one.options(nodes), other.options(nodes))
        if a + b <= nodes
        for first in (list(one.layouts) if a else [None])
        for second in (list(other.layouts) if b else [None])
    )
    assert plan.objective == pytest.approx(best, rel=1e-9, abs=1e-3)
    assert sum(plan.assignment.values()) <= nodes
    for job in (one, other):
        size, layout = plan.assignment[job.name], plan.layouts.get(job.name)
        assert bool(size) == (layout is not None)
        if layout is not None and job.layout is not None:
            assert at.g_in(job, size, layout) >= at.g_in(job, size, job.layout)


@settings(max_examples=cases(100), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 1, 2, 4])),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, SMALL, LARGE]),
    st.integers(1, 8),
    st.floats(0.1, 10.0),
)
def test_never_a_layout_that_does_not_fit(shapes, gpus, model, nodes, scale):
    splits = [Split(f"TP{tp} PP{pp} F{shard}", tp, pp, 1, shard) for tp, pp, shard in shapes]
    at = facts(model, gpus)
    first = splits[0]
    least = layouts.smallest(first, gpus)
    found = layouts.rates(splits, at, {first.name: {least: scale * 1e14}}, range(1, nodes + 1))
    for split in splits:
        for size, rate in found.get(split.name, {}).items():
            if rate and not (split is first and size >= least):  # what was measured did fit
                assert size * gpus >= split.gpus
                assert model is None or at.parallel(split, size) is not None
