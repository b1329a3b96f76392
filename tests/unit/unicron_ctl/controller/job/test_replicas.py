"""Jobs whose replicas have several ranks: the unit that is lost, that goes on and that comes in is the replica."""

from __future__ import annotations

import pytest

from tests.support.scenarios import boundary, replica_that_waits, trained
from tests.support.world import MICRO_BATCHES, FakeAgent, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.api.job_answers import job_answer
from unicron_ctl.controller.judge.rank_failures import to_restart
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs, wire


def started(
    nodes: int = 2, ranks: int = 2, replica: int = 2, lanes: int = 1, **settings
) -> tuple[World, list[FakeAgent]]:
    world = World(**settings)
    agents = world.start_job(nodes=nodes, ranks=ranks, replica=replica, lanes=lanes)
    assert world.job().phase == "running"
    return world, agents


def states(agents: list[FakeAgent]) -> dict[int, str]:
    return {slot: rank.state for agent in agents for slot, rank in agent.ranks.items()}


def failures(world: World) -> list[str]:
    return [f"{one.record.kind_of_failure} {one.record.slots}" for one in world.job().failures]


def test_a_job_is_formed_of_complete_replicas_and_deals_to_their_heads():
    world, agents = started(nodes=2, ranks=2, replica=4)
    plan = world.job().plan
    assert (plan.members, plan.replica, plan.source, plan.joiners) == ([0, 1, 2, 3], 4, 0, [])
    assert plan.assignment == {0: list(range(MICRO_BATCHES))}
    assert all(agent.held[1].assignment == plan.assignment for agent in agents)


def test_what_completes_no_replica_waits_and_is_no_failure():
    world, agents = trained(3, ranks=1, replica=2, seconds=0.3)
    world.run(3.0)
    assert world.job().order == [0, 1] and states(agents)[2] == "waiting"
    world.run(400.0)
    assert failures(world) == [] and states(agents)[2] == "waiting"


def test_ranks_of_another_layout_wait_and_the_job_says_what_to_do(snapshot):
    world, agents = started(nodes=3, ranks=2, replica=2)
    agents[2].die(4)
    agents[2].replica = 4
    agents[2].set(4, state="waiting", replica=4)
    world.run(5.0)
    assert world.job().waits == snapshot and world.job().order == [0, 1, 2, 3]
    agents[2].set(4, state="waiting", replica=2)
    world.run(5.0)
    assert states(agents)[4] == states(agents)[5] == "entering" and world.job().waits == ""


def test_ranks_beyond_a_multiple_of_the_replica_are_standbys_until_another_completes_one():
    world = World()
    agents = [FakeAgent(world, "1", element, f"n{element}", replica=2, lanes=2) for element in range(3)]
    for agent in agents:
        agent.register()
        agent.ready()
    world.run(3.0)
    job = job_answer(world.core, world.job(), EVERYBODY)
    assert (job.layout, job.members, job.replicas, job.standbys) == ("F2", [0, 1], 1, [2])
    last = FakeAgent(world, "1", 3, "n3", replica=2, lanes=2)
    last.register()
    last.ready()
    world.run(3.0)
    assert job_answer(world.core, world.job(), EVERYBODY).standbys == []
    boundary(world, 0.5)
    assert world.job().order == [0, 1, 2, 3]


def test_a_job_says_which_ranks_of_its_first_replica_are_missing(snapshot):
    world = World()
    for element in (0, 1, 3):
        agent = FakeAgent(world, "1", element, f"n{element}", replica=4, lanes=4)
        agent.register()
        agent.ready()
    world.run(1.0)
    assert job_answer(world.core, world.job(), EVERYBODY).waits == "", "the others may just be starting"
    world.run(2.0)
    assert job_answer(world.core, world.job(), EVERYBODY).waits == snapshot


def test_a_job_that_can_never_make_a_replica_ends_and_says_what_to_do(snapshot):
    world = World()
    agents = world.start_job(nodes=2, ranks=1, replica=4, lanes=4)
    assert world.job().ended.code == 1 and world.job().ended.reason == snapshot
    assert {message.code for agent in agents for message in agent.orders(wire.End)} == {1}


def test_one_rank_of_another_layout_does_not_end_the_job():
    world = World()
    agents = [
        FakeAgent(world, "1", element, f"n{element}", nodes=2, replica=size) for element, size in ((0, 1), (1, 4))
    ]
    for agent in agents:
        agent.register()
        agent.ready()
    world.run(5.0)
    assert world.job().ended is None


def test_a_loss_takes_out_its_replica_and_the_living_rank_waits_with_its_state():
    world, agents = started()
    for agent in agents:
        for slot in agent.slots:
            agent.set(slot, done=[0, 2] if slot < 2 else [1])
    agents[1].die(3)
    assert world.job().order == [0, 1] and states(agents)[2] == "standby"
    assert world.job().plan.assignment == {0: [0, 2, 1, 3, 4, 5, 6, 7]}
    assert failures(world) == ["rank [3]"] and world.job().banished.keys() == {3}
    assert agents[1].ranks[2].incarnation == 0, "its process is kept"


def test_shard_groups_get_their_micro_batches_in_rounds():
    """An array of six elements with one rank each and `Layout(shard=2)`: three groups of two."""
    world, agents = started(nodes=6, ranks=1, replica=2, lanes=2)
    assert world.job().plan.assignment == {0: [0, 1, 6, 7], 2: [2, 3], 4: [4, 5]}
    for agent in agents[:4]:
        agent.set(agent.slots[0], done=[0, 1] if agent.element < 2 else [2, 3])
    agents[5].die(5)
    assert world.job().order == [0, 1, 2, 3] and states(agents)[4] == "standby"
    assert world.job().plan.assignment == {0: [0, 1, 4, 5], 2: [2, 3, 6, 7]}
    made = next(event.record for event in reversed(world.log) if event.kind == "plan")
    assert (made.reused, made.redistributed) == (4, 2), "of the lost group: micro-batches 4 and 5"


def two_stop(world: World, agents: list[FakeAgent]) -> None:
    """A rank of the last group is lost; one of each other group stops with two micro-batches done."""
    for agent in agents:
        agent.prompt = False
    agents[5].die(5)
    agents[0].set(0, state="stopped", broken=1, done=[0, 1])
    agents[2].set(2, state="stopped", broken=1, done=[2, 3])
    world.run(0.5)


def test_a_shard_group_of_which_a_rank_has_stopped_is_seen_by_its_share_of_micro_batches():
    """Its other rank waits in the last round. The shares of an undisturbed iteration are 4, 2 and 2."""
    world, agents = started(nodes=6, ranks=1, replica=2, lanes=2)
    world.iterate("1", 0)
    two_stop(world, agents)
    assert states(agents)[1] == "stopped", "its mate lacks a round"
    assert states(agents)[3] == "running", "its mate has finished"


def shared_by_speed(shares: list[int]) -> tuple[World, list[FakeAgent]]:
    """Three groups of two lanes, in an iteration whose micro-batches are dealt by speed."""
    world, agents = started(nodes=6, ranks=1, replica=2, lanes=2)
    world.iterate("1", 0)
    for agent in agents:
        agent.set(agent.slots[0], share=shares[agent.element // 2])
    return world, agents


def test_a_rank_that_has_stopped_is_seen_by_its_share_by_speed():
    world, agents = shared_by_speed([2, 4, 2])
    two_stop(world, agents)
    assert states(agents)[1] == "running", "its mate has finished"
    assert states(agents)[3] == "stopped", "its mate lacks a round"


@pytest.mark.parametrize(("shares", "redistributed"), [([2, 2, 4], 4), ([2, 4, 2], 2), ([4, 2, 0], 2), ([0, 0, 0], 2)])
def test_what_a_lost_group_had_by_its_speed_is_counted(shares, redistributed):
    """Also if it was lost before it told its share."""
    world, agents = shared_by_speed(shares)
    for agent in agents[:4]:
        agent.set(agent.slots[0], done=[0, 1] if agent.element < 2 else [2, 3])
    agents[5].die(5)
    made = next(event.record for event in reversed(world.log) if event.kind == "plan")
    assert (made.reused, made.redistributed) == (4, redistributed)


def test_a_standby_and_a_new_process_come_in_together_and_get_the_state():
    world, agents = started()
    agents[1].die(3)
    world.run(12.0)
    assert states(agents)[3] == "starting"
    agents[1].set(3, state="waiting")
    world.run(1.0)
    offer = world.job().offer
    assert (offer.members, offer.joiners, offer.source, offer.replica) == ([0, 1, 2, 3], [2, 3], 0, 2)
    agents[0].take_offer()
    world.run(0.3)
    assert world.job().phase == "running" and world.job().order == [0, 1, 2, 3]
    assert world.job().failures[0].restored_at is not None


def two_lost_at_once() -> tuple[World, list[FakeAgent]]:
    """Slots 1 and 2, of two replicas; what is left makes one."""
    world, agents = started(nodes=4, ranks=1, replica=2)
    agents[0].obedient = agents[3].obedient = False
    agents[1].die(1)
    agents[2].die(2)
    for agent in (agents[0], agents[3]):
        agent.obedient = True
        agent.get(agent.heard[-1])
    return world, agents


def test_two_losses_at_once_in_different_replicas():
    world, _ = two_lost_at_once()
    world.run(0.5)
    assert world.job().order == [0, 3] and world.job().plan.assignment == {0: list(range(MICRO_BATCHES))}
    assert world.job().phase == "running"


def test_a_healthy_replica_finishes_what_it_has_begun_and_a_later_loss_reaches_it():
    world, agents = started(nodes=6, ranks=1, replica=2)
    for agent in agents:
        agent.prompt = False
    agents[1].die(1)
    assert states(agents) == {0: "stopped", 1: "starting", 2: "running", 3: "running", 4: "running", 5: "running"}
    assert world.job().phase == "breaking"
    world.run(1.0)
    agents[3].die(3)
    world.run(0.5)
    assert states(agents)[2] == "stopped" and agents[2].ranks[2].broken == 1
    assert [m.lost for m in agents[2].heard if isinstance(m, wire.Break)][-1] == [1, 3]
    assert states(agents)[4] == states(agents)[5] == "running", "not hit"
    for agent in agents[4:]:
        agent.finish(agent.element, done=[2, 5])
    assert world.job().order == [4, 5] and states(agents)[0] == states(agents)[2] == "standby"
    assert world.job().plan.assignment == {4: [2, 5, 0, 1, 3, 4, 6, 7]}


def test_a_replica_that_finishes_its_schedule_is_not_late():
    """It shows no progress; only the limit of a whole iteration says that it hangs."""
    world, agents = started(nodes=4, ranks=1, replica=2, report_timeout=2.0, first_iteration_seconds=60.0)
    for agent in agents[2:]:
        agent.prompt = False
    agents[1].die(1)
    world.run(40.0)
    assert world.job().phase == "breaking" and len(failures(world)) == 1
    for agent in agents[2:]:
        agent.finish(agent.element)
    assert world.job().order == [2, 3]


def test_a_rank_that_stopped_half_way_releases_those_of_its_replica_who_wait_for_it():
    """Slot 3 has met an error of its own: slot 2 would wait for it in the pipeline, and count as late."""
    world, _ = replica_that_waits()
    assert world.job().phase == "running" and world.job().order == [2, 3] and len(failures(world)) == 1


def test_with_the_only_replica_broken_the_job_waits_and_says_so():
    world, agents = started(nodes=2, ranks=1, replica=2)
    agents[1].die(1)
    assert world.job().phase == "forming" and states(agents)[0] == "stopped"
    world.run(2.0)
    assert "slots [0]" in world.job().waits
    assert agents[0].ranks[0].incarnation == 0


def test_without_a_common_iteration_those_who_kept_theirs_start_again(snapshot):
    world, agents = started(nodes=2, ranks=1, replica=2)
    agents[0].set(0, iteration=7)
    agents[1].die(1)
    world.run(12.0)
    agents[1].set(1, state="waiting", iteration=5)  # from a checkpoint
    world.run(3.0)
    assert states(agents)[0] == "starting" and agents[0].ranks[0].incarnation == 1
    assert [e for e in world.log if e.kind == "reform"][-1].record.reason == snapshot
    agents[0].set(0, state="waiting", iteration=5)
    world.run(3.0)
    assert world.job().phase == "running" and world.job().plan.iteration == 5
    assert len(failures(world)) == 1


def test_a_standby_of_the_checkpoints_iteration_completes_the_state():
    world, agents = started(nodes=4, ranks=1, replica=2)
    for agent in agents:
        agent.set(agent.element, iteration=5)
    agents[3].die(3)  # slot 2 waits with the state of iteration 5
    for agent in agents[:2]:
        agent.set(agent.element, iteration=9)
    agents[1].die(1)
    world.run(12.0)
    agents[1].set(1, state="waiting", iteration=5)
    world.run(3.0)
    plan = world.job().plan
    assert world.job().phase == "running" and (plan.iteration, plan.source) == (5, 2)
    assert plan.members == [2, 1], "slot 0 has no mate: it waits for slot 3"
    assert states(agents)[0] == "standby" and agents[0].ranks[0].incarnation == 0
    agents[3].set(3, state="waiting")
    world.run(1.0)
    assert world.job().offer.members == [0, 3, 2, 1] and world.job().offer.source == 2


def test_a_silent_rank_of_the_only_replica_is_waited_for_and_the_job_goes_on_with_it():
    world, agents = started(nodes=2, ranks=1, replica=2, state_wait_seconds=30.0)
    agents[1].silent = True
    world.run(6.0)
    assert world.job().phase == "breaking" and 1 in world.job().lost
    assert [event.kind for event in world.log].count("state_awaited") == 1
    agents[1].silent = False
    world.run(3.0)
    assert world.job().phase == "running" and world.job().order == [0, 1] and world.job().plan.source is None


def test_a_controller_without_its_log_takes_the_replicas_over():
    world, agents = started(nodes=4, ranks=1, replica=2)
    world.log.clear()
    world.restart()
    world.run(3.0)
    assert world.job().phase == "running" and world.job().replica == 2 and world.job().order == [0, 1, 2, 3]
    agents[3].die(3)
    assert world.job().order == [0, 1] and states(agents)[2] == "standby"


def shards(version: int, *held: int) -> list[structs.Shards]:
    return [structs.Shards(1, version, 2, list(held))]


def test_with_copies_of_the_shards_the_job_goes_on_from_them():
    world, agents = started(nodes=4, ranks=1, replica=2)
    for slot, held in ((0, (0, 1)), (1, (0, 1)), (2, (1,))):
        agents[slot].set(slot, iteration=6, shards=shards(6, *held))
    agents[3].die(3)
    plan = world.job().plan
    assert (plan.members, plan.state, plan.step, plan.iteration) == ([0, 1], (1, 6), None, 6)


def test_a_lost_place_without_copies_sends_all_back_to_the_checkpoint():
    """Nobody has a shard of slot 3's half: the survivors keep their processes until its next one says that its node's
    memory has none either, then start again."""
    world, agents = started(nodes=4, ranks=1, replica=2)
    for slot, held in ((0, (0, 1)), (1, (0,)), (2, (1,))):
        agents[slot].set(slot, iteration=6, shards=shards(6, *held))
    agents[3].die(3)
    assert world.job().phase == "forming" and len(failures(world)) == 1
    world.run(20.0)
    assert [rank.incarnation for agent in agents[:3] for rank in agent.ranks.values()] == [0, 0, 0]
    agents[3].set(3, state="waiting")
    world.run(2.5)
    assert [rank.incarnation for agent in agents[:3] for rank in agent.ranks.values()] == [1, 1, 1]
    assert len(failures(world)) == 1, "nobody is to blame"


def test_shards_of_standbys_count_when_the_job_is_formed_anew():
    world, agents = started(nodes=4, ranks=1, replica=2)
    for slot in range(4):
        agents[slot].set(slot, iteration=6, shards=shards(6, 0, 1))
    agents[3].die(3)
    assert states(agents)[2] == "standby"
    agents[1].set(1, shards=[])
    agents[1].die(1)
    world.run(2.0)
    assert world.job().phase == "forming" and "slots [0, 2]" in world.job().waits
    agents[1].set(1, state="waiting")
    world.run(20.0)
    assert states(agents)[0] == "stopped", "slot 3's next process may have shards of the place"
    world.run(60.0)
    assert states(agents)[0] == "starting", "the new process has no shard of its place, and slot 3's does not come"


def all_killed(*held: tuple[int, ...], version: int = 6, **more) -> tuple[World, list[FakeAgent]]:
    """Two replicas of two ranks, on two nodes; the next processes find these shards in their nodes' memory."""
    world, agents = started()
    for agent in agents:
        for slot in agent.slots:
            agent.die(slot)
    world.run(1.0)
    assert world.job().phase == "forming"
    for agent in agents:
        for slot in agent.slots:
            found = [structs.Shards(1, version, 2, list(held[slot]))] if held[slot] else []
            agent.set(slot, state="waiting", shards=found, **more)
    world.run(3.0)
    return world, agents


def test_new_processes_go_on_from_the_shards_that_their_nodes_remember(snapshot):
    world, _ = all_killed((0, 1), (0,), (), (1,))
    plan = world.job().plan
    assert (sorted(plan.members), plan.state, plan.iteration, plan.joiners) == ([0, 1, 2, 3], (1, 6), 6, [2])
    assert plan.reason == snapshot
    assert sorted(index for share in plan.assignment.values() for index in share) == list(range(MICRO_BATCHES))


def test_where_memory_lacks_a_shard_all_go_on_from_the_file_and_the_job_says_so(snapshot):
    world, _ = all_killed((0, 1), (0,), (), (0,), iteration=4)
    plan = world.job().plan
    assert (plan.state, plan.iteration, plan.source) == (None, 4, 0)
    assert plan.reason == snapshot


def test_a_file_that_is_newer_than_what_memory_has_is_gone_on_from():
    world, _ = all_killed((0, 1), (0,), (), (1,), iteration=7)
    assert (world.job().plan.state, world.job().plan.iteration) == (None, 7)


def test_a_file_as_new_as_memory_is_not_read():
    world, _ = all_killed((0, 1), (0,), (), (1,), iteration=6)
    assert world.job().plan.state == (1, 6)


def test_an_element_that_leaves_takes_its_replicas_with_it():
    world, agents = started(nodes=4, ranks=1, replica=2)
    world.core.append("1", 0, records.ElementsAllotted(elements=[0, 1, 2], leaving=[3], reason=""))
    world.run(0.5)
    assert world.job().offer.members == [0, 1]
    boundary(world, 0.5)
    assert world.job().order == [0, 1] and states(agents)[2] == "standby"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ledger_takes_the_heads_word_for_their_replicas(size):
    world, _ = started(nodes=4, ranks=1, replica=size)
    for iteration in range(3):
        world.iterate("1", iteration)
    steps = [event for event in world.log if event.kind == "step"]
    assert len(steps) == 3 and all(event.record.ranks == 4 for event in steps)
    assert world.job().ledger_violations == 0


def test_what_a_composed_replica_computes_again_is_no_violation():
    """Slots 1 and 2 are lost at once: slot 0 drops what it has and computes it again with slot 3."""
    world, agents = two_lost_at_once()
    everything = list(range(MICRO_BATCHES))
    agents[0].step(0, 0, everything, computed=[0, 2, *everything])
    agents[3].step(3, 0, [])
    step = next(event.record for event in world.log if event.kind == "step")
    assert step.computed == MICRO_BATCHES + 2 and world.job().ledger_violations == 0
    agents[0].step(0, 1, everything, computed=[0, *everything])
    agents[3].step(3, 1, [])
    assert world.job().ledger_violations == 1, "nothing was lost in this one"


def test_a_rank_that_is_stopped_by_a_signal_is_blamed_and_not_those_of_its_replica_that_wait_for_it():
    world, agents = started(nodes=4, ranks=1, replica=2, hang_floor_seconds=0.5)
    for iteration in range(20):
        world.run(0.4)
        world.iterate("1", iteration)
    for agent in agents:
        agent.set(agent.element, phase="computing" if agent.element > 1 else "reducing")
    agents[3].set(3, process="T")
    world.run(12.0)
    assert failures(world) == ["hang [3]"]


def test_a_rank_that_computes_is_blamed_and_not_those_of_its_replica_that_have_finished():
    world, agents = started(nodes=4, ranks=1, replica=2, hang_floor_seconds=0.5)
    for iteration in range(20):
        world.run(0.4)
        world.iterate("1", iteration)
    for agent in agents:
        agent.set(agent.element, phase="computing" if agent.element > 1 else "reducing")
    agents[2].set(2, done=[1, 3])
    world.run(12.0)
    assert failures(world) == ["hang [3]"]
    reason = next(event.record.reason for event in world.log if event.kind == "hang")
    assert "slot 3 is in micro-batch 1 of iteration 20, slot 2 of its replica waits for it, 2 others wait in" in reason


def test_when_a_collective_hangs_again_all_replicas_but_one_start_anew():
    world, _ = started(nodes=6, ranks=1, replica=2)
    assert to_restart(world.job()) == {2, 3, 4, 5}
    alone, _ = started(nodes=2, ranks=1, replica=2)
    assert to_restart(alone.job()) == set(), "nobody else has the state"


def test_people_are_told_of_replicas_and_standbys(snapshot):
    world, agents = started(nodes=4, ranks=1, replica=2)
    agents[3].die(3)
    job = job_answer(world.core, world.job(), EVERYBODY)
    assert (job.layout, job.replica, job.replicas, job.standbys) == ("TP2", 2, 1, [2])
    assert status_tables.replicas(job) == snapshot
    explained = answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY)
    assert "replicas: TP2: 1 replica" in str(status_tables.explanation(explained)[0])
