"""Elements that are to end, as Slurm has told their agents: their ranks leave at the next boundary, and nobody computes
anything again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.plain_agent import PlainAgent
from tests.support.scenarios import boundary
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.model.cluster_state import Take
from unicron_ctl.controller.model.requests import Action
from unicron_ctl.controller.nodes.bounds import Bounds
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.slurm.slurm_client import UNSAID


def started(nodes: int = 3, **settings) -> tuple[World, list[FakeAgent]]:
    world = World(FakeSlurm(nodes + 2))
    world.slurm.submit("1", nodes)
    agents = world.start_job(nodes=nodes, **settings)
    world.run(3.0)
    assert len(world.job().members) == nodes
    world.iterate("1", 0)
    return world, agents


def notice(*agents: FakeAgent) -> None:
    for agent in agents:
        agent.noticed = True
        agent.status()


def released(agent: FakeAgent) -> list[tuple[bool, bool]]:
    """(out, stay) of each word that the agent need not wait any more."""
    return [(message.out, message.stay) for message in agent.heard if isinstance(message, wire.Release)]


def ends(world: World, *elements: int) -> None:
    """Slurm ends these elements: somebody has cancelled them."""
    for element in elements:
        world.slurm.queue["1", element]["state"] = "COMPLETING"


def test_the_ranks_leave_at_the_next_boundary_and_their_agent_is_released_then():
    world, agents = started()
    ends(world, 1)
    notice(agents[1])
    world.run(0.3)
    assert world.job().phase == "offering" and set(world.job().members) == {0, 1, 2} and not released(agents[1])
    boundary(world, 0.5)
    assert set(world.job().members) == {0, 2} and not world.job().failures
    world.run(1.5)
    assert released(agents[1])[:1] == [(True, False)] and not world.slurm.calls
    agents[1].status("left by SIGTERM")
    agents[1].silent = True
    world.run(8.0)
    assert not world.job().failures and set(world.job().members) == {0, 2} and not world.job().noticed


@pytest.mark.by_hand
def test_what_slurm_preempts_is_requeued_once_it_has_left_and_stays_until_then():
    """The preemption leaves the job's share of requeues to its failures."""
    world, agents = started()
    world.core.state.taken.extend(Take(world.now - 60.0, "requeue", "1", 0) for _ in range(20))
    assert Bounds(world.core.view).refuse(Action("requeue", "1", 1, "", "")), "of an element that nobody preempts"
    notice(agents[1])
    world.run(0.3)
    assert not world.slurm.calls
    boundary(world, 0.5)
    world.run(1.5)
    assert released(agents[1])[:1] == [(True, True)], "it would not be requeued if it ended by itself"
    assert [call[:3] for call in world.slurm.calls][:1] == [("requeue", "1", 1)]
    assert [take.preempted for take in world.core.state.taken][19:21] == [False, True]


def test_what_is_preempted_may_wait_for_the_grace_time_of_its_partition():
    world, agents = started()
    world.slurm.site = replace(UNSAID, grace={"main": 120.0})
    notice(agents[1], agents[2])
    ends(world, 2)
    world.run(1.5)
    told = [[m.seconds for m in agent.heard if isinstance(m, wire.Grace)][:1] for agent in agents]
    assert told == [[], [120.0], []], "who is cancelled has KillWait"


def test_it_comes_back_with_another_agent():
    world, agents = started()
    notice(agents[1])
    world.run(0.3)
    boundary(world, 0.5)
    agents[1].status("left by SIGTERM")
    agents[1].silent = True
    world.run(2.0)
    world.run(4.0)
    again = FakeAgent(world, "1", 1, world.slurm.queue["1", 1]["node"], nodes=3)
    again.register()
    again.ready()
    world.run(4.0)
    boundary(world, 0.5)
    assert set(world.job().members) == {0, 1, 2}


@pytest.mark.parametrize("taken", [True, False])
def test_plain_programs_do_not_wait_for_what_was_asked_to_end(taken):
    """Defect: its element waited, pinned, for the node that the other job had got, and the others waited with it."""
    world = World(FakeSlurm(3), forming_settle_seconds=80.0)
    world.slurm.submit("1", 3)
    agents = [PlainAgent(world, "1", element, f"n{element + 1}", nodes=3) for element in range(3)]
    for agent in agents:
        agent.register()
        agent.ready()
    world.run(3.0)
    assert len(world.job().members) == 3
    if taken:
        world.slurm.node_states["n3"] = {"IDLE", "PLANNED"}
    notice(agents[2])
    while world.slurm.queue["1", 2]["state"] == "RUNNING":
        world.run(0.05)
    agents[2].status("left by SIGTERM")
    agents[2].silent = True
    world.run(1.0)
    assert world.job().phase == "running" and set(world.job().members) == {0, 1}
    assert world.slurm.queue["1", 2]["pin"] == "n3"
    assert world.slurm.queue["1", 2]["state"] == ("PENDING" if taken else "RUNNING")
    world.slurm.node_states["n3"] = {"IDLE"}
    world.run(40.0)
    again = PlainAgent(world, "1", 2, "n3", nodes=3)
    again.register()
    again.ready()
    world.run(12.0)
    assert set(world.job().members) == {0, 1, 2} and not world.job().failures


def test_where_all_are_to_end_nobody_waits():
    world, agents = started()
    ends(world, 0, 1, 2)
    notice(*agents[:2])
    world.run(0.1)
    notice(agents[2])
    world.run(1.5)
    assert all(released(agent)[:1] == [(False, False)] for agent in agents)


def test_an_agent_that_does_not_train_is_released_at_once():
    world, _ = started()
    world.slurm.submit("2", 2)
    newcomer = FakeAgent(world, "2", 0, "n4", nodes=2, min_nodes=2)
    other = FakeAgent(world, "2", 1, "n5", nodes=2, min_nodes=2)
    for agent in (newcomer, other):
        agent.register()
    world.run(1.5)
    notice(newcomer)
    world.run(1.5)
    assert released(newcomer)[:1] == [(False, True)]


@pytest.mark.parametrize("dies", ["noticed", "other"])
def test_a_loss_before_the_boundary_is_healed_as_ever(dies):
    world, agents = started()
    notice(agents[1])
    world.run(0.3)
    victim = agents[1] if dies == "noticed" else agents[2]
    victim.die(victim.slots[0])
    world.run(2.0)
    assert victim.slots[0] not in world.job().members
    assert len(world.job().failures) == (dies == "other"), "SIGTERM ends a plain program, and that is no failure"
    if dies == "other":
        boundary(world, 0.5)
        world.run(1.5)
        assert 1 not in world.job().members and (True, True) in released(agents[1])


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_that_is_cancelled_has_no_failures(killed):
    """Defect: each of its agents counted as one."""
    world, agents = started()
    ends(world, 0, 1, 2)
    notice(*agents)
    world.run(0.3)
    for agent in agents:
        if killed:
            agent.silent = agent.killed = True
        else:
            agent.status("stopped by SIGTERM")
    world.run(10.0)
    assert not world.job().failures and not world.job().members
