"""What the controller tells agents so that they can do without it: who leads, who is there, and that it lives."""

from __future__ import annotations

import pytest

from tests.support.scenarios import ready
from tests.support.world import FakeAgent, World
from unicron_ctl.shared.consensus.proposals import PROPOSERS
from unicron_ctl.shared.protocol import shared_plans, structs, wire

KEY = "A" * 40


def register(agent: FakeAgent, **reached: str) -> None:
    message = agent.registration(**{"peer": f"n{agent.element}:7", "key": KEY} | reached)
    agent.world.to_core(agent, message)


def start(nodes: int, **reached: str) -> tuple[World, list[FakeAgent]]:
    world = World()
    agents = [FakeAgent(world, "1", element, f"n{element}", nodes=nodes) for element in range(nodes)]
    for agent in agents:
        register(agent, **reached)
    ready(world, agents, after=0.3)
    return world, agents


def shares(world: World, agent: FakeAgent) -> list[wire.PlanShare]:
    return [m for name, m in world.sent if name == agent.agent and isinstance(m, wire.PlanShare)]


def test_a_plan_names_those_who_lead_and_tells_them_alone_of_everybody():
    nodes = PROPOSERS + 3
    world, agents = start(nodes)
    for agent in agents:
        told = shares(world, agent)[0]
        assert [peer.element for peer in shared_plans.proposers(told)] == list(range(PROPOSERS))
        everybody = [peer.element for peer in told.peers]
        assert everybody == (list(range(nodes)) if agent.element < PROPOSERS else [])
    assert shared_plans.proposers(shares(world, agents[0])[0])[1] == structs.Peer(1, agents[1].agent, "n1:7", KEY)


def test_after_a_loss_the_next_ones_lead():
    world, agents = start(PROPOSERS + 3)
    agents[0].die(0)
    world.run(0.3)
    told = shares(world, agents[PROPOSERS])[-1]
    assert [peer.element for peer in shared_plans.proposers(told)] == list(range(1, PROPOSERS + 1))
    assert [peer.element for peer in told.peers] == list(range(1, PROPOSERS + 3))


@pytest.mark.parametrize("reached", [{"peer": ""}, {"key": "no key"}])
def test_nobody_leads_who_cannot_be_reached(reached):
    world, agents = start(3, **reached)
    assert shared_plans.proposers(shares(world, agents[0])[0]) == [] and world.job().phase == "running"


def test_whoever_asks_for_an_answer_gets_one():
    world, agents = start(2)
    status = wire.Status(job="1", element=0, agent=agents[0].agent, sent=0.0, number=1000, answer=True)
    world.to_core(agents[0], status)
    assert [m for name, m in world.sent if isinstance(m, wire.Pong)] == [wire.Pong(number=1000)]
