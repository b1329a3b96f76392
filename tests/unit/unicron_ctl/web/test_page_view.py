"""What the page shows of a node and of a failure."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from tests.support.world import World
from unicron_ctl.controller.api.job_answers import failure_answer
from unicron_ctl.shared.protocol import structs
from unicron_ctl.web import page_view


@pytest.mark.parametrize("words", ["IDLE DRAIN", "MIXED FAIL", "DOWN", "IDLE BLOCKED"])
def test_the_pages_map_draws_nodes_by_the_table(words: str) -> None:
    look = page_view._look_of(SimpleNamespace(states=words.split(), healthy=False), [], set())
    assert look == ("drained" if words in ("IDLE DRAIN", "MIXED FAIL") else "down")


def test_a_failure_of_several_ranks_names_all_of_them() -> None:
    world = World()
    _, agent = world.start_job(nodes=2, ranks=2)
    world.run(1.0)
    for slot in agent.slots:
        rank = agent.ranks[slot] = copy.copy(agent.ranks[slot])
        rank.state, rank.changed = "exited", world.now
        rank.exit = structs.Exit(code=-9, at=world.now, lived=600.0 + slot / 100, last_line="")
    agent.status()
    (failure,) = world.job().failures
    assert page_view._failure(failure_answer(failure))["where"] == "slots 2-3 on n2"
