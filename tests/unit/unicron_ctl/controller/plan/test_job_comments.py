"""The story of a job is written into its AdminComment, where the admin allows it."""

from __future__ import annotations

import pytest

from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.settings.partitions import PartitionConfig
from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX

OTHERS_TEXT = "billed to lab 7"


def healed_job(mode: str, actions: list[str] | None = None, first: str = OTHERS_TEXT) -> tuple[World, FakeSlurm]:
    """A job of which a rank has died, and that trains again."""
    slurm = FakeSlurm(3)
    partitions = {"default": PartitionConfig(mode=mode, actions=actions)}  # type: ignore[arg-type]
    world = World(slurm, observe=None, partitions=partitions)
    slurm.submit("1", 3)
    slurm.queue["1", 0]["admin_comment"] = first
    agents = [FakeAgent(world, "1", e, f"n{e + 1}", nodes=3) for e in range(3)]
    for agent in agents:
        agent.register()
        agent.ready()
    world.run(3.0)
    world.iterate("1", 0)
    agents[2].die(2)
    world.run(3.0)
    world.iterate("1", 1)
    world.run(3.0)
    return world, slurm


def comments(slurm: FakeSlurm) -> list[tuple[str, int]]:
    return [(job, element) for call, job, element, _ in slurm.calls if call == "comment"]


def test_what_was_healed_is_recorded_once_with_its_cost() -> None:
    world, _ = healed_job("act")
    (record,) = [event.record for event in world.log if event.kind == "healed"]
    assert record.failures == [world.job().failures[0].id] and record.nodes == 3 and record.node == "n3"
    assert record.seconds > 0.0 and world.job().failures[0].healed
    assert world.job().lost_before == world.job().lost_seconds
    world.run(5.0)
    assert sum(event.kind == "healed" for event in world.log) == 1


def test_the_first_element_says_what_was_healed_beside_what_others_wrote() -> None:
    world, slurm = healed_job("act")
    assert comments(slurm) == [("1", 0)]
    own, _, others = slurm.queue["1", 0]["admin_comment"].partition(" | ")
    assert own.startswith("unicron: 1 failure healed, ") and others == OTHERS_TEXT
    assert "n3" not in own, "everybody reads it"
    world.run(100.0)
    assert comments(slurm) == [("1", 0)], "it is there"


def test_what_says_whose_hold_it_is_stays_on_an_element_that_runs() -> None:
    late = f"{HOLD_PREFIX}, the plan has no node for it"
    _, slurm = healed_job("act", first=late)
    assert slurm.queue["1", 0]["admin_comment"] == late, "Slurm applies the hold at the next requeue"
    assert comments(slurm) == [("1", 1)]


@pytest.mark.parametrize(("mode", "actions"), [("observe", None), ("act", ["drain"])])
def test_what_is_not_allowed_is_recorded_and_not_done(mode: str, actions: list[str] | None) -> None:
    world, slurm = healed_job(mode, actions)
    world.run(10.0)
    assert not comments(slurm) and slurm.queue["1", 0]["admin_comment"] == OTHERS_TEXT
    assert [e.record.would for e in world.log if e.kind == "observed" and e.record.action == "comment"] == [
        "comment 1_0"
    ]


def test_a_job_without_a_failure_has_no_comment() -> None:
    slurm = FakeSlurm(2)
    world = World(slurm)
    slurm.submit("1", 2)
    world.start_job("1", 2)
    world.run(5.0)
    assert not comments(slurm)


def test_one_agent_is_to_say_at_the_end_what_was_healed() -> None:
    world, _ = healed_job("observe")
    notes = {agent.element: [m for m in agent.heard if isinstance(m, wire.Note) and m.at_end] for agent in world.agents}
    assert [note.text for note in notes[1]] == [""], "one is enough"
    (note,) = notes[0]
    assert (
        note.text.startswith("1 failure was healed, ") and "on n3" in note.text and "unicronctl explain 1" in note.text
    )
