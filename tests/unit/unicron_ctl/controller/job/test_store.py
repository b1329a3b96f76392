"""A job whose rendezvous stores end: it waits for one, for so long, and is never set aside by it."""

from __future__ import annotations

from tests.support.world import FakeAgent, World
from unicron_ctl.controller.job.job_events import BEGIN_SECONDS
from unicron_ctl.controller.job.modes import NO_STORE, STORE_SECONDS
from unicron_ctl.controller.model.job_state import Phase


def lose_stores(agents: list[FakeAgent], stored: bool = False) -> None:
    for agent in agents:
        agent.stored = stored
        agent.status()


def test_survivors_wait_for_a_store_and_go_on_when_one_is_back() -> None:
    world = World()
    agents = world.start_job(nodes=2)
    lose_stores(agents)
    agents[0].die(0)
    world.run(STORE_SECONDS / 2)
    assert world.job().phase is Phase.BREAKING and "job_set_aside" not in world.kinds()
    lose_stores(agents, stored=True)
    world.run(5.0)
    assert world.job().phase is Phase.RUNNING and 1 in world.job().members
    world.check_replay()


def test_the_job_ends_with_a_line_if_no_store_comes_back() -> None:
    world = World()
    agents = world.start_job(nodes=2)
    lose_stores(agents)
    agents[0].die(0)
    world.run(STORE_SECONDS + 5.0)
    assert world.job().phase is Phase.FORMING
    for agent in agents:
        agent.ready()
    world.run(BEGIN_SECONDS + 5.0)
    assert (ended := world.job().ended) and ended.code == 1 and NO_STORE in ended.reason
    assert "job_set_aside" not in world.kinds()
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
