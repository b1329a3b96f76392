"""Jobs that are one allocation and give nodes back: when they may, in which order, and what follows a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.questions import told
from tests.support.scenarios import allocation_job, boundary, calls, trains
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.plan.inputs import inputs, why_fixed
from unicron_ctl.controller.plan.reconcile import ENDS_SECONDS
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import datagrams, wire
from unicron_ctl.shared.settings.partitions import PartitionConfig
from unicron_ctl.shared.slurm.slurm_client import Site

SHRINK_N3 = ("shrink", "1", 0, "n3")


def start(
    nodes: int = 3,
    min_nodes: int = 2,
    stated: bool = True,
    no_kill: bool = True,
    shrinks: int = 9,
    weight: float = 1.0,
    **config: Any,
) -> tuple[World, list[FakeAgent]]:
    """Job 1 trains on n1, n2, ... as one allocation, and one node is free."""
    settings = {"min_nodes": min_nodes, "weight": weight, "no_kill": no_kill}
    world, agents = allocation_job(nodes, stated=stated, config=config, **settings)
    world.slurm.site = Site(shrinks=shrinks)
    world.run(1.5)
    trains(world, agents)
    return world, agents


def compete(world: World, weight: float = 9.0, elements: int = 2) -> None:
    """Job 2 is an array, of which the first element starts on the free node."""
    world.slurm.submit("2", elements)
    agent = FakeAgent(world, "2", 0, world.slurm.queue["2", 0]["node"], nodes=elements, weight=weight)
    agent.register()
    world.run(1.5)
    agent.ready()
    world.run(3.0)


def shrink_calls(world: World) -> list[tuple]:
    return calls(world, "shrink")


def ordered_to_end(agent: FakeAgent) -> bool:
    return any(isinstance(message, wire.End) and message.code == 0 for message in agent.heard)


def end_agent(world: World, agent: FakeAgent, hint: bool = True) -> None:
    """The agent obeys and says so; then the plugin says that its task has ended."""
    assert ordered_to_end(agent)
    agent.status(leaving="finished")
    agent.silent = agent.killed = True
    if hint:
        said = datagrams.Hint(v=1, kind="task_exit", job=agent.job, element=0, node=agent.node, status=0)
        world.core.intake.on_hint(said)
    world.run(1.5)


def test_a_node_is_given_back_once_its_ranks_and_its_agent_have_left():
    world, agents = start()
    compete(world)
    assert world.core.state.assignment == {"1": 2, "2": 2} and world.job().leaving == [2]
    assert not shrink_calls(world) and not ordered_to_end(agents[2]), "it still trains"
    boundary(world, 1.5)
    assert set(world.job().members) == {0, 1} and not shrink_calls(world), "its task would be killed, and srun fail"
    end_agent(world, agents[2])
    assert shrink_calls(world) == [SHRINK_N3] and world.slurm.queue["1", 0]["node"] == "n1,n2"
    assert world.slurm.queue["2", 1]["node"] == "n3"
    world.run(90.0)
    job = world.job()
    assert shrink_calls(world) == [SHRINK_N3] and set(job.members) == {0, 1} and not job.failures
    assert job.nodes == ["n1", "n2", "n3"], "the others keep their numbers"
    assert job.allotted == [0, 1] and job.shrunk == 1
    assert "down to 2" in told(world.core, "explain", job="1")["bounds"]


def test_without_the_plugin_a_node_waits_for_what_its_agent_may_still_write():
    world, agents = start()
    compete(world)
    boundary(world, 1.5)
    end_agent(world, agents[2], hint=False)
    world.run(ENDS_SECONDS - 10.0)
    assert not shrink_calls(world)
    world.run(15.0)
    assert shrink_calls(world) == [SHRINK_N3]


def test_the_node_of_the_batch_script_stays_and_all_others_may_go_at_once():
    world, agents = start(nodes=4)
    compete(world, elements=3)
    assert world.job().leaving == [2, 3]
    boundary(world, 1.5)
    end_agent(world, agents[3])
    assert not shrink_calls(world), "without slurmdbd Slurm does it only once"
    end_agent(world, agents[2])
    assert shrink_calls(world) == [("shrink", "1", 0, "n3,n4")] and world.slurm.queue["1", 0]["node"] == "n1,n2"


def test_the_first_node_is_kept_although_its_process_is_the_one_that_is_away():
    world, agents = start()
    agents[0].die(0, 1)
    world.run(8.0)
    assert set(world.job().members) == {1, 2}
    compete(world)
    assert world.job().allotted == [0, 1] and world.job().leaving == [2]


def test_the_first_node_is_kept_although_its_agent_died_and_no_other_goes_in_its_place():
    world, agents = start()
    agents[0].silent = agents[0].killed = True
    world.run(8.0 + ENDS_SECONDS)
    compete(world)
    boundary(world, 1.5)
    job = world.job()
    assert set(job.members) == {1, 2} and job.allotted == [0, 1, 2] and not job.leaving and not shrink_calls(world)


def test_a_plan_that_changes_its_mind_before_the_boundary_takes_nothing():
    world, agents = start()
    compete(world)
    assert world.job().leaving == [2]
    world.slurm.cancel("2")
    world.run(12.0)
    assert world.job().leaving == [] and world.core.state.assignment["1"] == 3
    boundary(world, 1.5)
    world.run(5.0)
    assert not shrink_calls(world) and not ordered_to_end(agents[2])


def test_a_refusal_is_recorded_once_and_the_job_is_let_alone(snapshot):
    world, agents = start()
    world.slurm.refuse_shrink = "scontrol update: no"
    compete(world)
    boundary(world, 1.5)
    end_agent(world, agents[2])
    world.run(400.0)
    assert shrink_calls(world) == [SHRINK_N3]
    refused = [event.record.reason for event in world.log if event.kind == "slurm_error" and event.job == "1"]
    assert [*refused, told(world.core, "explain", job="1")["bounds"]] == snapshot
    assert world.core.state.assignment == {"2": 1}
    assert set(world.job().members) == {0, 1} and world.job().allotted == [0, 1, 2]


@pytest.mark.parametrize(("shown", "calls"), [("n[1-2]", []), ("n[1-3]", [SHRINK_N3])])
def test_what_a_controller_asked_for_before_it_ended_is_done_or_asked_for_again(shown, calls):
    world, _ = start()
    intent = records.SlurmAction(action="shrink", element=0, node="n3", slurm_reason="n1,n2", reason="the plan")
    world.core.append("1", 0, intent)
    world.slurm.queue["1", 0]["node"] = shown
    world.run(3.0)
    assert shrink_calls(world) == calls and world.slurm.queue["1", 0]["node"] in ("n[1-2]", "n1,n2")
    assert not world.core.state.intents and world.job().shrunk == 1 and not world.job().unshrinkable


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"min_nodes": 1, "stated": False}, "--unicron-min-nodes below 3"),
        ({"min_nodes": 3}, "--unicron-min-nodes below 3"),
        ({"no_kill": False}, "--no-kill"),
        ({"shrinks": 0}, "disable_job_shrink"),
        ({"partitions": {"default": PartitionConfig(mode="act", max_weight=9.0, actions=["pin", "hold"])}}, "move"),
    ],
)
def test_a_job_is_left_as_it_is_where_its_owner_srun_slurm_or_the_admin_does_not_let_it(said, why, snapshot):
    world, _ = start(**said)
    compete(world)
    boundary(world, 1.5)
    assert why in why_fixed(world.core.view, world.job())
    assert world.core.state.assignment == {"2": 1} and not world.job().leaving and not shrink_calls(world)
    assert told(world.core, "explain", job="1")["bounds"] == snapshot


def test_in_a_partition_that_is_only_watched_it_is_said_and_not_done():
    world, _ = start(observe=True, partitions={"default": PartitionConfig(max_weight=9.0)})
    compete(world)
    boundary(world, 1.5)
    assert not shrink_calls(world) and len(world.job().members) == 3
    observed = [event for event in world.log if event.kind == "observed"]
    assert ("1", "plan", 2) in [(event.job, event.record.action, event.record.nodes) for event in observed]


def test_the_plan_never_gives_it_more_nodes_than_it_has():
    world, _ = start(weight=50.0)
    world.run(5.0)
    found = inputs(world.core.view, [world.job()])[0]
    assert (found.min_nodes, found.max_nodes, found.alive) == (2, 3, 3)
    assert found.reach == {"n1", "n2", "n3"} and world.core.state.assignment == {"1": 3}


def test_a_node_whose_agent_died_is_given_back_and_does_not_count():
    """Nobody starts an agent there again."""
    world, agents = start(nodes=4)
    agents[3].silent = agents[3].killed = True
    world.run(8.0 + ENDS_SECONDS)
    assert shrink_calls(world) == [("shrink", "1", 0, "n4")] and set(world.job().members) == {0, 1, 2}
    assert world.core.state.assignment == {"1": 3}


def test_nodes_whose_ranks_have_trained_to_the_end_stay_for_the_batch_script():
    world, agents = start()
    compete(world, elements=1)
    agents[2].set(2, state="finished")
    agents[2].status(leaving="finished")
    agents[2].silent = agents[2].killed = True
    world.core.intake.on_hint(datagrams.Hint(v=1, kind="task_exit", job="1", element=0, node="n3", status=0))
    world.run(10.0)
    assert not world.job().over and world.job().agents[2].gone == "finished"
    assert world.core.state.assignment["1"] == 3 and not shrink_calls(world)
