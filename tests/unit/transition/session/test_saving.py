"""The iterations that become checkpoints, the same in all ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from unicron_transition.iteration.exchange import CommitResult
from unicron_transition.session.persistence import SaveSchedule
from unicron_transition.snapshot import save_interval
from unicron_transition.snapshot.checkpoint import MINUTES, Checkpoints, Writer
from unicron_transition.snapshot.save_interval import Risk


class Memory:
    """A rank's images and the requests to its agent."""

    def __init__(self, asked: bool = False, filing: bool = False):
        self.asked = self.requested = asked
        self.is_filing = filing

    @property
    def is_awaited(self) -> bool:
        """It has no slices."""
        return self.is_filing

    def forget_asked(self) -> None:
        self.asked = self.requested = False


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, the only element of a list."""
    time_now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: time_now[0])
    return time_now


def agreed(*ranks: SaveSchedule) -> None:
    """One commit of these ranks."""
    result = CommitResult(save=any(rank.wanted for rank in ranks), busy=any(rank.busy for rank in ranks))
    for rank in ranks:
        rank.begin_iteration()
        rank.on_commit(result)


def test_every_so_many_iterations_and_the_same_in_all_ranks_though_one_is_late(tmp_path: Path, capfd) -> None:
    late = Memory(filing=True)
    ranks = [SaveSchedule(Checkpoints(tmp_path, 4), memory) for memory in (Memory(), late)]
    for iteration, wanted in ((3, False), (4, False), (8, False), (9, False), (12, True)):
        late.is_filing = iteration < 9
        agreed(*ranks)
        assert [rank.is_due(iteration) for rank in ranks] == [wanted] * 2, iteration
    assert capfd.readouterr().err.count("checkpoint of iteration 4: ") == 1


def test_when_the_minutes_of_one_rank_are_over_all_write_and_start_to_count_again(tmp_path: Path, now) -> None:
    early = SaveSchedule(Checkpoints(tmp_path, minutes=2), Memory())
    now[0] += 30.0
    other = SaveSchedule(Checkpoints(tmp_path, minutes=2), Memory())
    for seconds, wanted in ((80.0, False), (10.0, True), (31.0, False), (90.0, True)):
        now[0] += seconds
        agreed(early, other)
        assert [early.is_due(5), other.is_due(5)] == [wanted] * 2


def test_what_one_agent_was_asked_for_all_write_once(tmp_path: Path) -> None:
    asked = Memory(asked=True)
    ranks = [SaveSchedule(Checkpoints(tmp_path, 0), memory) for memory in (asked, Memory())]
    agreed(*ranks)
    assert [rank.is_due(7) for rank in ranks] == [True] * 2 and not asked.asked
    agreed(*ranks)
    assert [rank.is_due(8) for rank in ranks] == [False] * 2


def test_what_cannot_be_written_is_not_wanted() -> None:
    assert not SaveSchedule(None, Memory(asked=True)).wanted


@pytest.mark.parametrize("text", ["often", "-1", "inf", "nan"])
def test_minutes_that_make_no_sense_are_refused(tmp_path: Path, monkeypatch, text: str) -> None:
    monkeypatch.setenv(MINUTES, text)
    with pytest.raises(ValueError, match=f"{MINUTES}='{text}': write minutes"):
        Checkpoints(tmp_path)
    monkeypatch.setenv(MINUTES, "7.5")
    assert Checkpoints(tmp_path, minutes=3.0).minutes == 7.5


@pytest.mark.parametrize(
    ("given", "environment", "by_itself", "by_clock"),
    [
        ({}, None, True, True),
        ({"minutes": "auto", "interval": 5}, None, True, True),
        ({"interval": 5}, None, False, False),
        ({"interval": 0}, None, False, False),
        ({"minutes": 0}, None, False, False),
        ({"minutes": 30}, None, False, True),
        ({"minutes": 30}, "auto", True, True),
        ({}, "0", False, False),
    ],
)
def test_the_interval_finds_itself_unless_the_user_sets_it(
    tmp_path, monkeypatch, given, environment, by_itself, by_clock
):
    if environment is not None:
        monkeypatch.setenv(MINUTES, environment)
    made = Checkpoints(tmp_path, **given)
    assert (made.clock is not None, made.by_clock) == (by_itself, by_clock)


def test_the_rank_that_knows_what_a_save_costs_asks_for_the_next_one(tmp_path: Path, now) -> None:
    """A rank that writes nothing waits for it. The file of 10 s costs 0.2 s: with a loss in 1000 hours of one node the
    next one comes after 20 minutes."""
    agents = Memory()
    agents.set_aside = lambda *_: True
    writes, other = (SaveSchedule(Checkpoints(tmp_path), memory) for memory in (agents, Memory()))
    now[0] += save_interval.FIRST + 1.0
    agreed(writes, other)
    assert writes.is_due(5) and other.is_due(5)
    writes.store(5, None, [0, 1], 1, Writer())
    agents.is_filing = True
    now[0] += 10.0
    agreed(writes, other)
    agents.is_filing = False
    agreed(writes, other)
    wanted = save_interval.interval(0.0, 10.0, Risk(1, False))
    assert 1000.0 < wanted < 1300.0
    now[0] += wanted - 20.0
    assert not writes.wanted
    now[0] += 11.0
    assert writes.wanted and not other.wanted


def test_what_could_not_be_set_aside_is_due_again_and_nobody_has_asked_for_it(tmp_path: Path) -> None:
    memory = Memory(asked=True)
    memory.requested = False
    rank = SaveSchedule(Checkpoints(tmp_path), memory)
    agreed(rank)
    assert rank.is_due(5) and not rank.asked
    memory.asked = memory.requested = True
    agreed(rank)
    assert rank.is_due(6) and rank.asked


def test_a_rank_of_another_replica_writes_nothing_if_its_agent_does_not(tmp_path: Path, monkeypatch) -> None:
    memory = Memory()
    memory.set_aside = lambda *_: False
    memory.file_writer = lambda writer: writer
    checkpoints, saved = Checkpoints(tmp_path), []
    monkeypatch.setattr(checkpoints, "save", lambda *about: saved.append(about))
    rank = SaveSchedule(checkpoints, memory)
    rank.store(5, None, [0, 1], 1, Writer(), alone=False)
    assert not saved
    rank.store(5, None, [0, 1], 1, Writer())
    assert len(saved) == 1
