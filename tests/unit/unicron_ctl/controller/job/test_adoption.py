"""A controller with an old or empty log takes over what its agents show, and no training state is thrown away."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from tests.support.depth import cases
from tests.support.scenarios import boundary, trained
from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.shared.protocol import structs, wire


def on_slurm(nodes: int, count: int, **settings) -> tuple[World, list[FakeAgent]]:
    """Job 1 has `count` of the nodes of a Slurm."""
    world = World(FakeSlurm(nodes), **settings)
    world.slurm.submit("1", count)
    return world, world.start_job(nodes=count)


def train(world: World, agents: list[FakeAgent], iterations: range) -> None:
    for iteration in iterations:
        for agent in agents:
            for slot in agent.slots:
                if agent.ranks[slot].state == "running":
                    agent.set(slot, iteration=iteration + 1, done=[])
        world.run(0.2)


def forget(world: World, records: int | None) -> None:
    """The controller is gone with the last records of its log, or with all of them. Those of one moment are stored in
    one transaction, so none of them is lost alone."""
    first = len(world.log) - records if records else 0
    while first and world.log[first - 1].time == world.log[first].time:
        first -= 1
    del world.log[first:]
    world.restart()


@pytest.mark.parametrize("records", [None, 1, 2, 3, 5, 8])
def test_a_generation_that_the_log_does_not_hold_goes_on(records):
    world, agents = trained(4, seconds=0.3)
    train(world, agents, range(3))
    agents[3].die(3)
    world.run(3.0)
    assert world.job().plan.generation == 2
    forget(world, records)
    world.run(10.0)
    job = world.job()
    assert job.phase in ("running", "offering") and sorted(job.members)[:3] == [0, 1, 2]
    assert all(agents[slot].ranks[slot].iteration == 3 for slot in range(3)), "nothing is done again"
    assert not any(event.kind == "reform" for event in world.log)
    assert not any(slot in failure.record.slots for failure in job.failures for slot in (0, 1, 2))


def test_the_emptied_controller_waits_for_agents_that_have_not_registered():
    world, agents = trained(3, seconds=0.3)
    train(world, agents, range(2))
    agents[2].silent = agents[2].cut = True
    forget(world, None)
    world.run(20.0)
    assert not world.job().members and not [m for _, m in world.sent if isinstance(m, wire.Break)]
    agents[2].silent = agents[2].cut = False
    world.run(3.0)
    assert sorted(world.job().members) == [0, 1, 2] and world.job().phase == "running"


def test_an_agent_that_has_registered_and_not_spoken_is_waited_for():
    world, agents = trained(3, seconds=0.3)
    train(world, agents, range(2))
    forget(world, None)
    agents[2].obedient = False
    for agent in agents[:2]:
        agent.register()
        agent.status()
    for iteration in range(2, 5):
        agents[0].step(0, iteration, [0, 3, 6])
    agents[2].register()
    world.run(0.3, heartbeats=False)
    agents[2].obedient = True
    world.run(2.0)
    assert world.job().plan.generation == 1 and sorted(world.job().members) == [0, 1, 2]
    for iteration in range(5, 9):
        world.iterate("1", iteration)
    assert not world.job().ledger_violations and world.job().iteration == 8
    assert not any(isinstance(message, wire.Break) for _, message in world.sent)


def test_a_generation_whose_plan_nobody_holds_is_broken_in_the_end():
    world = World(state_wait_seconds=30.0)
    agents = world.start_job(nodes=3)
    train(world, agents, range(2))
    for agent in agents:
        agent.held.clear()
    forget(world, None)
    world.run(25.0)
    assert not world.job().members and not any(event.kind == "adopted" for event in world.log)
    world.run(10.0)
    (adopted,) = [event.record for event in world.log if event.kind == "adopted"]
    assert "nobody could say" in adopted.reason and not adopted.whole
    assert sorted(world.job().members) == [0, 1, 2] and world.job().phase == "running"
    assert all(agent.ranks[agent.slots[0]].iteration == 2 for agent in agents), "nothing is done again"


@pytest.mark.parametrize("holds_plan", [False, True])
def test_a_smaller_part_does_not_break_off_what_a_majority_may_go_on_with(holds_plan: bool, snapshot):
    world, agents = on_slurm(6, 5, state_wait_seconds=30.0)
    world.run(2.0)
    train(world, agents, range(2))
    for agent in agents[:3]:
        agent.silent = agent.cut = True
    for agent in agents if not holds_plan else ():
        agent.held.clear()
    forget(world, None)
    world.run(60.0)
    assert not world.job().members and not any(isinstance(m, wire.Break) for _, m in world.sent)
    assert world.job().waits == snapshot
    for agent in agents[:3]:
        agent.silent = agent.cut = False
    world.run(10.0)
    assert len(world.job().members) == 5 and world.job().phase == "running"


def test_agents_that_never_answer_do_not_keep_what_was_agreed_from_being_taken_over(monkeypatch):
    world = World(state_wait_seconds=30.0)
    agents = world.start_job(nodes=4)
    away(world, agents)
    agree(world, agents, lost=3)
    whole = FakeAgent.get
    monkeypatch.setattr(
        FakeAgent, "get", lambda self, m: None if self is agents[3] and isinstance(m, wire.Ping) else whole(self, m)
    )
    back(world, agents)
    world.run(20.0)
    assert world.job().generation == 1
    world.run(15.0)
    assert world.job().plan.prefix == "1.g2.0.1"


def test_an_element_that_slurm_no_longer_runs_is_not_waited_for():
    world, agents = on_slurm(4, 3)
    train(world, agents, range(2))
    agents[2].silent = True
    world.slurm.queue["1", 2].update(state="PENDING", node=None, reason="JobHeldAdmin")
    forget(world, None)
    world.run(6.0)
    assert sorted(world.job().members) == [0, 1] and world.job().phase == "running"
    assert agents[0].ranks[0].iteration == 2


def test_ranks_that_were_told_a_plan_and_not_all_of_them_are_regrouped():
    world, agents = trained(4, seconds=0.3)
    train(world, agents, range(2))
    agents[1].obedient = agents[2].obedient = False  # they never hear of the next plan
    agents[3].die(3)
    for agent in agents[1:3]:
        agent.set(agent.slots[0], state="stopped", broken=1)
    world.run(0.2)
    assert world.job().plan.generation == 2
    forget(world, None)
    agents[1].obedient = agents[2].obedient = True
    for agent in agents:
        agent.register()
    world.run(5.0)
    assert sorted(world.job().members)[:3] == [0, 1, 2] and world.job().phase in ("running", "offering")
    assert not any(event.kind == "reform" for event in world.log)


def test_a_job_is_not_formed_anew_while_its_state_may_live_and_its_rank_is_a_member_again():
    world = World(state_wait_seconds=60.0)
    agents = world.start_job(nodes=2)
    train(world, agents, range(5))
    world.dead_nodes.add(agents[1].node)
    agents[1].silent = True
    agents[0].obedient = False  # its survivor does not get to stop
    world.run(2.5)
    assert world.job().phase == "breaking" and list(world.job().lost) == [1]
    agents[0].die(0)  # ... and dies: nobody else has the state
    world.run(20.0)
    assert world.job().phase == "breaking" and any(event.kind == "state_awaited" for event in world.log)
    world.dead_nodes.clear()
    agents[1].silent = False
    world.run(3.0)
    assert any(event.kind == "reinstated" for event in world.log)
    assert 1 in world.job().members and agents[1].ranks[1].iteration == 5


def test_ranks_whose_agent_died_may_hold_the_state_until_slurm_shows_their_end():
    """Nobody listens at the agent's port. That says nothing of its ranks."""
    world, agents = on_slurm(4, 2, state_wait_seconds=60.0)
    train(world, agents, range(5))
    agents[0].obedient = False  # it does not get to stop
    agents[1].silent = agents[1].killed = True
    world.run(3.0)
    assert list(world.job().lost) == [1] and world.job().failures[-1].record.kind_of_failure == "agent"
    agents[0].die(0)  # ... and nobody else has the state
    world.run(10.0)
    assert world.job().phase == "breaking" and any(event.kind == "state_awaited" for event in world.log)
    world.slurm.queue["1", 1].update(state="FAILED")
    world.run(3.0)
    assert any(event.kind == "reform" for event in world.log)


def test_the_wait_for_the_last_state_is_bounded():
    world = World(state_wait_seconds=30.0)
    agents = world.start_job(nodes=2)
    train(world, agents, range(5))
    agents[1].silent = True
    agents[0].obedient = False
    world.run(2.5)
    agents[0].die(0)
    world.run(40.0)
    assert any(event.kind == "reform" for event in world.log)


@settings(max_examples=cases(100), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 50))
def test_whatever_records_are_lost_the_training_goes_on(seed: int, records: int):
    """A power cut at a random moment of recoveries; agents may be slow to hear."""
    chance = random.Random(seed)
    world, agents = trained(4, ranks=2, seconds=0.3)
    train(world, agents, range(2))
    for _ in range(chance.randint(1, 3)):
        agent = chance.choice(agents)
        agent.die(chance.choice(agent.slots))
        world.run(chance.uniform(0.0, 0.4))
        boundary(world, 0.0)
    forget(world, min(records, len(world.log)))
    for _ in range(8):
        world.run(2.0)
        for agent in agents:
            for slot in agent.slots:
                if agent.ranks[slot].state == "starting":
                    agent.set(slot, state="waiting")
            agent.take_offer()
    job = world.job()
    assert job.phase in ("running", "offering") and not any(event.kind == "reform" for event in world.log)
    assert max(agent.ranks[slot].iteration for agent in agents for slot in agent.slots) >= 2
    assert len(job.members) == 8, f"{sorted(job.members)} of 8 are in"
    world.check_replay()


# ---------------------------------------------------------------- what agents agreed on without the controller
def away(world: World, agents: list[FakeAgent]) -> None:
    """Nobody hears the controller, and it hears nobody."""
    train(world, agents, range(2))
    for agent in agents:
        agent.silent = agent.cut = True
    world.run(5.0)
    assert world.core.view.alone


def agree(world: World, agents: list[FakeAgent], lost: int, chosen: tuple[bool, ...] = ()) -> wire.Plan:
    """A rank dies, and all others agree on a plan without it; `chosen`: who knows that it was chosen."""
    members = [agent.slots[0] for agent in agents if agent.slots[0] != lost]
    plan = wire.Plan(generation=2, members=members, store="n1:9000", prefix="1.g2.0.1", iteration=2, reason="agreed")
    gone = [structs.LostRank(lost, agents[lost].agent, 0)]
    agents[lost].die(lost)
    for place, agent in enumerate(agents):
        if agent.slots[0] == lost:
            continue
        knows = chosen[place] if chosen else True
        part = wire.Plan(**{name: getattr(plan, name) for name in plan.__struct_fields__ if name != "v"})
        part.assignment = {agent.slots[0]: [place]}
        agent.agreed = wire.Agreement(
            generation=2, since=1, plan=part, lost=gone, reason="agreed", by=agents[0].agent, chosen=knows
        )
        if knows:
            agent.set(agent.slots[0], state="running", generation=2, broken=1)
        else:
            agent.set(agent.slots[0], state="stopped", broken=1)
    return plan


def agreed(chosen: tuple[bool, ...] = ()) -> tuple[World, list[FakeAgent]]:
    """Without a controller, four agents lose one rank and agree on a plan (:func:`agree`)."""
    world, agents = trained(4, seconds=0.3)
    away(world, agents)
    agree(world, agents, lost=3, chosen=chosen)
    return world, agents


def back(world: World, agents: list[FakeAgent]) -> None:
    for agent in agents:
        agent.silent = agent.cut = False
        agent.status()
    world.run(3.0)


def test_a_plan_that_the_agents_agreed_on_is_taken_over():
    world, agents = agreed()
    back(world, agents)
    job = world.job()
    assert sorted(job.members) == [0, 1, 2] and job.plan.prefix == "1.g2.0.1"
    assert job.plan.assignment == {0: [0], 1: [1], 2: [2]}
    assert not any(isinstance(message, wire.Break) for _, message in world.sent)
    assert all(agent.agreed is None for agent in agents), "they have been told that it is known"
    assert [failure.record.slots for failure in job.failures] == [[3]] and agents[3].ranks[3].incarnation == 1
    agents[3].ready()
    world.run(1.0)
    boundary(world, 1.0)
    assert sorted(job.members) == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["its node died", "its agent died", "it was started again", "the log is lost"])
def test_who_died_while_the_controller_was_away_is_on_record(how: str, snapshot: SnapshotAssertion) -> None:
    """Defect: where Slurm had started the element again meanwhile, nothing told that anybody had died."""
    world, agents = on_slurm(5, 4)
    world.run(2.0)
    away(world, agents)
    agree(world, agents, lost=3)
    world.run(5.0)
    world.restart()
    agents[3].cut, agents[3].killed = False, True
    if how == "its node died":
        world.dead_nodes.add("n4")
    elif how != "its agent died":
        if how == "the log is lost":
            world.log.clear()
            world.restart()
        again = FakeAgent(world, "1", 3, "n4", nodes=4, name="again")
        again.register()
        again.ready()
    back(world, agents[:3])
    world.run(20.0)
    (failure,) = world.job().failures
    assert failure.record.slots == [3] and failure.record.element == 3
    assert sorted(world.job().members)[:3] == [0, 1, 2]
    assert not any(isinstance(message, wire.Break) for _, message in world.sent)
    if how in ("it was started again", "the log is lost"):
        assert failure.record.reason == snapshot and failure.record.node == "n4"
        boundary(world, 1.0)
        assert sorted(world.job().members) == [0, 1, 2, 3] and failure.restored_at is not None


def test_a_restarted_and_an_emptied_controller_take_it_over():
    for records in (0, None):
        world, agents = agreed()
        if records is None:
            world.log.clear()
        world.restart()
        back(world, agents)
        assert sorted(world.job().members)[:3] == [0, 1, 2] and world.job().plan.prefix == "1.g2.0.1"
        assert all(agents[slot].ranks[slot].iteration == 2 for slot in range(3))


def test_one_that_knows_of_the_choice_is_enough_and_those_behind_are_told_the_plan():
    world, agents = agreed(chosen=(False, True, False))
    back(world, agents)
    assert sorted(world.job().members) == [0, 1, 2] and world.job().plan.prefix == "1.g2.0.1"
    assert all(agents[slot].ranks[slot].generation == 2 for slot in range(3)) and world.job().phase == "running"


def test_it_is_not_looked_at_before_all_living_agents_have_spoken():
    world, agents = agreed(chosen=(False, True, False))
    agents[0].silent = agents[0].cut = False
    agents[0].status()
    world.run(0.2)
    assert world.job().generation == 1, "another one may know more"
    back(world, agents)
    assert world.job().plan.prefix == "1.g2.0.1"


def test_a_number_that_was_begun_is_used_up():
    world, agents = agreed(chosen=(False, False, False))
    back(world, agents)
    job = world.job()
    assert sorted(job.members) == [0, 1, 2] and job.plan.generation == 3 and "number_used" in world.kinds()


def test_the_agents_choice_counts_against_a_plan_of_the_controller_with_its_number():
    world, agents = trained(4, seconds=0.3)
    train(world, agents, range(2))
    for agent in agents[:3]:
        agent.obedient = False
    agents[3].die(3)
    for agent in agents[:3]:
        agent.set(agent.slots[0], state="stopped", broken=1)
    assert world.job().plan.generation == 2
    for agent in agents[:3]:
        agent.obedient = True
    agree(world, agents, lost=3)
    world.run(3.0)
    assert world.job().plan.prefix == "1.g2.0.1" and world.job().phase in ("running", "offering")


@pytest.mark.parametrize(("count", "ends"), [(4, "heard"), (5, "heard"), (4, "dead"), (5, "dead")])
def test_a_number_is_not_used_up_while_the_members_of_its_plan_are_silent(count: int, ends: str):
    """One agent has accepted a plan of two that are cut off: they may know that it was chosen, and be in it."""
    world, agents = on_slurm(8, count)
    world.run(2.0)
    train(world, agents, range(2))
    far, voter = agents[:2], agents[2]
    for agent in far:
        agent.silent = agent.cut = True
        others = {other.node for other in agents[2:]}
        world.cuts |= {frozenset((agent.node, other)) for other in {"", *others}}
    plan = wire.Plan(generation=2, members=[0, 1], store="n1:9000", prefix="1.g2.0.1", iteration=2, reason="agreed")
    voter.agreed = wire.Agreement(
        generation=2, since=1, plan=plan, lost=[], reason="agreed", by=far[0].agent, chosen=False
    )
    voter.die(2)
    world.restart()
    world.run(40.0)
    assert world.kinds().count("state_awaited") == 1 and "number_used" not in world.kinds()
    assert world.kinds().count("plan") == 1 and not world.job().failures
    assert not any(call[0] in ("down", "drain") for call in world.slurm.calls)
    if ends == "heard":
        world.cuts.clear()
        back(world, far)
    else:
        for agent in far:
            world.slurm.node_states[agent.node] = {"DOWN", "NOT_RESPONDING"}
            world.slurm.reasons[agent.node] = "rack 3 has burnt"
    world.run(10.0)
    assert "number_used" in world.kinds() and world.job().plan.generation == 3
    assert world.job().members.keys() >= set(range(3, count)) and (ends == "heard") == (0 in world.job().members)


def test_a_number_is_used_up_once_one_member_of_its_plan_is_heard_and_not_in_it():
    """The leader's node was lost before it could tell anybody that its plan was chosen."""
    world, agents = on_slurm(6, 4)
    world.run(2.0)
    train(world, agents, range(2))
    away(world, agents)
    agree(world, agents, lost=3, chosen=(False, False, False, False))
    world.dead_nodes.add(agents[0].node)
    back(world, agents[1:])
    world.run(10.0)
    assert "number_used" in world.kinds() and sorted(world.job().members)[:2] == [1, 2]


@pytest.mark.parametrize("later", [0.05, 0.25])
def test_a_newcomer_that_is_heard_before_those_who_agreed_on_its_offers_number_is_taken_in(later: float) -> None:
    """`later`: seconds until the others come back to a controller that has started again, less and more than
    offer_delay."""
    world, agents = trained(5, seconds=0.3)
    train(world, agents, range(2))
    agents[4].die(4)
    world.run(1.0)
    for agent in agents:
        agent.silent = agent.cut = True
    world.restart()
    agents[3].die(3)
    for place, agent in enumerate(agents[:3]):
        plan = wire.Plan(generation=3, members=[0, 1, 2], store="n1:9000", prefix="1.g3.0.1", iteration=2, reason="")
        plan.assignment = {place: [place]}
        lost = [structs.LostRank(3, agents[3].agent, 0)]
        by = {"by": agents[0].agent, "chosen": True}
        agent.agreed = wire.Agreement(generation=3, since=2, plan=plan, lost=lost, reason="agreed", **by)
        agent.set(place, state="running", generation=3, broken=2)
    agents[4].set(4, state="waiting")
    for coming, then in ((agents[4:], later), (agents[:4], 5.0)):
        for agent in coming:
            agent.silent = agent.cut = False
            agent.register()
            agent.status()
        world.run(then, heartbeats=False)
    for _ in range(3):
        boundary(world, 0.0)
        if agents[3].ranks[3].state == "starting":
            agents[3].ready()
        world.run(2.0)
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 2, 3, 4]
