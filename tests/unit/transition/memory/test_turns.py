"""Files that take turns: which is written next."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from unicron.transition.snapshot import cuts
from unicron.transition.snapshot.double_buffer import Turns
from unicron.transition.snapshot.images import Image, Key


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a.image", tmp_path / "b.image"]


def write(turns: Turns, iteration: int, keep: int = -1) -> str:
    """Write one as a process does; returns the file's name."""
    image: Image = turns.room(turns.next(keep), 4, 8)
    image.mark_torn()
    image.mark_whole(Key("state", 0, iteration), b"head", 8)
    turns.written(image.path)
    return image.path.name


def test_they_take_turns_and_one_that_came_to_nothing_is_written_again(paths):
    turns = Turns(paths)
    assert [write(turns, iteration) for iteration in (5, 6, 7)] == ["a.image", "b.image", "a.image"]
    turns.room(turns.next(), 4, 8).mark_torn()
    assert turns.next() == paths[1], "the other one is whole"


def test_a_new_process_begins_with_the_one_that_holds_least_unless_that_is_to_stay(paths):
    turns = Turns(paths)
    write(turns, 5)
    write(turns, 10)
    assert Turns(paths).next() == paths[0]
    back = Turns(paths)
    assert [write(back, 6, keep=5), write(back, 7), write(back, 8)] == ["b.image", "a.image", "b.image"]


def test_what_is_to_stay_stays_however_often_the_other_one_is_written(paths):
    turns = Turns(paths)
    write(turns, 5)
    assert [write(turns, iteration, keep=5) for iteration in (6, 7, 8)] == ["b.image"] * 3
    assert write(turns, 9, keep=8) == "a.image"


def test_a_file_that_is_too_small_or_gone_is_made_again_and_all_are_let_go_of(paths):
    gone: list[Path] = []
    turns = Turns(paths, gone.append)
    first = turns.room(paths[0], 4, 8)
    assert turns.room(paths[0], 4, 8) is first
    assert turns.room(paths[0], 4, 1 << 16) is not first and gone == [paths[0]]
    paths[0].unlink()
    turns.room(paths[0], 4, 8)
    assert len(gone) == 2 and paths[0].exists() and turns.holds
    turns.clear()
    assert len(gone) == 3 and not turns.holds and not list(paths[0].parent.glob("*.image"))


def test_without_room_it_is_an_error(paths):
    turns = Turns([path.parent / "nothing" / path.name for path in paths])
    with pytest.raises(OSError) as error:
        turns.room(turns.next(), 4, 8)
    assert error.value.errno == errno.ENOENT


def test_the_note_of_a_cut(tmp_path):
    assert cuts.noted(tmp_path) == (-1, -1), "none"
    cuts.note(tmp_path, cuts.Wanted(12, 7))
    assert cuts.noted(tmp_path) == (12, 7) and [path.name for path in tmp_path.iterdir()] == [cuts.NOTE]
    for spoiled in (b"", b"\x92\x01", b"\xa3abc", b"\x01"):
        (tmp_path / cuts.NOTE).write_bytes(spoiled)
        assert cuts.noted(tmp_path) == (-1, -1)
