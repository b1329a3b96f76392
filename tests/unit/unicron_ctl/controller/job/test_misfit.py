"""An element that cannot be protected together with the others: no part of its job waits for the other for ever."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.training import events
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire


def other_mode(agent: FakeAgent) -> FakeAgent:
    agent.settings = msgspec.structs.replace(agent.settings, mode="restart", mode_reason="no script to be seen")
    return agent


def refusals(agent: FakeAgent) -> list[wire.Refusal]:
    return [message for message in agent.heard if isinstance(message, wire.Refusal) and message.final]


def comes(world: World, element: int, mode: str = "session") -> FakeAgent:
    """An agent of job 1, which needs three nodes."""
    agent = FakeAgent(world, "1", element, f"n{element + 1}", nodes=3, min_nodes=3)
    if mode != "session":
        other_mode(agent)
    agent.register()
    world.run(1.5)
    return agent


@pytest.mark.parametrize("with_slurm", [False, True])
def test_before_the_job_trains_all_of_it_is_let_go(with_slurm, snapshot):
    """Neither part would ever have its world."""
    world = World(FakeSlurm(3) if with_slurm else None)
    if world.slurm is not None:
        world.slurm.submit("1", 3)
    agents = [comes(world, 0), comes(world, 1)]
    for agent in agents:
        agent.ready()
    assert world.job().phase == "forming" and not any(map(refusals, agents))
    for agent in (*agents, comes(world, 2, "restart")):
        last = refusals(agent)[-1]
        assert not (last.replaced or last.apart or last.alone)
        assert last.reason == world.job().set_aside
    (event,) = events(world, "job_set_aside")
    assert event.record.reason == world.job().set_aside == snapshot and not world.job().ended
    again = FakeAgent(world, "1", 1, "n2", nodes=3)
    again.register()
    world.run(1.5)
    assert not refusals(again)[-1].apart, "whoever comes later trains with them"


def test_elements_with_commands_of_their_own_are_no_one_job():
    """Defect: a sweep of four became one world of the first two, and the others never ran."""
    world = World(FakeSlurm(3))
    assert world.slurm is not None
    world.slurm.submit("1", 6)
    agents = [FakeAgent(world, "1", element, f"n{element + 1}", nodes=6, min_nodes=2) for element in (0, 1)]
    for element, agent in enumerate(agents):
        agent.settings = msgspec.structs.replace(agent.settings, command=f"lr {element}")
        agent.register()
        world.run(1.5)
    for agent in agents:
        last = refusals(agent)[-1]
        assert last.alone and not last.apart and "as in a sweep" in last.reason
    late = FakeAgent(world, "1", 2, "n3", nodes=4)
    late.settings = msgspec.structs.replace(late.settings, command="lr 0")
    late.register()
    assert refusals(late)[-1].alone, "it is left alone for good"
    world.core.append("1", 0, records.SlurmAction(action="hold", element=4, node="", reason=""))
    world.core.append("1", 0, records.SlurmDone(action="hold", element=4, node="", reason=""))
    world.slurm.hold("1", 4, "")
    world.run(10.0)
    assert [e.held for e in world.slurm.elements() if e.state == "PENDING"] == [False] * 3, "each may run"


@pytest.mark.parametrize("differs", ["mode", "command"])
def test_while_the_others_train_it_ends_and_they_go_on(differs):
    """A command with the time in it, say: alone it would write the same files as they do."""
    world = World()
    agents = world.start_job("1", nodes=3)
    agents[2].silent = True
    world.run(15.0)
    assert sorted(world.job().members) == [0, 1]
    odd = FakeAgent(world, "1", 2, "n3", nodes=3)
    if differs == "mode":
        other_mode(odd)
    else:
        odd.settings = msgspec.structs.replace(odd.settings, command="another")
    odd.register()
    (told,) = refusals(odd)
    assert told.apart and ("submit with --unicron-mode=session" in told.reason) == (differs == "mode")
    world.run(3.0)
    assert not world.job().set_aside and world.job().phase == "running" and not any(map(refusals, agents[:2]))


def test_where_nobody_else_is_left_it_trains_unprotected():
    """A whole job that was requeued with another script: its agents make a plain world of their own."""
    world = World()
    for agent in world.start_job("1", nodes=2):
        agent.status(leaving="stopped by SIGTERM")
        agent.silent = True
    odd = other_mode(FakeAgent(world, "1", 0, "n1", nodes=2))
    odd.register()
    assert [told.apart for told in refusals(odd)] == [False]


def test_a_job_that_was_set_aside_takes_no_newcomer_in():
    """Its ranks would wait for a plan for ever."""
    world = World()
    agents = world.start_job("1", nodes=3)
    world.core.append("1", 1, records.JobSetAside(input="a test", reason="the controller cannot handle this job"))
    agents[0].register()
    assert not refusals(agents[0]), "it trains on"
    late = FakeAgent(world, "1", 3, "n4", nodes=4)
    late.register()
    assert [told.apart for told in refusals(late)] == [True]
