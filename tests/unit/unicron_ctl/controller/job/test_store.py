"""A job whose rendezvous stores end: it waits for one, for so long, and is never set aside by it."""

from __future__ import annotations

import pytest

from tests.support.world import FakeAgent, World
from unicron_ctl.controller.job.job_events import BEGIN_SECONDS
from unicron_ctl.controller.job.modes import NO_STORE, STORE_SECONDS
from unicron_ctl.controller.model.job_state import Phase


def lose_stores(agents: list[FakeAgent], stored: bool = False) -> None:
    for agent in agents:
        agent.stored = stored
        agent.status()


def lose_a_rank_and_all_stores() -> tuple[World, list[FakeAgent]]:
    """Return a job on two nodes, of which the second has the training state."""
    world = World()
    agents = world.start_job(nodes=2)
    lose_stores(agents)
    agents[0].die(0)
    return world, agents


def test_survivors_wait_for_a_store_and_go_on_when_one_is_back() -> None:
    world, agents = lose_a_rank_and_all_stores()
    world.run(STORE_SECONDS / 2)
    assert world.job().phase is Phase.BREAKING and "job_set_aside" not in world.kinds()
    lose_stores(agents, stored=True)
    world.run(5.0)
    assert world.job().phase is Phase.RUNNING and 1 in world.job().members
    world.check_replay()


def test_the_job_ends_with_a_line_if_no_store_comes_back() -> None:
    world, agents = lose_a_rank_and_all_stores()
    world.run(STORE_SECONDS + 5.0)
    assert world.job().phase is Phase.FORMING
    for agent in agents:
        agent.ready()
    world.run(BEGIN_SECONDS + 5.0)
    assert (ended := world.job().ended) and ended.code == 1 and NO_STORE in ended.reason
    assert "job_set_aside" not in world.kinds()
    world.check_replay()


@pytest.mark.parametrize("gone", ["store", "node"])
def test_a_job_that_has_waited_long_for_nodes_is_not_ended_when_a_store_goes_for_a_moment(gone: str) -> None:
    world = World()
    agents = [FakeAgent(world, "1", element, f"n{element}", nodes=2, min_nodes=2) for element in range(2)]
    agents[0].register()
    agents[0].ready()
    world.run(BEGIN_SECONDS + 60.0)
    assert world.job().phase is Phase.FORMING
    agents[0].stored = False
    agents[0].status()
    world.run(STORE_SECONDS)
    if gone == "node":
        agents[0].silent = True
        world.run(60.0)
    assert world.job().phase is Phase.FORMING


def test_survivors_that_wait_for_long_keep_their_state_when_a_store_goes_for_a_moment() -> None:
    world = World(report_timeout=600.0)
    agents = world.start_job(nodes=3)
    agents[1].obedient = False
    agents[0].die(0)
    world.run(STORE_SECONDS + 10.0)
    assert world.job().phase is Phase.BREAKING
    agents[1].obedient = True
    lose_stores(agents)
    world.run(20.0)
    assert world.job().phase is Phase.BREAKING
    lose_stores(agents, stored=True)
    world.run(5.0)
    assert world.job().phase is Phase.RUNNING and "reform" not in world.kinds()
    world.check_replay()


def test_newcomers_wait_for_a_store() -> None:
    world = World()
    agents = world.start_job(nodes=3)
    agents[2].die(2)
    world.run(10.0)
    assert sorted(world.job().members) == [0, 1]
    lose_stores(agents)
    agents[2].ready()
    world.run(10.0)
    assert world.job().phase is Phase.RUNNING and sorted(world.job().members) == [0, 1]
    lose_stores(agents, stored=True)
    world.run(10.0)
    assert world.job().offer is not None and "job_set_aside" not in world.kinds()
    world.check_replay()
