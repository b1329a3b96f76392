"""A job whose training state was found to be wrong is formed anew from one that is sound, by the same processes, and so
is one that fails from the same state again and again."""

from __future__ import annotations

import pytest

from tests.support.world import FakeAgent, World
from unicron_ctl.controller.api.job_answers import job_answer
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.replication.forming import formable, soundly
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.protocol.structs import RankStatus, Shards


def trained(nodes: int = 3, iterations: int = 13) -> tuple[World, list[FakeAgent]]:
    """A job that has trained to iteration 12; its last verified state is that of iteration 8."""
    world = World()
    agents = world.start_job(nodes=nodes)
    for agent in agents:
        agent.set(agent.slots[0], remembers=True)
    for iteration in range(iterations):
        world.iterate("1", iteration)
    world.run(0.5)
    return world, agents


def go_back(agent: FakeAgent, verified: int = 8, kept: list[tuple[int, str]] | None = None) -> None:
    """What its rank says once it has given up its state."""
    (slot,) = agent.slots
    rank = agent.ranks[slot]
    kept = [(8, "m8"), (4, "m4")] if kept is None else kept
    agent.set(slot, state="waiting", broken=rank.generation, went_back=verified, kept=kept)


def begins(agents: list[FakeAgent]) -> None:
    """All are in the next generation and have its state."""
    for agent in agents:
        agent.set(agent.slots[0], went_back=None)


def reforms(world: World) -> list[records.Reform]:
    return [event.record for event in world.log if isinstance(event.record, records.Reform)]


def test_all_go_back_in_the_processes_that_they_have(snapshot):
    world, agents = trained()
    for agent in agents:
        go_back(agent)
    world.run(5.0)
    begins(agents)
    job = world.job()
    assert (job.phase, job.plan.iteration, sorted(job.members)) == ("running", 8, [0, 1, 2])
    assert not any(agent.orders(wire.StartRank) for agent in agents) and not job.failures
    assert [event.record.reason for event in world.log if event.kind in ("break", "reform", "plan")][1:] == snapshot
    world.check_replay()


def test_status_says_so_until_the_iterations_are_made_again():
    world, agents = trained()
    for agent in agents:
        go_back(agent)
    world.run(5.0)
    begins(agents)
    told = job_answer(world.core, world.job(), EVERYBODY)
    assert told.unsound_until == 13
    assert "iterations up to 13 are made again" in status_tables.made_again(told)
    for iteration in range(8, 14):
        world.iterate("1", iteration)
    world.run(0.5)
    told = job_answer(world.core, world.job(), EVERYBODY)
    assert told.unsound_until is None and status_tables.made_again(told) == ""


def test_what_is_newer_is_never_begun_from_before_the_job_has_trained_past_it():
    """A node was away when the others gave their state up, and its memory has the wrong one."""
    world, agents = trained()
    for agent in agents:
        go_back(agent)
    world.run(5.0)
    begins(agents)
    for iteration in range(8, 10):
        world.iterate("1", iteration)
    world.run(0.5)
    assert world.job().newest_sound == 10
    for agent in agents:
        agent.die(agent.slots[0])
    world.run(3.0)
    for agent in agents:
        (slot,) = agent.slots
        kept = [(12, "wrong"), (9, "m9")] if slot == 1 else [(9, "m9"), (8, "m8")]
        agent.set(slot, state="waiting", kept=kept, remembers=True)
    world.run(10.0)
    assert world.job().plan.iteration == 9
    for iteration in range(9, 15):
        world.iterate("1", iteration)
    assert world.job().newest_sound is None
    world.check_replay()


def test_a_rank_that_has_not_heard_of_it_starts_again_and_its_state_counts_for_nothing():
    world, agents = trained()
    for agent in agents[:2]:
        go_back(agent)
    world.run(3.0)
    assert agents[2].orders(wire.Break), "it has stopped with its state by that"
    assert [order.slot for order in agents[2].orders(wire.StartRank)] == [2]
    agents[2].set(2, state="waiting", kept=[(12, "wrong"), (8, "m8")], remembers=True)
    world.run(5.0)
    job = world.job()
    assert (job.plan.iteration, sorted(job.members), job.offer.joiners) == (8, [0, 1], [2])


def test_the_last_verified_state_counts_that_any_rank_knows():
    """A newcomer has seen no audit."""
    world, agents = trained()
    go_back(agents[0])
    go_back(agents[1])
    go_back(agents[2], verified=-1, kept=[(12, "wrong")])
    world.run(5.0)
    assert world.job().plan.iteration == 8


def test_without_a_verified_state_a_checkpoint_from_before_the_job_is_taken():
    world = World()
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", nodes=2) for e in range(2)]
    for agent in agents:
        agent.register()
        agent.set(agent.slots[0], state="waiting", kept=[(6, "m6")], saved=6, remembers=True)
    world.run(3.0)
    for iteration in range(6, 13):
        world.iterate("1", iteration)
    world.run(0.5)
    for agent in agents:
        go_back(agent, verified=-1, kept=[(6, "m6"), (4, "m4")])
    world.run(5.0)
    assert world.job().plan.iteration == 6 and "no later one is verified" in reforms(world)[-1].reason


def test_without_any_the_job_ends_with_a_line_and_does_not_begin_anew(snapshot):
    world, agents = trained(nodes=2)
    for agent in agents:
        go_back(agent, verified=-1, kept=[])
    world.run(3.0)
    for agent in agents:
        assert agent.orders(wire.StartRank), "a process that began from the script's own state"
        agent.set(agent.slots[0], state="waiting", kept=[(0, "")], remembers=True)
    world.run(5.0)
    assert world.job().ended.code == 1 and world.job().ended.reason.partition("; ")[0] == snapshot


def test_what_a_node_has_of_a_later_iteration_is_not_fetched():
    world, agents = trained(nodes=2)
    for agent in agents:
        agent.memory = True
        agent.images_at = "n:1"
        agent.images = [structs.Image("state", agent.slots[0], 12, 0, 1, 0, 1, 1, "wrong", 8)]
        go_back(agent)
    world.run(5.0)
    assert world.job().plan.iteration == 8 and not any(agent.orders(wire.Fetch) for agent in agents)


def test_the_owner_sees_which_state_is_verified():
    world, agents = trained(nodes=2)
    assert job_answer(world.core, world.job(), EVERYBODY).verified is None
    agents[0].set(0, verified=8)
    assert job_answer(world.core, world.job(), EVERYBODY).verified == 8


# ---------------------------------------------------------------- pure
def test_only_sound_states_are_left():
    reports = {
        0: RankStatus(state="waiting", iteration=12, kept=[(12, "x"), (8, "m"), (0, "")]),
        1: RankStatus(state="waiting", iteration=12, kept=[(12, "x")]),
        2: RankStatus(state="waiting", iteration=8, saved=8),
        3: RankStatus(state="waiting", iteration=8, saved=0),
        4: RankStatus(state="waiting", iteration=12, saved=0, shards=[Shards(1, 9, 1, [0]), Shards(1, 8, 1, [0])]),
    }
    found = soundly(reports, 8, from_script=False)
    assert [found[slot].kept for slot in range(5)] == [[(8, "m")], [(-1, "")], [(8, "")], [(-1, "")], [(-1, "")]]
    assert [each.version for each in found[4].shards] == [8]
    assert soundly(reports, 8, from_script=True)[3].kept == [(8, "")]
    assert formable({slot: found[slot] for slot in (1, 3)}, 1) is None
    assert formable({slot: found[slot] for slot in (0, 1)}, 1).joiners == [1]


# ---------------------------------------------------------------- the same state again and again
def start(agents: list[FakeAgent], *kept: tuple[int, str]) -> None:
    for agent in agents:
        agent.set(agent.slots[0], state="waiting", kept=list(kept), remembers=True)


def fail(world: World, agents: list[FakeAgent], line: str) -> None:
    """All processes end alike, before the first iteration; they start again."""
    for agent in agents:
        agent.die(agent.slots[0], code=1, last_line=line)
    world.run(120.0)


@pytest.mark.parametrize("older", [[(4, "m4")], []])
def test_the_third_start_takes_an_older_state_and_says_so_where_there_is_none(older, snapshot):
    """Megatron-LM #5281: 44 starts from one checkpoint that was bad."""
    world, agents = trained(nodes=2)
    began = []
    for _ in range(4):
        fail(world, agents, "RuntimeError: found NaN in local grad norm")
        if world.job().ended:
            break
        start(agents, (12, "m12"), *older)
        world.run(5.0)
        began.append(world.job().plan.iteration)
    plans = [event.record.reason for event in world.log if isinstance(event.record, records.PlanMade)]
    said = [reform.reason for reform in reforms(world) if "in a row" in reform.reason]
    assert began[:2] == [12, 12]
    if older:
        assert began[2] == 4 and said == snapshot
    else:
        assert any("and there is no older state" in reason for reason in plans[3:]) and not said
    world.check_replay()


def test_a_state_from_which_an_iteration_was_made_is_not_to_blame():
    world, agents = trained(nodes=2)
    for _ in range(4):
        fail(world, agents, "RuntimeError: found NaN in local grad norm")
        if world.job().ended:
            break
        start(agents, (12, "m12"), (4, "m4"))
        world.run(5.0)
        assert world.job().plan.iteration == 12
        world.iterate("1", 12)
        world.run(0.5)
    assert not any("in a row" in reform.reason for reform in reforms(world))
