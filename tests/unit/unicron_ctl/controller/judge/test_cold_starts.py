"""Ranks that did not start warm: why is on record once, and told to who asks."""

from __future__ import annotations

from tests.support.training import events
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.job.runtime import COLD_REASONS
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.protocol import wire

WHY = "its imports start threads (queue; 1)"


def says(world: World, agent: FakeAgent, **cold: str) -> None:
    """The agent's next status."""
    agent.number += 1
    world.to_core(
        agent,
        wire.Status(
            job=agent.job,
            element=agent.element,
            agent=agent.agent,
            sent=world.now,
            number=agent.number,
            ranks=dict(agent.ranks),
            cold={int(slot.removeprefix("slot")): reason for slot, reason in cold.items()},
        ),
    )


def test_each_reason_is_recorded_once_for_a_job(snapshot):
    world = World()
    one, two = world.start_job("1", 2)
    for _ in range(3):
        says(world, one, slot0=WHY)
        says(world, two, slot1=WHY)
    says(world, two, slot1="its zygote has died")
    said = [(event.record.element, event.record.reason) for event in events(world, "started_cold")]
    assert said == snapshot


def test_an_agent_cannot_fill_the_log_with_reasons():
    world = World()
    (one,) = world.start_job("1", 1)
    for number in range(3 * COLD_REASONS):
        says(world, one, slot0=f"{number} {'x' * 5000}")
    found = events(world, "started_cold")
    assert len(found) == COLD_REASONS and all(len(event.record.reason) < 500 for event in found)


def test_who_asks_is_told_which_ranks_and_why():
    world = World()
    one, two = world.start_job("1", 2)
    one.ranks[0].pid = two.ranks[1].pid = 77
    says(world, one, slot0=WHY)
    says(world, two)
    data = answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY)  # type: ignore[arg-type]
    assert data.cold == {WHY: [0]}
    assert f"started cold: slot 0: {WHY}" in status_tables.explanation(data)[0].plain
    (job,) = answers.answer(world.core, None, "jobs", {}, EVERYBODY)  # type: ignore[arg-type]
    assert [rank.start for element in job.elements for rank in element.ranks] == [f"cold: {WHY}", "warm"]
    says(world, one)
    assert answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY).cold == {}  # type: ignore[arg-type]


def test_a_rank_whose_state_is_not_kept_in_memory_is_shown_with_the_reason(snapshot):
    world = World()
    agents = world.start_job(nodes=2)
    agents[1].set(1, forgets="OSError: No space left on device")
    data = answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY)  # type: ignore[arg-type]
    assert data.forgets == {"OSError: No space left on device": [1]}
    status = answers.answer(world.core, None, "status", {}, EVERYBODY)  # type: ignore[arg-type]
    assert [status_tables.explanation(data)[0].plain, status_tables.job_notes(status.jobs[0])] == snapshot
