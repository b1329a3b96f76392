"""A ring of image files: which is written next."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from unicron_transition.snapshot import cuts
from unicron_transition.snapshot.cuts import ImageRing
from unicron_transition.snapshot.image_format import Key


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a.image", tmp_path / "b.image"]


def write(ring: ImageRing, iteration: int, needed: int = -1) -> str:
    """Write one as a process does; returns the file's name."""
    return ring.write(Key("state", 0, iteration), b"head", 8, lambda image: None, needed).name


def test_they_take_turns_and_one_that_came_to_nothing_is_written_again(paths):
    ring = ImageRing(paths)
    assert [write(ring, iteration) for iteration in (5, 6, 7)] == ["a.image", "b.image", "a.image"]
    assert ring.reserve(4, 8).path == paths[1], "the other one is whole"
    assert ring.reserve(4, 8).path == paths[1]


def test_a_new_process_begins_with_the_one_that_holds_least_unless_that_is_to_stay(paths):
    ring = ImageRing(paths)
    write(ring, 5)
    write(ring, 10)
    assert ImageRing(paths)._next(-1) == paths[0]
    back = ImageRing(paths)
    assert [write(back, 6, needed=5), write(back, 7), write(back, 8)] == ["b.image", "a.image", "b.image"]


def test_what_is_to_stay_stays_however_often_the_other_one_is_written(paths):
    ring = ImageRing(paths)
    write(ring, 5)
    assert [write(ring, iteration, needed=5) for iteration in (6, 7, 8)] == ["b.image"] * 3
    assert write(ring, 9, needed=8) == "a.image"


def test_a_file_that_is_too_small_or_gone_is_made_again_and_all_are_let_go_of(paths):
    gone: list[Path] = []
    ring = ImageRing(paths, gone.append)
    first = ring.reserve(4, 8)
    assert ring.reserve(4, 8) is first
    assert ring.reserve(4, 1 << 16) is not first and gone == [paths[0]]
    paths[0].unlink()
    ring.reserve(4, 8)
    assert len(gone) == 2 and paths[0].exists() and ring.has_files
    ring.remove()
    assert len(gone) == 3 and not ring.has_files and not list(paths[0].parent.glob("*.image"))


def test_without_room_it_is_an_error(paths):
    ring = ImageRing([path.parent / "nothing" / path.name for path in paths])
    with pytest.raises(OSError) as error:
        ring.reserve(4, 8)
    assert error.value.errno == errno.ENOENT


def test_the_note_of_a_cut(tmp_path):
    assert cuts.read_cut_note(tmp_path) == (-1, -1), "none"
    cuts.write_cut_note(tmp_path, cuts.CutOrder(12, 7))
    assert cuts.read_cut_note(tmp_path) == (12, 7) and [path.name for path in tmp_path.iterdir()] == [cuts.NOTE]
    for spoiled in (b"", b"\x92\x01", b"\xa3abc", b"\x01"):
        (tmp_path / cuts.NOTE).write_bytes(spoiled)
        assert cuts.read_cut_note(tmp_path) == (-1, -1)
