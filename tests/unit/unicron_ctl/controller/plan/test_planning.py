"""The planner's inputs from what jobs have and have shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.world import FakeAgent, World
from unicron_ctl.controller.model.job_rules import on_step
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.plan.inputs import inputs
from unicron_ctl.controller.plan.planning import JobInput, plan, scenario, throughput
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.protocol.structs import Settings

job_inputs = st.builds(
    lambda name, weight, low, more, nodes, lost, rate: JobInput(
        name,
        weight,
        low,
        low + more,
        min(nodes, low + more),
        max(0, min(nodes, low + more) - lost),
        rate,
        max(1, nodes) if rate else 0,
    ),
    st.sampled_from("abcd"),
    st.floats(0.1, 10),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 1),
    st.sampled_from([0.0, 1e9, 3e9]),
)


@given(st.lists(job_inputs, min_size=1, max_size=4, unique_by=lambda j: j.job), st.integers(0, 12))
def test_a_plan_fits_and_never_takes_a_running_jobs_last_nodes(jobs, spare):
    nodes = sum(job.alive for job in jobs) + spare
    found = plan(jobs, nodes, 1000.0, 5.0)
    assert set(found.assignment) == {job.job for job in jobs} and set(found.reasons) == set(found.assignment)
    assert sum(found.assignment.values()) <= nodes
    for job in jobs:
        assert 0 <= found.assignment[job.job] <= job.max_nodes
        assert found.assignment[job.job] >= 1 or job.alive == 0


def test_a_lost_node_is_replaced_from_the_lighter_job():
    jobs = [JobInput("heavy", 2.0, 1, 2, 2, 1, 2e9, 2), JobInput("light", 1.0, 1, 2, 2, 2, 2e9, 2)]
    assert plan(jobs, 3, 1000.0, 5.0).assignment == {"heavy": 2, "light": 1}


def test_an_unmeasured_job_is_taken_for_an_average_one():
    jobs = [JobInput("new", 1.0, 1, 3, 0, 0), JobInput("old", 1.0, 1, 3, 2, 2, 4e9, 2)]
    assert dict(scenario(jobs, 4, 1000.0, 5.0).job("new").flops) == {1: 2e9, 2: 4e9, 3: 6e9}


def test_a_node_that_completes_no_replica_brings_nothing_and_stays_while_nobody_can_use_it():
    pair = JobInput("pair", 1.0, 1, 6, 4, 3, 4e9, 4, unit=2)
    rates = dict(scenario([pair], 6, 1000.0, 5.0).job("pair").flops)
    assert rates == {1: 0.0, 2: 2e9, 3: 2e9, 4: 4e9, 5: 4e9, 6: 6e9}
    assert plan([pair], 3, 1000.0, 5.0).assignment == {"pair": 3}, "its odd node waits with its state"
    other = JobInput("other", 3.0, 1, 2, 1, 1, 1e9, 1)
    assert plan([pair, other], 4, 1000.0, 5.0).assignment == {"pair": 2, "other": 2}


def test_a_running_job_keeps_a_whole_replica():
    heavy = JobInput("heavy", 100.0, 1, 4, 4, 4, 4e9, 4)
    pair = JobInput("pair", 1.0, 1, 4, 2, 2, 2e9, 2, unit=2)
    assert plan([heavy, pair], 4, 1000.0, 5.0).assignment == {"heavy": 2, "pair": 2}


TABLES = {"TP2": {1: 0.0, 2: 2e9, 3: 2e9}, "TP1": {1: 0.9e9, 2: 1.8e9, 3: 2.7e9}}


def relaid(name: str, nodes: int, alive: int, restart: float = 100.0, weight: float = 1.0) -> JobInput:
    more = {"layouts": TABLES, "layout": "TP2", "restart_seconds": restart, "owner": "ann"}
    return JobInput(name, weight, 1, 3, nodes, alive, unit=1, **more)


def test_the_layout_comes_with_the_nodes_and_is_charged_with_its_restart():
    found = plan([relaid("a", 2, 2)], 3, 1000.0, 5.0)
    assert (found.assignment, found.layouts) == ({"a": 3}, {"a": "TP1"})
    found = plan([relaid("a", 2, 2, restart=1e6)], 3, 1000.0, 5.0)  # 1,200,000 s until a failure, and 35 % more
    assert (found.assignment, found.layouts) == ({"a": 2}, {"a": "TP2"})


def test_layout_kept_with_last_node():
    found = plan([relaid("a", 1, 1, weight=0.1), relaid("b", 1, 1)], 1, 1000.0, 5.0)
    assert found.assignment == {"a": 1, "b": 1} and found.layouts["a"] == "TP2"


def test_a_running_job_that_its_share_does_not_hold_keeps_its_state_and_no_more(snapshot):
    """Its minimum is 6, and 4 nodes are its owner's: where another wants all of its own, it keeps one whole replica."""
    large = JobInput("m", 1.0, 6, 8, 8, 8, 8e9, 8, unit=2, owner="mallory")
    victim = JobInput("v", 1.0, 1, 8, 0, 0, owner="victim")
    found = plan([large, victim], 8, 1000.0, 5.0)
    assert found.assignment == {"m": 2, "v": 6}
    assert found.reasons["m"] == snapshot
    assert plan([large], 8, 1000.0, 5.0).assignment == {"m": 8}


def test_a_speed_that_is_said_takes_no_node_of_another_user():
    for rate in (0.4e15, 0.42e15, 1e17):
        jobs = [
            JobInput("v", 1.0, 1, 8, 4, 4, 4 * 0.4e15, 4, owner="victim"),
            JobInput("m", 1.0, 1, 8, 4, 4, 4 * rate, 4, owner="mallory"),
        ]
        assert plan(jobs, 8, 1000.0, 5.0).assignment == {"v": 4, "m": 4}


def test_what_an_owner_has_elsewhere_is_a_part_of_its_share():
    jobs = [JobInput(name, 1.0, 1, 8, 0, 0, owner=name) for name in ("ann", "bob")]
    assert plan(jobs, 6, 1000.0, 5.0, {"ann": 2}).assignment == {"ann": 2, "bob": 4}


def test_without_slurm_a_job_is_planned_for_no_more_nodes_than_it_has_agents():
    """Defect: a job may claim four million nodes, and a table for each of them took seconds and gigabytes."""
    world = World()
    for element in range(2):
        FakeAgent(world, "1", element, f"n{element + 1}", nodes=1 << 22, min_nodes=1 << 21).register()
    (found,) = inputs(world.core.view, [world.job("1")])
    assert (found.min_nodes, found.max_nodes, found.trains) == (2, 2, 2) and len(throughput(found, 1.0)) == 2


def test_a_step_that_is_reported_after_the_loss_of_all_members_measures_nothing() -> None:
    """Defect: it measured a throughput of no nodes, and a division by zero ended each planning."""
    job = JobState("1", Settings(name="x", user="ann"), 0.0)
    step = {"iteration": 1, "loss": 1.0, "seconds": 1.0, "flops": 1e15, "train_iterations": 9}
    for number, nodes in enumerate((2, 0)):
        record = records.Step(ranks=nodes, nodes=nodes, micro_batches=8, computed=8, **step)
        on_step(job, Event(number + 1, 1.0 + number, "1", 1, record), record)
    assert job.measured == {2: 1e15}
