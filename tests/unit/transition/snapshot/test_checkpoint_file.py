"""Images that are set aside for files, with what belongs into the same file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgpack
import pytest

from tests.support.flips import flip
from tests.support.texts import raises_text
from unicron_transition.snapshot import checkpoint_file, contents
from unicron_transition.snapshot.image_format import SHARD, SUFFIX, UNTRAINED_KIND, BadImage, Image, Key, read_page

MARK = "f00"


def image(folder: Path, key: Key, data: bytes, head: bytes = b"") -> Path:
    path = folder / f"{key.kind}-{key.slot}.{key.iteration}{SUFFIX}"
    made = Image(path, len(head), len(data))
    made.data[: len(data)] = data
    made.mark_whole(key, head, len(data))
    return path


def shard(folder: Path, data: bytes, iteration: int = 4, mark: str = MARK) -> Path:
    head = msgpack.packb((b"model", 1.0, b"header", msgpack.packb({"untrained": mark})))
    return image(folder, Key(SHARD, 0, iteration, base=7, mark="00001"), data, head)


def untrained(folder: Path, data: bytes, number: int = 1, mark: str = MARK) -> Path:
    return image(folder, Key(UNTRAINED_KIND, 0, number, mark=mark), data)


@pytest.mark.parametrize("size", [4, 7, 8, 12, 4096, checkpoint_file.PIECE + 22])
@pytest.mark.parametrize("further", [8, checkpoint_file.PIECE + 64])
def test_the_checksum_of_two_is_that_of_what_stands_in_the_file(tmp_path, size, further):
    first, second = os.urandom(size), b"\xff" * 8 + os.urandom(further - 8)
    found = read_page(shard(tmp_path, first))
    untrained(tmp_path, second)
    made = read_page(checkpoint_file.persist(found, tmp_path / "saves"))
    _, data = contents.read(made)  # which compares
    at = checkpoint_file.behind(size)
    assert bytes(data.numpy()) == first + bytes(at - size) + second and at % 8 == 0


def test_of_several_it_is_the_one_that_the_shard_names(tmp_path):
    found = read_page(shard(tmp_path, b"12345678"))
    for number, mark in enumerate(("bad", MARK, "abc")):
        untrained(tmp_path, bytes([number]) * 8, number, mark)
    image(tmp_path, Key(UNTRAINED_KIND, 1, 9, place=1, size=2, mark=MARK), b"another ")
    _, data = contents.read(read_page(checkpoint_file.persist(found, tmp_path / "saves")))
    assert bytes(data.numpy()) == b"12345678" + b"\1" * 8


@pytest.mark.parametrize("flipped", ["shard", "untrained"])
def test_what_memory_has_damaged_makes_no_file(tmp_path, flipped, snapshot):
    made, rest = shard(tmp_path, b"12345678" * 64), untrained(tmp_path, b"frozen.." * 64)
    found = read_page(made)
    flip(made if flipped == "shard" else rest)
    with raises_text(BadImage, snapshot, tmp_path):
        checkpoint_file.persist(found, tmp_path / "saves")
    assert not list((tmp_path / "saves").glob("*/*"))


def test_both_stay_until_the_file_is_made_whatever_the_rank_does(tmp_path):
    rest, aside = untrained(tmp_path, b"frozen.."), checkpoint_file.aside_path(tmp_path, 0, 4)
    checkpoint_file.set_aside(shard(tmp_path, b"12345678"), aside, rest)
    rest.unlink()
    (found,) = checkpoint_file.asides(tmp_path)
    assert contents.read(read_page(checkpoint_file.persist(found, tmp_path / "saves")))[1].numel() == 16
    checkpoint_file.release_aside(found.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saves", f"shard-0.4{SUFFIX}"]


def test_where_it_is_gone_there_is_no_file(tmp_path, snapshot):
    found = read_page(shard(tmp_path, b"12345678"))
    with raises_text(BadImage, snapshot, tmp_path):
        checkpoint_file.persist(found, tmp_path / "saves")
    assert not (tmp_path / "saves").exists()


def test_a_head_that_nobody_can_read_is_a_bad_image(tmp_path, snapshot):
    head = msgpack.packb((b"model", 1.0, b"header", b"\xc1"))
    path = image(tmp_path, Key(SHARD, 0, 4, mark="00001"), b"12345678", head)
    with raises_text(BadImage, snapshot, tmp_path):
        checkpoint_file.persist(read_page(path), tmp_path / "saves")


def test_one_that_is_overwritten_meanwhile_makes_no_file(tmp_path):
    found = read_page(shard(tmp_path, b"12345678"))
    untrained(tmp_path, b"frozen..")
    with pytest.raises(BadImage, match="overwritten"):
        checkpoint_file.persist(
            found, tmp_path / "saves", lambda size: untrained(tmp_path, b"another!", mark="abc") and None
        )
    assert not list((tmp_path / "saves").glob("*/*"))


def test_what_cannot_be_set_aside_leaves_nothing_behind(tmp_path, monkeypatch):
    made, rest = shard(tmp_path, b"12345678"), untrained(tmp_path, b"frozen..")
    link = Path.hardlink_to

    def full(self: Path, target: Path) -> None:
        if target == made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        link(self, target)

    monkeypatch.setattr(Path, "hardlink_to", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint_file.set_aside(made, checkpoint_file.aside_path(tmp_path, 0, 4), rest)
    assert not list(tmp_path.glob("due-*"))


def test_the_next_process_of_a_slot_removes_what_its_last_one_had_begun_to_set_aside(tmp_path):
    made, rest = shard(tmp_path, b"12345678"), untrained(tmp_path, b"frozen..")
    for slot, iteration in ((0, 4), (0, 6), (1, 4)):
        checkpoint_file.set_aside(made, checkpoint_file.aside_path(tmp_path, slot, iteration), rest)
    for slot in (0, 1):
        checkpoint_file.aside_path(tmp_path, slot, 4).unlink()
    checkpoint_file.remove_half_aside(tmp_path, 0)
    left = sorted(path.name for path in tmp_path.glob("due-*"))
    assert left == [f"due-0-6{SUFFIX}", "due-0-6.untrained", "due-1-4.untrained"]
