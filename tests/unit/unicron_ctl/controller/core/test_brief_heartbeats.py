"""Brief heartbeats at the core: a lost whole status is asked for, and agents of release 0.2 send none."""

from __future__ import annotations

import pytest

from tests.support.scenarios import trained
from unicron_ctl.shared.protocol import wire


def test_a_whole_status_that_was_lost_is_asked_for_by_the_next_heartbeat():
    world, (agent, _) = trained(2, seconds=0.3)
    agent.heartbeats.doubt()
    lost, heard = agent.heartbeats.form(agent.whole(), world.now), len(agent.orders(wire.Ping))
    assert isinstance(lost, wire.Status)
    agent.set(0, iteration=51)
    world.run(0.2)
    view = world.core.view.live.agent("1", 0)
    assert len(agent.orders(wire.Ping)) > heard and view.ranks[0].iteration == 51
    assert view.whole == view.status.number > 0


@pytest.mark.parametrize("brief", [True, False])
def test_agents_of_the_release_before_are_healed_alike(brief):
    world, agents = trained(2, seconds=0.3)
    for agent in agents:
        agent.heartbeats.period *= brief
    for iteration in range(3):
        world.iterate("1", iteration)
        world.run(0.5)
    agents[1].die(1)
    world.run(3.0)
    assert world.job().iteration == 2 and [f.record.slots for f in world.job().failures] == [[1]]


def test_an_agent_that_comes_back_with_a_brief_heartbeat_has_a_lease_again():
    """Defect: it got none, so that its death after that was never seen."""
    world, (agent, _) = trained(2, seconds=0.3)
    live = world.core.view.live
    agent.silent = True
    world.run(8.0)
    view = live.agent("1", 0)
    assert view.expired
    agent.silent = False
    message = agent.heartbeats.form(agent.whole(), world.now)
    if isinstance(message, wire.Status):
        message = agent.heartbeats.form(agent.whole(), world.now)
    assert isinstance(message, wire.Going)
    world.to_core(agent, message)
    assert not view.expired and any(one is view for one in live.leases.values())
