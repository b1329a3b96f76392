"""States that an audit has found sound: they are marked, stay until another one is verified, and a rank goes back to
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kept import WRITER, beginnings, copy, iterations, training
from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.image_format import inventory
from unicron_transition.snapshot.keeper import Keeper
from unicron_transition.snapshot.whole_state import WholeState

SUFFIX = folders.UNSOUND_SUFFIX


def verified(folder: Path) -> list[int]:
    return sorted(found.key.iteration for found in inventory(folder) if found.verified)


# ------------------------------------------------------------ images
def test_a_verified_image_stays_until_another_one_is_verified(tmp_path):
    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(training())
    copy(keeper, gatherer, 4, 5)
    keeper.note_verified(5, WRITER.mark)
    copy(keeper, gatherer, 6, 7, 8)
    assert iterations(tmp_path) == [5, 8] and verified(tmp_path) == [5]
    keeper.note_verified(8, WRITER.mark)
    copy(keeper, gatherer, 9)
    assert iterations(tmp_path) == [8, 9] and verified(tmp_path) == [8]
    keeper.close()


def test_without_audits_the_files_take_turns_as_before(tmp_path):
    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(training())
    copy(keeper, gatherer, *range(4, 9))
    keeper.close()
    assert iterations(tmp_path) == [7, 8] and not verified(tmp_path)


def test_the_next_process_keeps_it_too_even_if_it_began_with_a_later_one(tmp_path):
    gatherer = Gatherer(training())
    keeper = Keeper(tmp_path, 0, 1)
    copy(keeper, gatherer, 4)
    keeper.note_verified(4, WRITER.mark)
    copy(keeper, gatherer, 5)
    keeper.close()
    later = Keeper(tmp_path, 0, 1)
    later.needed = 5
    copy(later, gatherer, 6, 7)
    later.close()
    assert iterations(tmp_path) == [4, 7] and verified(tmp_path) == [4]


def test_an_older_image_is_verified_with_the_state_that_came_of_it_but_not_one_of_another_past(tmp_path):
    """A wrong state stays wrong. Images are made every 4 iterations here, and the audit was of iteration 6."""
    keeper, gatherer = Keeper(tmp_path, 0, 4), Gatherer(training())
    copy(keeper, gatherer, 4)
    keeper.note_verified(6, "another")
    keeper.close()
    assert verified(tmp_path) == [4]
    other = Keeper(tmp_path, 1, 4)
    copy(other, gatherer, 4)
    other._base = 2  # of a later generation, which has made no image yet
    other.note_verified(6, "another")
    other.note_verified(4, "another")
    other.close()
    assert [found.verified for found in inventory(tmp_path) if found.key.slot == 1] == [False]


# ------------------------------------------------------------ checkpoints
def test_the_newest_verified_checkpoint_is_not_removed_for_later_ones(tmp_path):
    state, saves = training(), Checkpoints(tmp_path, keep=1)
    for iteration in (2, 4, 6, 8):
        saves.save(state, iteration, WRITER)
        saves.wait_written()
        if iteration in (2, 4):
            saves.note_verified(iteration, WRITER.mark)
    assert [each.iteration for each in saves.whole_ones()] == [8, 4] and saves.verified == 4
    assert [each.verified for each in saves.whole_ones()] == [False, True]


def test_unsound_checkpoints_are_set_aside_and_never_removed_nor_listed(tmp_path, capsys):
    state, saves = training(), Checkpoints(tmp_path, keep=9)
    for _ in range(2):
        for iteration in (2, 4, 6):
            saves.save(state, iteration, WRITER)
            saves.wait_written()
        saves.set_aside_after(2)
        assert [each.iteration for each in saves.whole_ones()] == [2]
    names = sorted(path.name for path in tmp_path.glob(f"*.{SUFFIX}*"))
    assert len(names) == 4 and names[0] == f"iteration-00000004.{SUFFIX}"
    assert "set aside, because the training state in them is unsound" in capsys.readouterr().err
    saves.set_aside_after(2)
    assert capsys.readouterr().err == "", "nothing is left to be said"


# ------------------------------------------------------------ the way back
class Rank:
    """The state of one rank that has trained to iteration 8, with images of its node and checkpoints."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory, self.state = folder / "memory", training()
        self.memory.mkdir()
        monkeypatch.setenv("UNICRON_MEMORY", str(self.memory))
        self.checkpoints = Checkpoints(folder / "saves", keep=9)
        self.local = WholeState(self.state, 0)
        assert self.local.find_start(self.checkpoints, 0, lambda: WRITER) == 0
        self.local.note_has_state()
        self.local.goes_on(0)
        for iteration in (2, 4, 6):
            self.checkpoints.save(self.state, iteration, WRITER)
            self.checkpoints.wait_written()
        for iteration in range(1, 9):
            self.local.keep_boundary(iteration, [0], 1, WRITER)
            self.local.wait_whole()
            if iteration in (3, 5):
                self.local.note_verified(iteration, WRITER.mark)


def test_a_rank_that_goes_back_has_sound_states_only_and_goes_on_from_there(tmp_path, monkeypatch):
    rank = Rank(tmp_path, monkeypatch)
    copy_of_another = rank.memory / "copy-state-9.image"
    copy_of_another.write_bytes(next(f.path for f in inventory(rank.memory) if f.key.iteration == 8).read_bytes())
    assert iterations(rank.memory) == [5, 8, 8]
    assert rank.local.go_back(WRITER, True) == 5 == rank.local.went_back
    assert rank.local.reachable_states(8, WRITER) == [(5, WRITER.mark), (4, WRITER.mark), (2, WRITER.mark)]
    assert iterations(rank.memory) == [5], "also what it keeps for another node"
    rank.checkpoints.save(rank.state, 7, WRITER)  # of an agent that was in the middle of it
    rank.checkpoints.wait_written()
    rank.local.goes_on(5, first=True)
    assert [each.iteration for each in rank.checkpoints.whole_ones()] == [4, 2] and rank.local.went_back is None
    rank.local.keep_boundary(6, [0], 2, WRITER)
    rank.local.wait_whole()
    assert iterations(rank.memory) == [5, 6] and verified(rank.memory) == [5]
    rank.local.close()


def test_of_a_state_that_nobody_has_verified_nothing_in_memory_is_left_and_checkpoints_from_before(
    tmp_path, monkeypatch
):
    rank = Rank(tmp_path, monkeypatch)
    rank.local.verified = -1
    assert rank.local.go_back(WRITER, False) == 0 and rank.local.went_back == -1
    assert rank.local.reachable_states(8, WRITER) == [] and not iterations(rank.memory)
    assert len(list((tmp_path / "saves").glob(f"*.{SUFFIX}"))) == 3, "whoever it is: another rank may have begun later"
    rank.local.close()


def test_an_image_that_is_set_aside_for_the_agent_becomes_no_file(tmp_path):
    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(training())
    keeper.copy(gatherer, 5, 1, Writer(), checkpoint_file.WHOLE)
    keeper.wait_whole()
    assert checkpoint_file.asides(tmp_path) and keeper.aside.is_open
    keeper.remove_after(4)
    assert not checkpoint_file.asides(tmp_path) and not keeper.aside.is_open and not iterations(tmp_path)
    copy(keeper, gatherer, 5)
    keeper.close()
    assert beginnings(tmp_path).newest == 5
