"""A job that is one allocation and has too few nodes left for a world: it is requeued or ended."""

from __future__ import annotations

import pytest

from tests.support.questions import told
from tests.support.scenarios import allocation_row, calls, power_off, trains
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.plan.reconcile import QUIET_SECONDS, REFUSED_SECONDS
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.settings.partitions import PartitionConfig

AGAIN = ("requeue", "1", 0)
NO_REQUEUE = "scontrol requeue 1: Requested operation is presently disabled"


def requeue_calls(world: World) -> list[tuple]:
    return [call[:3] for call in calls(world, "requeue", "cancel")]


def plain_agents(world: World, nodes: tuple[str, ...], least: int) -> list[FakeAgent]:
    """An agent on each of the nodes of job 1, in restart mode."""
    agents = [FakeAgent(world, "1", place, node, nodes=3, min_nodes=least) for place, node in enumerate(nodes)]
    for agent in agents:
        agent.settings.allocation = agent.settings.min_stated = agent.fenced = True
        agent.settings.mode = "restart"
        agent.register()
    world.run(1.5)
    return agents


def lose_node(least: int = 3) -> tuple[World, list[FakeAgent]]:
    """Job 1 trains on three nodes, and the last one falls silent."""
    world = World(FakeSlurm(4))
    world.slurm.queue["1", 0] = allocation_row("n[1-3]")
    agents = plain_agents(world, ("n1", "n2", "n3"), least)
    trains(world, agents)
    power_off(world, "n3")
    return world, agents


def stop(agents: list[FakeAgent]) -> None:
    """Their processes end for the lost node, and wait for another world."""
    for agent in agents[:2]:
        agent.ready()


def notes(agents: list[FakeAgent]) -> set[str]:
    return {message.text for agent in agents for message in agent.heard if isinstance(message, wire.Note)}


def test_a_job_below_its_minimum_is_requeued_once_slurm_has_taken_the_node_and_trains_on_the_new_ones(snapshot):
    """Defect: it waited on its paid nodes without an end, and nothing said for what."""
    world, agents = lose_node()
    world.run(8.0)
    stop(agents)
    world.run(60.0)
    waits = told(world.core, "explain", job="1")["waits"]
    assert waits and not [call[:3] for call in calls(world, "requeue", "cancel")], "the node may come back"
    world.slurm.queue["1", 0]["node"] = "n[1-2]"
    world.run(5.0)
    assert requeue_calls(world)[:1] == [AGAIN] and [waits, notes(agents)] == snapshot
    for agent in agents:
        agent.silent = agent.killed = True
    world.slurm.queue["1", 0] = allocation_row("n[1-2,4]", restarts=1)
    world.run(1.5)
    trains(world, plain_agents(world, ("n1", "n2", "n4"), 3))
    assert requeue_calls(world) == [AGAIN] and not told(world.core, "explain", job="1")["waits"]


def test_a_node_that_only_stops_answering_is_waited_for_before_the_requeue():
    world, agents = lose_node()
    world.run(8.0)
    stop(agents)
    world.run(QUIET_SECONDS - 20.0)
    assert not requeue_calls(world) and world.job().phase == "forming"
    world.run(30.0)
    assert requeue_calls(world)[:1] == [AGAIN]


@pytest.mark.parametrize(("said", "seconds"), [(NO_REQUEUE, 10.0), ("scontrol requeue 1: no answer", REFUSED_SECONDS)])
def test_a_job_that_slurm_does_not_requeue_ends_with_the_reason(said, seconds, snapshot):
    world, agents = lose_node()
    world.slurm.refuse_requeue = said
    world.slurm.queue["1", 0]["node"] = "n[1-2]"
    world.run(8.0)
    stop(agents)
    world.run(seconds + 80.0)
    ended = world.job().ended
    assert ended is not None and ended.code == 1 and ended.reason == snapshot
    assert any(isinstance(message, wire.End) and ended.reason in message.reason for message in agents[0].heard)


def test_a_job_ends_where_the_admin_allows_no_requeue_and_one_above_its_minimum_goes_on(snapshot):
    world, agents = lose_node()
    world.core.config.partitions["default"] = PartitionConfig(mode="act", actions=["drain"])
    world.slurm.queue["1", 0]["node"] = "n[1-2]"
    world.run(8.0)
    stop(agents)
    world.run(80.0)
    ended = world.job().ended
    assert ended is not None and ended.code == 1 and ended.reason == snapshot and not requeue_calls(world)
    world, agents = lose_node(least=2)
    world.slurm.queue["1", 0]["node"] = "n[1-2]"
    world.run(8.0)
    stop(agents)
    world.run(80.0)
    assert set(world.job().members) == {0, 1} and not requeue_calls(world)


def test_a_new_world_names_the_lost_node_and_no_end_that_followed_from_it(snapshot):
    """Defect: "slot 0 exited with 1", which it did because the node of another rank was gone."""
    world, agents = lose_node(least=2)
    agents[0].die(0, 1, last_line="RuntimeError: Connection closed by peer")
    world.run(8.0)
    stop(agents)
    world.slurm.queue["1", 0]["node"] = "n[1-2]"
    world.run(80.0)
    plan = world.job().plan
    assert plan is not None and plan.members == [0, 1]
    assert plan.reason == snapshot


def test_an_allocation_waits_for_no_other_node_once_the_lost_ones_processes_are_gone():
    """Defect: it waited `forming_settle_seconds` for a node that Slurm does not replace."""
    world = World(FakeSlurm(4), forming_settle_seconds=60.0)
    world.slurm.queue["1", 0] = allocation_row("n[1-3]")
    agents = plain_agents(world, ("n1", "n2", "n3"), least=2)
    for agent in agents:
        agent.ready()
    world.run(3.0)
    assert sorted(world.job().members) == [0, 1, 2]
    power_off(world, "n3")
    world.run(4.0)
    stop(agents)
    world.slurm.node_states["n3"] = {"DOWN"}
    world.slurm.reasons["n3"] = "power"
    world.run(6.0)
    assert sorted(world.job().members) == [0, 1]
