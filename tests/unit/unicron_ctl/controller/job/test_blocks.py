"""Arrays whose elements have several nodes: each node has a number of its own, Slurm is asked for the elements, and a
world takes or leaves an element as a whole."""

from __future__ import annotations

import pytest

from tests.support.scenarios import block_comes, blocks, boundary, calls, failures, power_off, ready
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.model import allocation
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import datagrams
from unicron_ctl.shared.slurm.slurm_client import ElementInfo


def row(element: int, node: str | None, state: str = "RUNNING") -> ElementInfo:
    return ElementInfo("1", element, f"1{element}", state, node, "", "job1", "ann", "", 0, array=True)


def training(**settings) -> tuple[World, dict[int, FakeAgent]]:
    """A job of three elements with two nodes each trains on all of them."""
    world, agents = blocks(**settings)
    ready(world, agents.values(), 1.5)
    assert world.job().phase == "running" and len(world.job().members) == len(agents)
    return world, agents


def end(world: World, agents: dict[int, FakeAgent], *numbers: int) -> None:
    """Slurm ends these agents with their element."""
    for number in numbers:
        agents[number].status(leaving="stopped by SIGTERM")
        agents[number].silent = agents[number].killed = True


def joined(world: World) -> None:
    """All six nodes train, two of them from the next boundary on."""
    boundary(world, 2.0, before=8.0)
    assert set(world.job().members) == set(range(6))


def test_each_node_of_an_element_has_a_number():
    world = World(FakeSlurm(4))
    rows = [row(0, "n[1-2]"), row(1, None, "PENDING"), row(3, "n4,n3")]
    found = {each.element: each.node for each in allocation.by_node(rows, world.core.state.jobs)}
    assert found == {0: "n1", 1: "n2", 2: None, 3: None, 6: "n4", 7: "n3"}
    assert {each.label for each in allocation.by_node(rows, {})} == {"1_0", "1_1", "1_3"}
    alone = [row(0, "n1"), row(2, None, "PENDING")]
    assert [each.element for each in allocation.by_node(alone, {})] == [0, 2]


def test_all_nodes_train_and_the_plan_counts_nodes():
    world, _ = training()
    job = world.job()
    assert (job.settings.block, job.settings.max_nodes, job.allotted) == (2, 6, list(range(6)))
    assert world.core.state.assignment == {"1": 6}, "of seven nodes, for it has whole elements only"
    assert not world.slurm.calls


@pytest.mark.parametrize(("lost", "replica"), [(2, 1), (3, 1), (2, 2)])
def test_an_element_leaves_with_its_lost_node_and_comes_back_whole(lost, replica):
    world, agents = training(replica=replica)
    power_off(world, agents[lost].node)
    world.run(8.0)
    assert set(world.job().members) == {0, 1, 4, 5} and world.job().phase == "running"
    down = [call[3] for call in calls(world, "down")]
    assert down == [agents[lost].node]
    mate = 5 - lost
    end(world, agents, mate)
    world.run(3.0)
    assert failures(world) == [("node", agents[lost].node)], "its mate's end is a part of that"
    pins = calls(world, "pin")
    assert pins[-1] == ("pin", "1", 1, ",".join(sorted({agents[mate].node, "n7"}))), (
        "where its mate was, and a free one"
    )
    block_comes(world, agents, 1, replica=replica)
    agents[2].ready()
    world.run(2.0)
    assert set(world.job().members) == {0, 1, 4, 5}, "one of its nodes alone does not come in"
    agents[3].ready()
    joined(world)
    assert not calls(world, "requeue", "requeue_hold") and not world.job().requeued


def test_an_element_whose_agent_died_is_requeued_as_a_whole_and_once():
    world, agents = training()
    agents[4].silent = agents[4].killed = True
    world.run(8.0)
    assert set(world.job().members) == {0, 1, 2, 3}
    assert [call[:3] for call in calls(world, "requeue")] == [("requeue", "1", 2)]
    end(world, agents, 5)
    world.run(3.0)
    block_comes(world, agents, 2)
    world.run(5.0)
    agents[4].ready()
    agents[5].ready()
    joined(world)
    assert failures(world) == [("agent", "n5")]
    assert len(calls(world, "requeue")) == 1


def test_a_spare_element_takes_the_place_of_one_that_lost_a_node():
    world, agents = blocks(free=0, spares=1)
    ready(world, agents.values(), 1.5)
    assert set(world.job().members) == {0, 1, 2, 3}, "one spare was asked for, and they come two at a time"
    power_off(world, agents[0].node)
    boundary(world, 2.0, before=8.0)
    assert set(world.job().members) == {2, 3, 4, 5}


def test_an_agent_that_leaves_alone_has_its_element_started_again():
    """Slurm lets the element run on as long as one of its agents does."""
    world, agents = training()
    end(world, agents, 4)
    world.run(20.0)
    assert set(world.job().members) == {0, 1, 2, 3} and not calls(world, "requeue")
    world.run(15.0)
    assert [call[:3] for call in calls(world, "requeue")] == [("requeue", "1", 2)]


def test_an_element_that_slurm_ends_with_one_of_its_agents_is_started_again():
    """srun --kill-on-bad-exit: Slurm ends the other agent before anybody has missed the first."""
    world, agents = training()
    agents[4].silent = agents[4].killed = True
    end(world, agents, 5)
    world.slurm.queue["1", 2] |= {"state": "FAILED"}
    world.run(8.0)
    assert set(world.job().members) == {0, 1, 2, 3} and len(failures(world)) == 1
    assert [call[:3] for call in calls(world, "requeue")] == [("requeue", "1", 2)]


def test_both_nodes_of_an_element_that_are_lost_are_set_down():
    world, _ = training()
    power_off(world, "n1", "n2")
    world.run(10.0)
    assert set(world.job().members) == {2, 3, 4, 5}
    assert {call[3] for call in calls(world, "down")} == {"n1", "n2"}
    assert {node for _, node in failures(world)} == {"n1", "n2"}


def test_an_element_that_has_too_few_nodes_is_started_again():
    """With --no-kill Slurm lets it run on without the node."""
    world, _ = training()
    world.slurm.queue["1", 1]["node"] = "n3"
    world.run(3.0)
    assert [call[:3] for call in calls(world, "requeue")] == [("requeue", "1", 1)]


def test_a_job_that_must_shrink_gives_up_a_whole_element():
    world, _ = training()
    world.slurm.submit("2", 3)
    world.run(1.5)
    heavy = FakeAgent(world, "2", 0, "n7", nodes=3, weight=50.0)
    heavy.register()
    ready(world, [heavy], 2.0, 3.0)
    assert world.core.state.assignment == {"1": 4, "2": 3}
    assert world.job().leaving == [4, 5]
    boundary(world, 2.0, before=8.0)
    assert set(world.job().members) == {0, 1, 2, 3}
    assert calls(world, "requeue_hold")[0] == ("requeue_hold", "1", 2, "n5,n6")
    assert {call[3] for call in calls(world, "pin") if call[1] == "2"} == {"n5", "n6"}
    assert not any(isinstance(event.record, records.FailureDetected) for event in world.log)


def test_an_element_of_another_size_is_refused_in_one_line(snapshot):
    world, _ = training()
    world.slurm.submit("1", 4, 2)
    odd = FakeAgent(world, "1", 6, "n7", nodes=6)
    odd.settings.block = 3
    world.slurm.queue["1", 3] |= {"state": "RUNNING", "node": "n7,n6,n5", "reason": ""}
    odd.register()
    world.run(1.5)
    said = {message.reason for who, message in world.sent if who == odd.agent and hasattr(message, "final")}
    assert said == snapshot


def test_a_datagram_is_of_the_agent_on_its_node():
    world, _ = training()
    hint = datagrams.Hint(v=1, kind="task_exit", job="1", element=1, node="n4", status=9)
    world.core.intake.on_hint(hint)
    assert [number for number, one in world.core.view.live.jobs["1"].agents.items() if one.task_status == 9] == [3]
