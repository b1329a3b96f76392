"""Which iterations become checkpoints, and that all ranks have the same answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from unicron.transition.iteration.exchange import Said
from unicron.transition.session.save_schedule import SaveSchedule
from unicron.transition.snapshot.checkpoint import MINUTES, Checkpoints


class Memory:
    """What a rank has set aside, and what was asked of its agent."""

    def __init__(self, asked: bool = False, filing: bool = False):
        self.asked, self.is_filing = asked, filing

    def forget_asked(self) -> None:
        self.asked = False


def agreed(*ranks: SaveSchedule) -> None:
    """One commit of these ranks."""
    said = Said(save=any(rank.wanted for rank in ranks), busy=any(rank.busy for rank in ranks))
    for rank in ranks:
        rank.begin_iteration()
        rank.on_commit(said)


def test_every_so_many_iterations_and_the_same_in_all_ranks_though_one_is_late(tmp_path: Path, capfd) -> None:
    late = Memory(filing=True)
    ranks = [SaveSchedule(Checkpoints(tmp_path, 4), memory) for memory in (Memory(), late)]
    for iteration, wanted in ((3, False), (4, False), (8, False), (9, False), (12, True)):
        late.is_filing = iteration < 9
        agreed(*ranks)
        assert [rank.is_due(iteration) for rank in ranks] == [wanted] * 2, iteration
    assert capfd.readouterr().err.count("no checkpoint of iteration 4: the one before is still being written") == 1


def test_when_the_minutes_of_one_rank_are_over_all_write_and_begin_to_count_anew(tmp_path: Path, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    early = SaveSchedule(Checkpoints(tmp_path, minutes=2), Memory())
    now[0] += 30.0
    other = SaveSchedule(Checkpoints(tmp_path, minutes=2), Memory())
    for seconds, wanted in ((80.0, False), (10.0, True), (31.0, False), (90.0, True)):
        now[0] += seconds
        agreed(early, other)
        assert [early.is_due(5), other.is_due(5)] == [wanted] * 2


def test_what_one_agent_was_asked_for_all_write_once(tmp_path: Path) -> None:
    asked = Memory(asked=True)
    ranks = [SaveSchedule(Checkpoints(tmp_path), memory) for memory in (asked, Memory())]
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
