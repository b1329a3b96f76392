"""With what a rank begins: what is in memory, and what is damaged there, or of something else."""

from __future__ import annotations

import pytest
import torch

from tests.support.flips import flip
from tests.support.kept import WRITER, beginnings, everything, kept, same, training
from tests.support.texts import raises_text
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints, Writer
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.image_format import SUFFIX, ImagePage, inventory
from unicron_transition.snapshot.keeper import Keeper
from unicron_transition.snapshot.whole_state import Beginnings, Unusable


def test_a_damaged_one_is_said_and_the_older_taken(tmp_path, capsys):
    state, other = training(), training(seed=3)
    keeper = kept(tmp_path, state, 4, 5)
    before = everything(state)
    newest = next(found for found in inventory(tmp_path) if found.key.iteration == 5)
    flip(newest.path)
    begin = beginnings(tmp_path)
    assert begin.newest == 5, "nothing is read before it is asked for"
    with pytest.raises(Unusable):
        begin.take_up(other, 5)
    assert "their checksum" in capsys.readouterr().err
    assert begin.choices == [(4, WRITER.mark)] and not newest.path.exists()
    assert begin.take_up(other, 4) == 4 and same(everything(other), before)
    assert keeper.has_files


def test_a_torn_one_is_passed_over_and_said(tmp_path, capsys):
    kept(tmp_path, training(), 4, 5)
    (newest,) = [found.path for found in inventory(tmp_path) if found.key.iteration == 5]
    newest.write_bytes(newest.read_bytes()[:12] + bytes(4) + newest.read_bytes()[16:])
    assert beginnings(tmp_path).newest == 4
    assert "torn" in capsys.readouterr().err


def test_after_memory_comes_the_file_and_never_the_start(tmp_path, snapshot):
    state, other, saves = training(), training(seed=3), tmp_path / "saves"
    Checkpoints(saves).save_last(state, 3, WRITER)
    memory = tmp_path / "memory"
    memory.mkdir()
    kept(memory, state, 2, 4)
    begin = beginnings(memory, Checkpoints(saves))
    assert [iteration for iteration, _ in begin.choices] == [4, 3, 2]
    for found in inventory(memory):
        flip(found.path)
    with pytest.raises(Unusable):
        begin.take_up(other, 4)
    assert begin.newest == 3 and begin.take_up(other, 3) == 3
    assert same(everything(other), everything(state))
    for path in saves.glob(f"*/*{SUFFIX}"):
        flip(path)
    with pytest.raises(Unusable):
        begin.take_up(other, 2)
    with raises_text(CheckpointError, snapshot, tmp_path):
        begin.take_up(other, 3)
    with raises_text(CheckpointError, snapshot, tmp_path):
        beginnings(memory, Checkpoints(saves))


def test_of_another_place_or_layout_nothing_is_taken(tmp_path):
    keeper, gatherer = Keeper(tmp_path, 0, 1), Gatherer(training())
    keeper.copy(gatherer, 1, 1, Writer(place=1, size=2, layout="TP2"))
    keeper.copy(gatherer, 2, 1, Writer(place=0, size=2, layout="PP2"))
    keeper.close()
    begin = Beginnings(tmp_path, None, 0, Writer(place=0, size=2, layout="TP2"))
    assert begin.choices == [(0, "")]
    assert Beginnings(tmp_path, None, 0, Writer(place=0, size=2, layout="PP2")).newest == 2


def test_of_another_model_it_is_said_and_nothing_begins_anew(tmp_path):
    kept(tmp_path, training(), 4)
    other = training(seed=3)
    other.model[0].module[0] = torch.nn.Linear(5, 4)
    begin = beginnings(tmp_path)
    with pytest.raises(CheckpointError, match="of another model"):
        begin.take_up(other, 4)


def test_a_damaged_image_leaves_the_state_that_a_rank_has_as_it_is(tmp_path, capsys):
    """It could still be told to go on from its own."""
    kept(tmp_path, training(), 4)
    other = training(seed=3)
    before = everything(other)
    begin = beginnings(tmp_path)
    begin.list_again(WRITER, has_state=True)
    for found in inventory(tmp_path):
        flip(found.path)
    with pytest.raises(Unusable):
        begin.take_up(other, 4)
    assert same(everything(other), before) and "their checksum" in capsys.readouterr().err


def test_a_rank_whose_image_changes_while_it_goes_back_ends(tmp_path, monkeypatch):
    """Its state is then neither the one nor the other."""
    kept(tmp_path, training(), 4)
    other, check = training(seed=3), ImagePage.check_file

    def check_and_change(self: ImagePage, threads: int) -> None:
        check(self, threads)
        flip(self.path)

    begin = beginnings(tmp_path)
    begin.list_again(WRITER, has_state=True)
    monkeypatch.setattr(ImagePage, "check_file", check_and_change)
    with pytest.raises(CheckpointError, match="has lost its state"):
        begin.take_up(other, 4)
