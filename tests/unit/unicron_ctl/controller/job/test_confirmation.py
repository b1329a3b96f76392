"""Slurm's record decides whose an agent is: what it does not know yet waits, what differs is refused, and while it does
not answer a job is healed within itself and nothing is done in Slurm for it."""

from __future__ import annotations

import pytest

from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.job.confirmation import CONFIRM_SECONDS
from unicron_ctl.controller.log import records
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.submission import AFTER_END_SECONDS
from unicron_ctl.protocol import wire

ANN, BOB = 1000, 1001


def cluster(nodes: int = 4, **facts) -> World:
    """Job 1 of two elements is Ann's and runs on n1 and n2."""
    world = World(FakeSlurm(nodes))
    world.slurm.submit("1", 2, uid=ANN, user="ann", **facts)
    return world


def register(world: World, agent: FakeAgent, uid: int | None = ANN) -> None:
    """As the server hands it on: with whoever made the credential."""
    world.core.receive(agent.route, agent.registration(), world.now, asker=Asker(uid=uid, user=""))
    world.core.settle()
    world.deliver()


def told(agent: FakeAgent, kind: type) -> list:
    return [message for message in agent.heard if isinstance(message, kind)]


def obstinate(world: World, *place, **more) -> FakeAgent:
    """One that does not register again by itself."""
    agent = FakeAgent(world, *place, **more)
    agent.obedient = False
    return agent


def test_an_agent_is_taken_in_as_slurm_shows_it():
    world = cluster()
    agent = obstinate(world, "1", 0, "n1", nodes=2000)
    register(world, agent)
    world.run(0.3, heartbeats=False)
    job = world.job()
    assert told(agent, wire.Welcome) and (job.uid, job.settings.user, job.submitted) == (ANN, "ann", 1.0)
    assert job.settings.max_nodes == 2, "the array has two elements, whatever the agent says"
    world.check_replay()


@pytest.mark.parametrize(("node", "uid", "says"), [("n1", BOB, "not its owner ann"), ("n4", ANN, "runs element 0")])
def test_another_owner_or_node_is_refused_finally_and_nothing_happens(node, uid, says):
    world = cluster()
    agent = obstinate(world, "1", 0, node)
    register(world, agent, uid)
    world.run(1.0, heartbeats=False)
    (refused,) = told(agent, wire.Refused)
    assert refused.final and says in refused.reason
    assert "1" not in world.core.state.jobs and not world.slurm.calls


def test_of_a_job_that_is_managed_nobody_else_takes_an_element():
    world = cluster()
    owners = [obstinate(world, "1", element, f"n{element + 1}", nodes=2) for element in range(2)]
    for agent in owners:
        register(world, agent)
    world.run(0.3, heartbeats=False)
    thief = obstinate(world, "1", 1, "n2", name="thief")
    register(world, thief, BOB)
    world.run(0.3, heartbeats=False)
    assert told(thief, wire.Refused)[0].final
    assert world.job().agents[1].agent == owners[1].agent and not world.slurm.calls


def test_what_slurm_does_not_show_at_work_is_refused_for_now_only():
    world = cluster(nodes=1)  # the second element waits
    early, unknown = obstinate(world, "1", 1, "n2"), obstinate(world, "77", 0, "n1")
    for agent in (early, unknown):
        register(world, agent)
    world.run(0.5, heartbeats=False)
    (first,), (second,) = told(early, wire.Refused), told(unknown, wire.Refused)
    assert not first.final and "PENDING" in first.reason and not second.final and "shows no element" in second.reason
    assert not world.core.state.jobs


def test_no_earlier_listing_refuses_anybody():
    """The element ran elsewhere when Slurm was asked last; by now it has started here."""
    world = cluster()
    world.run(3.0)
    world.slurm.queue["1", 0].update(node="n4")
    agent = obstinate(world, "1", 0, "n4")
    register(world, agent)
    assert not told(agent, wire.Refused)
    world.run(0.3, heartbeats=False)
    assert told(agent, wire.Welcome) and not told(agent, wire.Refused)


def test_without_slurms_word_a_job_is_healed_within_itself_and_touches_nothing():
    world = cluster()
    world.slurm.refuse = "slurmctld is away"
    agents = [FakeAgent(world, "1", element, f"n{element + 1}", nodes=2) for element in range(2)]
    for agent in agents:
        register(world, agent)
    world.run(1.0)
    assert "1" not in world.core.state.jobs, "Slurm's word is waited for"
    world.run(CONFIRM_SECONDS)
    for agent in agents:
        agent.ready()
    world.run(4.0)
    assert world.job().phase == "running" and not world.job().submitted
    agents[1].silent = True
    world.dead_nodes.add("n2")
    world.run(4.0)
    assert set(world.job().members) == {0}, "healed"
    assert not world.slurm.calls and not world.core.state.out_of_service
    agents[1].silent, world.slurm.refuse = False, ""
    world.run(4.0)
    assert world.job().submitted == 1.0 and world.job().agents[0].confirmed and world.job().uid == ANN
    world.check_replay()


def test_a_job_that_was_begun_in_an_outage_by_another_user_ends_when_slurm_is_back():
    world = cluster()
    world.slurm.refuse = "slurmctld is away"
    thief = FakeAgent(world, "1", 0, "n1")
    register(world, thief, BOB)
    world.run(CONFIRM_SECONDS + 0.5, heartbeats=False)
    assert told(thief, wire.Welcome)
    world.slurm.refuse = ""
    world.run(3.0)
    assert world.job().ended and not world.slurm.calls
    owner = obstinate(world, "1", 0, "n1", name="owner")
    register(world, owner)
    world.run(0.5, heartbeats=False)
    assert told(owner, wire.Welcome) and world.job().uid == ANN and not world.job().ended


@pytest.mark.parametrize("over", [True, False], ids=["ended", "still on record"])
def test_a_job_id_that_slurm_uses_again_begins_a_new_job(over):
    world = cluster()
    first = obstinate(world, "1", 0, "n1", nodes=1)
    register(world, first)
    world.run(0.3, heartbeats=False)
    if over:
        world.core.append("1", 0, records.JobEnded(code=0, reason="done"))
    world.slurm.submit("1", 1, uid=BOB, user="bob", submitted=500.0)
    second = obstinate(world, "1", 0, "n1", name="second")
    register(world, second, BOB)
    world.run(0.5, heartbeats=False)
    assert told(second, wire.Welcome) and not told(second, wire.End)
    assert (world.job().uid, world.job().submitted, world.job().ended) == (BOB, 500.0, None)


def test_a_finished_job_that_its_user_requeues_begins_again():
    world = cluster()
    first = obstinate(world, "1", 0, "n1", nodes=2)
    register(world, first)
    world.run(0.3, heartbeats=False)
    world.core.append("1", 0, records.JobEnded(code=0, reason="done"))
    late = obstinate(world, "1", 1, "n2", name="late")
    register(world, late)
    world.run(0.3, heartbeats=False)
    assert told(late, wire.End), "an element that only now comes to its start has nothing to do"
    world.now += AFTER_END_SECONDS + 5.0
    world.slurm.queue["1", 0].update(submitted=world.now, restarts=1)
    again = obstinate(world, "1", 0, "n1", name="again")
    register(world, again)
    world.run(0.5, heartbeats=False)
    assert told(again, wire.Welcome) and not told(again, wire.End) and not world.job().ended
