"""What a rank says of itself becomes its status; what is the agent's to know stays the agent's."""

from __future__ import annotations

import msgspec
import pytest

from unicron.ctl.agent.ranks.ranks import Rank
from unicron.ctl.protocol import wire


@pytest.fixture
def rank() -> Rank:
    made = Rank(3, 1, ["true"], lambda slot, local, incarnation: {})
    made.status = wire.RankStatus(state="starting", incarnation=2, pid=7, process="S")
    return made


def says(**fields) -> dict:
    return {"kind": "rank", "incarnation": 2, "slot": 3, **fields}


def test_each_message_changes_what_it_names(rank):
    assert rank.heard(says(state="waiting", micro_batches=8)), "a new state is told at once"
    rank.heard(says(state="running", generation=4, iteration=9, done=[1, 5]))
    assert not rank.heard(says(phase="reducing", loss=2.5)), "progress is not"
    status = rank.status
    assert (status.state, status.generation, status.iteration, status.phase) == ("running", 4, 9, "reducing")
    assert (status.micro_batches, status.done, status.loss) == (8, [1, 5], 2.5)
    assert wire.decode(wire.encode(made := wire.Status(job="1", element=0, agent="a", sent=0.0, ranks={3: status})))
    assert wire.decode(wire.encode(made)).ranks == {3: status}


def test_what_the_agent_knows_better_is_not_the_ranks_to_say(rank):
    rank.heard(says(state="waiting", pid=1, process="T", idle=9.0, changed=-1.0))
    assert (rank.status.pid, rank.status.process, rank.status.idle) == (7, "S", 0.0) and rank.status.changed > 0


def test_a_message_of_a_process_that_was_replaced_is_ignored(rank):
    assert not rank.heard(says(state="running") | {"incarnation": 1})
    assert rank.status.state == "starting"


def test_progress_of_a_transfer_is_told_with_the_next_status(rank):
    assert rank.heard(says(state="entering", entering=4))
    assert not rank.heard(says(state="entering", entering=4, moved=1 << 30)) and rank.status.moved == 1 << 30
    assert not rank.heard(says(moved=1 << 31)), "from the channel's own thread"
    assert rank.status.state == "entering" and rank.status.entering == 4
    assert rank.heard(says(state="running", entering=0, moved=0)) and rank.status.moved == 0


def test_an_error_is_kept_beside_the_status(rank):
    rank.heard(says(state="running", generation=4))
    assert rank.heard({"kind": "fault", "incarnation": 2, "slot": 3, "type": "OSError", "text": "no", "at": 5.0})
    rank.heard(says(phase="stepped"))
    assert rank.status.fault is not None and rank.status.fault.type == "OSError" and rank.status.end is not None


@pytest.mark.parametrize("fields", [{"state": "flying"}, {"state": "exited"}, {"state": "running", "done": "all"}])
def test_a_message_that_does_not_fit_changes_nothing(rank, fields):
    before = rank.status
    with pytest.raises((ValueError, msgspec.ValidationError)):
        rank.heard(says(**fields))
    assert rank.status is before
