"""The controller judges so many characters in one turn as its budget has, whatever its agents say at once."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.rank_texts import Counting, different, watchdog
from tests.support.world import World
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import structs
from unicron_detector.failures.text_budget import NOT_JUDGED, OF_A_JOB

RANKS = 64


def ended(world: World, last_lines: list[str], code: int) -> Counting:
    """All ranks of an agent end at once, each with its line."""
    classifier = Counting()
    agents = world.start_job(nodes=2, ranks=RANKS)
    world.core.configure(world.config, classifier)
    agent = agents[0]
    for slot, line in zip(agent.slots, last_lines, strict=True):
        end = structs.Exit(code=code, at=world.now, lived=60.0, last_line=line)
        status = msgspec.structs.replace(agent.ranks[slot], state="exited", exit=end, changed=world.now + 1e-6)
        agent.ranks[slot] = status
    agent.status()
    return classifier


def failures(world: World) -> list[records.FailureDetected]:
    return [event.record for event in world.log if isinstance(event.record, records.FailureDetected)]


def test_different_texts_of_all_ranks_of_a_node():
    world = World()
    classifier = ended(world, list(different(RANKS)), 1)
    assert 0 < sum(map(len, classifier.judged)) <= sum(OF_A_JOB)
    said = [failure.reason for failure in failures(world)]
    assert len(said) == RANKS and NOT_JUDGED not in said[0]
    assert all(failure.cause for failure in failures(world))


def test_texts_that_are_alike_are_judged_once():
    world = World()
    classifier = ended(world, [watchdog(rank) for rank in range(RANKS)], -6)
    assert len(classifier.judged) == 1
    assert [failure.cause for failure in failures(world)] == ["nccl_timeout"] * RANKS


@pytest.mark.parametrize("length", [3900, 100])
def test_notes_of_all_ranks(length):
    world = World()
    classifier = Counting()
    agent = world.start_job(nodes=2, ranks=RANKS)[0]
    world.core.configure(world.config, classifier)
    for slot, text in zip(agent.slots, different(RANKS, length), strict=True):
        note = structs.Fault(type="E", text=text, at=world.now)
        agent.ranks[slot] = msgspec.structs.replace(agent.ranks[slot], note=note, changed=world.now + 1e-6)
    agent.status()
    assert sum(map(len, classifier.judged)) <= sum(OF_A_JOB)
    assert len(failures(world)) == RANKS
