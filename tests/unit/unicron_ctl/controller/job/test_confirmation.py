"""Slurm's record decides whose an agent is: what it does not know yet waits, what differs is refused, and while it does
not answer a job is healed within itself and nothing is done in Slurm for it."""

from __future__ import annotations

import pytest

from tests.support.scenarios import messages, power_off, ready
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.controller.core import registrations
from unicron_ctl.controller.job import registration
from unicron_ctl.controller.job.registration import CONFIRM_SECONDS, OF_A_USER
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.model.job_state import AFTER_END_SECONDS
from unicron_ctl.controller.plan.reconcile import GONE_SECONDS
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.slurm import squeue
from unicron_ctl.shared.slurm.host_lists import hosts

ANN, BOB = 1000, 1001


def cluster(nodes: int = 4, **facts) -> World:
    """Job 1 of two elements is Ann's and runs on n1 and n2."""
    world = World(FakeSlurm(nodes))
    world.slurm.submit("1", 2, uid=ANN, user="ann", **facts)
    return world


def register(world: World, agent: FakeAgent, uid: int | None = ANN) -> None:
    """As the server hands it on: with whoever made the credential."""
    agent.asker = Asker(uid=uid, user="")
    agent.register()


def obstinate(world: World, *place, **more) -> FakeAgent:
    """One that does not register again by itself."""
    agent = FakeAgent(world, *place, **more)
    agent.obedient = False
    return agent


def comes(world: World, *place, uid: int | None = ANN, after: float = 0.3, **more) -> FakeAgent:
    """An obstinate agent registers, and some seconds pass."""
    agent = obstinate(world, *place, **more)
    register(world, agent, uid)
    world.run(after, heartbeats=False)
    return agent


def test_an_agent_is_taken_in_as_slurm_shows_it():
    world = cluster()
    agent = comes(world, "1", 0, "n1", nodes=2000)
    job = world.job()
    assert messages(agent, wire.Welcome) and (job.uid, job.settings.user, job.submitted) == (ANN, "ann", 1.0)
    assert job.settings.max_nodes == 2, "the array has two elements, whatever the agent says"


@pytest.mark.parametrize(("node", "uid", "says"), [("n1", BOB, "not its owner ann"), ("n4", ANN, "runs element 0")])
def test_another_owner_or_node_is_refused_finally_and_nothing_happens(node, uid, says):
    world = cluster()
    agent = comes(world, "1", 0, node, uid=uid, after=1.0)
    (refused,) = messages(agent, wire.Refusal)
    assert refused.final and says in refused.reason
    assert "1" not in world.core.state.jobs and not world.slurm.calls


def test_of_a_job_that_is_managed_nobody_else_takes_an_element():
    world = cluster()
    owners = [obstinate(world, "1", element, f"n{element + 1}", nodes=2) for element in range(2)]
    for agent in owners:
        register(world, agent)
    world.run(0.3, heartbeats=False)
    thief = comes(world, "1", 1, "n2", name="thief", uid=BOB)
    assert messages(thief, wire.Refusal)[0].final
    assert world.job().agents[1].agent == owners[1].agent and not world.slurm.calls


def test_what_slurm_does_not_show_at_work_is_refused_for_now_only():
    world = cluster(nodes=1)  # the second element waits
    early, unknown = obstinate(world, "1", 1, "n2"), obstinate(world, "77", 0, "n1")
    for agent in (early, unknown):
        register(world, agent)
    world.run(0.5, heartbeats=False)
    (first,), (second,) = messages(early, wire.Refusal), messages(unknown, wire.Refusal)
    assert not first.final and "PENDING" in first.reason and not second.final and "shows no element" in second.reason
    assert not world.core.state.jobs


def test_no_earlier_listing_refuses_anybody():
    """The element ran elsewhere when Slurm was asked last; by now it has started here."""
    world = cluster()
    world.run(3.0)
    world.slurm.queue["1", 0].update(node="n4")
    agent = obstinate(world, "1", 0, "n4")
    register(world, agent)
    assert not messages(agent, wire.Refusal)
    world.run(0.3, heartbeats=False)
    assert messages(agent, wire.Welcome) and not messages(agent, wire.Refusal)


def test_without_slurms_word_a_job_is_healed_within_itself_and_touches_nothing():
    world = cluster()
    world.slurm.refuse = "slurmctld is away"
    agents = [FakeAgent(world, "1", element, f"n{element + 1}", nodes=2) for element in range(2)]
    for agent in agents:
        register(world, agent)
    world.run(1.0)
    assert "1" not in world.core.state.jobs, "Slurm's word is waited for"
    world.run(CONFIRM_SECONDS)
    ready(world, agents, after=4.0)
    assert world.job().phase == "running" and not world.job().submitted
    power_off(world, "n2")
    world.run(4.0)
    assert set(world.job().members) == {0}, "healed"
    assert not world.slurm.calls and not world.core.state.out_of_service
    agents[1].silent, world.slurm.refuse = False, ""
    world.run(4.0)
    assert world.job().submitted == 1.0 and world.job().agents[0].confirmed and world.job().uid == ANN


def test_a_job_that_was_begun_in_an_outage_by_another_user_ends_when_slurm_is_back():
    world = cluster()
    thief = obstinate(world, "1", 0, "n1")
    outage(world, thief, uid=BOB)
    assert messages(thief, wire.Welcome)
    world.slurm.refuse = ""
    world.run(3.0)
    assert world.job().ended and not world.slurm.calls
    assert messages(thief, wire.Refusal) and not messages(thief, wire.End), "its command goes on unmanaged"
    owner = comes(world, "1", 0, "n1", name="owner", after=0.5)
    assert messages(owner, wire.Welcome) and world.job().uid == ANN and not world.job().ended


@pytest.mark.parametrize("over", [True, False], ids=["ended", "still on record"])
def test_a_job_id_that_slurm_uses_again_begins_a_new_job(over):
    world = cluster()
    comes(world, "1", 0, "n1", nodes=1)
    if over:
        world.core.append("1", 0, records.JobEnded(code=0, reason="done"))
    world.slurm.submit("1", 1, uid=BOB, user="bob", submitted=500.0)
    second = comes(world, "1", 0, "n1", name="second", uid=BOB, after=0.5)
    assert messages(second, wire.Welcome) and not messages(second, wire.End)
    assert (world.job().uid, world.job().submitted, world.job().ended) == (BOB, 500.0, None)


def test_while_slurm_is_silent_a_job_with_the_number_of_one_that_ended_waits(snapshot):
    """Defect: it was told that all members had trained to the end, and ended with status 0, untrained."""
    world = cluster()
    first = comes(world, "1", 0, "n1", nodes=1)
    world.core.append("1", 0, records.JobEnded(code=0, reason="done"))
    world.slurm.queue.clear()
    world.run(3.0, heartbeats=False)
    world.slurm.submit("1", 1, uid=ANN, user="ann", submitted=500.0)
    second = obstinate(world, "1", 0, "n1", name="second")
    outage(world, second)
    (refused,) = messages(second, wire.Refusal)
    assert refused.reason == snapshot and not refused.final and not messages(second, wire.End)
    outage(world, first)
    assert messages(first, wire.End), "one that is known is of the job that has ended"
    world.slurm.refuse = ""
    register(world, second)
    world.run(3.0, heartbeats=False)
    assert messages(second, wire.Welcome) and not messages(second, wire.End) and world.job().submitted == 500.0


def test_a_finished_job_that_its_user_requeues_begins_again():
    world = cluster()
    comes(world, "1", 0, "n1", nodes=2)
    world.core.append("1", 0, records.JobEnded(code=0, reason="done"))
    late = comes(world, "1", 1, "n2", name="late")
    assert messages(late, wire.End), "an element that only now comes to its start has nothing to do"
    world.now += AFTER_END_SECONDS + 5.0
    world.slurm.queue["1", 0].update(submitted=world.now, restarts=1)
    again = comes(world, "1", 0, "n1", name="again", after=0.5)
    assert messages(again, wire.Welcome) and not messages(again, wire.End) and not world.job().ended


def outage(world: World, *agents: FakeAgent, uid: int | None = ANN) -> None:
    """Slurm is away, and the agents are taken in unconfirmed."""
    world.slurm.refuse = "slurmctld is away"
    for agent in agents:
        register(world, agent, uid)
    world.run(CONFIRM_SECONDS + 0.5, heartbeats=False)


@pytest.mark.parametrize("owner", [ANN, 0], ids=["its owner", "root, who owns it"])
@pytest.mark.parametrize("ended", [False, True], ids=["runs", "ended"])
def test_nothing_is_final_against_a_job_that_slurm_has_not_confirmed(owner, ended):
    """A stranger registered the id first, as another kind of job, and may have ended it: its owner goes on asking."""
    world = cluster()
    for element in world.slurm.queue.values():
        element.update(uid=owner, user="owner")
    thief = obstinate(world, "1", 0, "n1", ranks=2)
    outage(world, thief, uid=BOB)
    if ended:
        world.core.append("1", 0, records.JobEnded(code=0, reason="trained to the end"))
    mine = FakeAgent(world, "1", 0, "n1", name="mine")
    mine.asker = Asker(uid=owner, user="owner", admin=owner == 0)
    mine.register()
    world.run(CONFIRM_SECONDS + 0.5, heartbeats=False)
    assert not messages(mine, wire.End) and not messages(mine, wire.Welcome)
    assert messages(mine, wire.Refusal) and not any(refused.final for refused in messages(mine, wire.Refusal))
    world.slurm.refuse = ""
    world.run(2.0, heartbeats=False)
    mine.register()
    world.run(1.5, heartbeats=False)
    assert messages(mine, wire.Welcome) and world.job().uid == owner and world.job().submitted


def test_a_job_that_slurm_does_not_show_when_it_is_back_is_let_go():
    """Its agents train on, unmanaged, and ask again: Slurm may show it later."""
    world = cluster()
    agents = [FakeAgent(world, "77", element, f"n{element + 1}", nodes=2) for element in range(2)]
    outage(world, *agents)
    assert all(messages(agent, wire.Welcome) for agent in agents)
    world.slurm.refuse = ""
    world.run(GONE_SECONDS + 3.0)
    job = world.job("77")
    assert job.ended and "Slurm does not show" in job.ended.reason
    for agent in agents:
        assert not messages(agent, wire.End) and messages(agent, wire.Refusal)
        assert not any(refused.final for refused in messages(agent, wire.Refusal))
    world.slurm.submit("77", 2, uid=ANN, user="ann", state="RUNNING")
    for element in range(2):
        world.slurm.queue["77", element].update(state="RUNNING", node=f"n{element + 1}")
    world.run(3.0)
    assert not world.job("77").ended and world.job("77").submitted and not world.slurm.calls


def test_what_slurm_has_not_confirmed_is_bounded(monkeypatch):
    """A user without a single job could fill the controller's memory and its disk while Slurm is away."""
    world = cluster()
    agents = [obstinate(world, str(100 + number), 0, "n1") for number in range(OF_A_USER[0] + 5)]
    outage(world, *agents, uid=BOB)
    taken = [agent for agent in agents if messages(agent, wire.Welcome)]
    left = [agent for agent in agents if messages(agent, wire.Refusal)]
    assert len(taken) == OF_A_USER[0] and len(left) == 5
    assert "not confirmed" in messages(left[0], wire.Refusal)[0].reason and not messages(left[0], wire.Refusal)[0].final
    owner = obstinate(world, "1", 0, "n1")
    outage(world, owner)
    assert messages(owner, wire.Welcome), "others are taken in"
    monkeypatch.setattr(registration, "OF_A_USER", (OF_A_USER[0], 3))
    many = [obstinate(world, "1", element, "n1", nodes=9) for element in range(1, 6)]
    outage(world, *many)
    assert sum(bool(messages(agent, wire.Welcome)) for agent in many) == 2


def test_a_list_of_nodes_is_read_once_however_many_agents_wait(monkeypatch):
    """An allocation is one job to Slurm, on all of its nodes; reading 2,048 names takes milliseconds."""
    world, calls = World(FakeSlurm(1)), []

    def counted(text: str) -> list[str]:
        calls.append(text)
        return hosts(text)

    monkeypatch.setattr(squeue, "hosts", counted)
    squeue._names.cache_clear()
    world.slurm.submit("1", 1, uid=ANN, user="ann")
    world.slurm.queue["1", 0].update(state="RUNNING", node="n[1-64]", array=False)
    agents = [obstinate(world, "1", element, f"n{element + 1}", nodes=64) for element in range(64)]
    for agent in agents:
        register(world, agent)
    world.run(0.2, heartbeats=False)
    assert all(messages(agent, wire.Welcome) for agent in agents)
    assert len(calls) == 1


def test_who_has_many_agents_waiting_keeps_nobody_else_out(monkeypatch):
    monkeypatch.setattr(registrations, "WAITING_KEPT", 10)
    world = cluster()
    world.slurm.refuse = "Slurm is away"
    mine = [obstinate(world, "9", element, "n4") for element in range(12)]
    for agent in mine:
        register(world, agent, BOB)
    assert [len(messages(agent, wire.Refusal)) for agent in mine] == [0] * 10 + [1] * 2
    assert not messages(mine[-1], wire.Refusal)[-1].final
    ann = obstinate(world, "1", 0, "n1")
    register(world, ann)
    assert not messages(ann, wire.Refusal)
    world.slurm.refuse = ""
    world.run(0.3, heartbeats=False)
    assert messages(ann, wire.Welcome)


def test_those_that_wait_are_compared_once_a_listing(monkeypatch):
    looked = []
    compare = registrations.compare
    monkeypatch.setattr(registrations, "compare", lambda *of: looked.append(of) or compare(*of))
    world = cluster()
    world.slurm.refuse = "Slurm is away"
    agents = [obstinate(world, "1", element, f"n{element + 1}") for element in range(2)]
    for agent in agents:
        register(world, agent)
    world.run(CONFIRM_SECONDS - 1.0, heartbeats=False)
    assert len(looked) == 2
    world.run(2.0, heartbeats=False)
    assert len(looked) == 4 and all(messages(agent, wire.Welcome) for agent in agents)


def test_refusals_without_number_leave_some_records():
    world = cluster()
    for number in range(300):
        agent = obstinate(world, "1", number % 2, "n3", name=f"agent{number}")
        register(world, agent, BOB + number)
        world.run(0.1, heartbeats=False)
    kept = [event for event in world.log if isinstance(event.record, records.RegistrationRefused)]
    assert 0 < len(kept) <= 101
