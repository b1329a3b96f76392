"""What a rank says of itself becomes its status; what is the agent's to know stays the agent's."""

from __future__ import annotations

import msgspec
import pytest

from unicron_ctl.agent.ranks.ranks import Rank
from unicron_ctl.shared.protocol import structs, wire
from unicron_detector.processes.rank_messages import CollectiveProgress, Fault, Status


@pytest.fixture
def rank() -> Rank:
    made = Rank(3, 1, ["true"], lambda slot, local, incarnation: {})
    made.status = structs.RankStatus(state="starting", incarnation=2, pid=7, process="S")
    return made


def test_each_status_is_what_the_rank_says(rank):
    assert rank.on_message(Status("waiting", micro_batches=8)), "a new state is told at once"
    rank.on_message(Status("running", generation=4, iteration=9, done=[1, 5], micro_batches=8))
    said = Status("running", generation=4, iteration=9, done=[1, 5], micro_batches=8, phase="reducing", loss=2.5)
    assert not rank.on_message(said), "progress is not"
    status = rank.status
    assert (status.state, status.generation, status.iteration, status.phase) == ("running", 4, 9, "reducing")
    assert (status.micro_batches, status.done, status.loss) == (8, [1, 5], 2.5)
    assert wire.decode(wire.encode(made := wire.Status(job="1", element=0, agent="a", sent=0.0, ranks={3: status})))
    assert wire.decode(wire.encode(made)).ranks == {3: status}


def test_what_the_agent_knows_better_stays_as_it_is(rank):
    rank.on_message(Status("waiting"))
    assert (rank.status.pid, rank.status.process, rank.status.incarnation) == (7, "S", 2) and rank.status.changed > 0


def test_progress_of_a_transfer_is_told_with_the_next_status(rank):
    assert rank.on_message(Status("entering", entering=4))
    assert not rank.on_message(Status("entering", entering=4, moved=1 << 30)) and rank.status.moved == 1 << 30
    assert not rank.on_message(CollectiveProgress(1 << 31)), "from the channel's own thread"
    assert rank.status.state == "entering" and rank.status.entering == 4 and rank.status.moved == 1 << 31
    assert not rank.on_message(CollectiveProgress(0, {"a.0.1": (3, 2, "gloo:all_reduce")}))
    assert rank.status.moved == 1 << 31 and rank.status.collectives == {"a.0.1": (3, 2, "gloo:all_reduce")}
    assert rank.on_message(Status("running")) and rank.status.moved == 0
    assert rank.status.collectives, "it stands where it stood"
    rank.on_message(Status("running", iteration=1))
    assert not rank.status.collectives


def test_an_exception_that_ends_the_process_is_kept_beside_the_status(rank):
    rank.on_message(Status("running", generation=4))
    assert rank.on_message(Fault("OSError", "no", 5.0))
    rank.on_message(Status("running", generation=4, phase="stepped"))
    assert rank.status.fault is not None and rank.status.fault.type == "OSError" and rank.status.end is not None


def test_a_fault_that_was_put_right_is_gone_with_the_next_status(rank):
    rank.on_message(Status("stopped", fault=Fault("RuntimeError", "a peer is gone", 5.0, iteration=3, micro_batch=1)))
    assert rank.status.fault is not None and rank.status.fault.micro_batch == 1 and rank.status.end is None
    rank.on_message(Status("running"))
    assert rank.status.fault is None


def test_a_process_that_has_ended_says_nothing_more(rank):
    rank.status.state = "finished"
    assert not rank.on_message(Status("running")) and rank.status.state == "finished"


@pytest.mark.parametrize(
    "fields",
    [{"state": "flying"}, {"state": "exited"}, {"state": "running", "done": "all"}, {"state": "running", "moved": -1}],
)
def test_a_message_that_does_not_fit_changes_nothing(rank, fields):
    before = rank.status
    with pytest.raises((ValueError, msgspec.ValidationError)):
        rank.on_message(Status(**fields))
    assert rank.status is before
