"""A micro-batch that fails on one rank after another is the data's or the script's own failure; a loss that is no
number is said."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.world import FakeAgent, World
from unicron_ctl.controller.api.job_answers import job_answer
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.answer_schema import Job
from unicron_detector.processes.rank_messages import LASTING_CORRUPTION, UNSOUND_MICRO_BATCH

NAN = "found NaN in local forward loss calculation"


def trained(nodes: int = 3) -> tuple[World, list[FakeAgent]]:
    world = World()
    agents = world.start_job(nodes=nodes)
    for iteration in range(5):
        world.iterate("1", iteration)
    return world, agents


def raise_in(world: World, agent: FakeAgent, index: int, text: str = NAN, kind: str = "ValueError") -> None:
    slot = agent.slots[0]
    at: dict[str, Any] = {"iteration": 5, "micro_batch": index}
    fault = structs.Fault(type=kind, text=text, at=world.now, fatal=True, lived=500.0, **at)
    agent.set(slot, fault=fault)
    world.run(15)


def test_one_that_fails_on_two_ranks_ends_the_job_and_is_named(snapshot) -> None:
    world, agents = trained()
    raise_in(world, agents[2], 1)
    assert world.job().phase != "ended"
    assert world.job().failures[-1].record.reason.endswith("in micro-batch 1 of iteration 5")
    raise_in(world, agents[0], 1)
    job = world.job()
    assert job.phase == "ended" and job.ended.code == 1
    assert job.ended.reason == snapshot
    assert not job.avoid


@pytest.mark.parametrize(
    ("index", "text", "kind"),
    [
        (2, NAN, "ValueError"),  # another micro-batch
        (1, "bad", "ValueError"),  # another cause
        (1, "Connection reset by peer", "RuntimeError"),  # a peer's end, not the data's doing
        (1, "CUDA error: uncorrectable ECC error encountered", "RuntimeError"),
    ],
)
def test_what_is_not_the_same_failure_ends_nothing(index: int, text: str, kind: str) -> None:
    world, agents = trained()
    raise_in(world, agents[2], 1)
    raise_in(world, agents[0], index, text, kind)
    assert world.job().phase != "ended"


def test_a_job_that_goes_back_in_vain_ends_at_once() -> None:
    world, agents = trained()
    text = "the training went back 3 times to a sound state, and came no further than iteration 5"
    fault = structs.Fault(type=LASTING_CORRUPTION, text=text, at=world.now, fatal=True, lived=500.0)
    for agent in agents:
        agent.set(agent.slots[0], fault=fault)
    world.run(15)
    job = world.job()
    assert job.phase == "ended" and job.ended.code == 1 and text in job.ended.reason
    assert not job.avoid


def test_a_job_of_one_rank_tries_it_three_times() -> None:
    world, agents = trained(nodes=1)
    for count in range(1, 4):
        agent = agents[0]
        raise_in(world, agent, 1)
        assert (world.job().phase == "ended") == (count == 3), count
        agent.ready()
        world.run(70)
    assert "on slot 0, 3 times" in world.job().ended.reason


def test_a_loss_that_is_no_number_is_said_until_it_is_one(snapshot) -> None:
    world, agents = trained(nodes=1)

    def step(iteration: int, loss: float) -> Job:
        world.now += 0.5
        agents[0].report(iteration, structs.RankStep(0, list(range(8)), 0.5, loss, None), total=8)
        return job_answer(world.core, world.job(), EVERYBODY)

    assert step(5, 2.0).nan_since is None
    assert step(6, math.nan).nan_since == 6
    told = step(7, math.inf)
    assert told.nan_since == 6 and status_tables.not_finite(told) == snapshot
    world.check_replay()
    told = step(8, 1.0)
    assert told.nan_since is None and status_tables.not_finite(told) == ""
    assert told.lost_seconds == 1.0, "two iterations of half a second"
    assert told.goodput == pytest.approx(told.trained_seconds / (told.trained_seconds + 1.0))


def test_what_it_takes_to_try_an_iteration_again_is_lost() -> None:
    world, agents = trained()
    for iteration in range(5, 20):
        world.iterate("1", iteration)
    before = job_answer(world.core, world.job(), EVERYBODY)
    assert before.lost_seconds == 0.0
    at: dict[str, Any] = {"iteration": 20, "micro_batch": 3}
    note = structs.Fault(type=UNSOUND_MICRO_BATCH, text="it is left out", at=world.now, **at)
    agents[0].set(0, note=note)
    for slot, agent in enumerate(agents):
        mine = [index for index in range(8) if index % 3 == slot]
        agent.report(20, structs.RankStep(slot, mine, 0.75, 1.0, mine), total=8)
    after = job_answer(world.core, world.job(), EVERYBODY)
    assert world.job().iteration == 20 and after.ledger_violations == 0
    assert after.lost_seconds == pytest.approx(0.25), "the others took half a second"
    world.check_replay()
