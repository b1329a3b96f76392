"""Images: whole or torn, and whatever byte of one is changed, it is noticed or makes no difference."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.support.kept import no_room
from tests.support.texts import raises_text
from unicron_detector.formats import IMAGE
from unicron_transition.snapshot import contents, image_format
from unicron_transition.snapshot.image_format import (
    DIGEST,
    PAGE,
    BadImage,
    DataDigest,
    Image,
    ImagePage,
    Key,
    inventory,
    mark_verified,
    read_page,
)

KEY = Key("state", 3, 17, place=1, size=2, base=4, mark="0123abcd")
HEAD = b"what is in it" * 20


def written(path: Path, key: Key = KEY, head: bytes = HEAD, count: int = 3000, seed: int = 0) -> Image:
    image = Image(path, len(head), count)
    image.mark_torn()
    data = contents.raw(image.data[:count])
    data.copy_(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    image.mark_whole(key, head, count)
    return image


def sound(found: ImagePage) -> tuple[Key, bytes, bytes]:
    """What a reader gets of it. Raises BadImage."""
    head, data = found.read()
    found.check(data)
    return found.key, head, bytes(data)


def test_a_whole_one_is_what_was_written(tmp_path):
    image = written(tmp_path / "a.image")
    found = read_page(image.path)
    assert found.key == KEY and found.data_bytes == 3000
    assert sound(found)[1] == HEAD
    assert list(inventory(tmp_path)) == [found]


def test_it_is_torn_from_the_first_byte_that_changes_to_the_last(tmp_path):
    image = written(tmp_path / "a.image")
    image.mark_torn()
    with pytest.raises(BadImage, match="torn"):
        read_page(image.path)
    assert list(inventory(tmp_path)) == []
    written(tmp_path / "b.image")
    assert [found.path.name for found in inventory(tmp_path)] == ["b.image"]
    Image(tmp_path / "c.image", 10, 10)
    with pytest.raises(BadImage):
        read_page(tmp_path / "c.image")


def test_what_is_read_changes_no_image(tmp_path):
    written(tmp_path / "a.image")
    found = read_page(tmp_path / "a.image")
    before = sound(found)
    _, data = found.read()
    data[0] ^= 1
    assert sound(found) == before


def test_no_room_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(image_format.os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space"):
        Image(tmp_path / "a.image", 10, 10)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_refused(tmp_path):
    image = written(tmp_path / "a.image")
    assert image.fits(PAGE, 3000) and not image.fits(PAGE + 1, 3000) and not image.fits(10, 3001)
    with pytest.raises(ValueError, match="room"):
        image.mark_whole(KEY, HEAD, 3001)


def test_an_image_takes_the_room_that_it_has_and_nobody_else_reads_it(tmp_path):
    for count, room in ((3000, 3000), (1, 1), (0, 1)):
        image = Image(tmp_path / "a.image", 10, count)
        found = image.path.stat()
        assert found.st_size == 2 * PAGE + room == len(image.data) + 2 * PAGE and found.st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError):
        Image(tmp_path / "no folder" / "a.image", 10, 10)


def test_a_key_takes_a_page_at_most_and_leaves_room_for_the_mark_of_a_verified_state(tmp_path):
    image, fits = Image(tmp_path / "a.image", 10, 10), 0
    for length in range(PAGE - 400, PAGE):
        try:
            image.mark_whole(replace(KEY, mark="x" * length), b"head", 10)
            fits = length
        except ValueError as error:
            assert "too long" in str(error)
            break
    assert len(image.path.read_bytes()[:PAGE].rstrip(b"\0")) == PAGE - DIGEST, "the last one that fits fills it"
    assert read_page(image.path).key.mark == "x" * fits
    mark_verified(read_page(image.path))
    assert read_page(image.path).verified and read_page(image.path).key.mark == "x" * fits


def test_the_mark_of_a_verified_state_ends_with_that_state(tmp_path):
    image = Image(tmp_path / "a.image", 10, 10)
    image.mark_whole(KEY, b"head", 10)
    before = read_page(image.path)
    mark_verified(before)
    assert read_page(image.path).verified and read_page(image.path) == before, "it is still the same image"
    image.mark_torn()
    image.mark_whole(replace(KEY, iteration=KEY.iteration + 1), b"head", 10)
    assert not read_page(image.path).verified
    mark_verified(before)  # too late: another one has taken its place
    assert not read_page(image.path).verified


def test_a_file_of_another_kind_or_release_is_named_so(tmp_path, snapshot):
    page = written(tmp_path / "a.image").path.read_bytes()
    other = tmp_path / "b.image"
    for place, value in ((0, page[0] ^ 1), (8, IMAGE.oldest - 1)):  # the magic number, the version
        other.write_bytes(page[:place] + bytes([value]) + page[place + 1 :])
        with raises_text(BadImage, snapshot, tmp_path):
            read_page(other)
    for length, why in ((image_format._KEY - 1, "too short"), (image_format._KEY, "its first page")):
        other.write_bytes(page[:length])
        with pytest.raises(BadImage, match=why):
            read_page(other)


def test_a_file_written_from_beginning_to_end_is_the_same(tmp_path):
    written(tmp_path / "a.image")
    key, head, data = sound(read_page(tmp_path / "a.image"))
    front = image_format.file_front(key, head, len(data), image_format.data_digest(data))
    (tmp_path / "b.image").write_bytes(front + data)
    assert sound(read_page(tmp_path / "b.image")) == (key, head, data)


# ------------------------------------------------------------ the checksum of leaves, and reading by it
@pytest.fixture
def small_leaves(monkeypatch):
    monkeypatch.setattr(image_format, "LEAF", 64)


@settings(max_examples=cases(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_a_checksum_is_that_of_leaves_however_the_data_come(small_leaves, data, cuts):
    found, edges = DataDigest(), [0, *sorted(cuts), len(data)]
    for begin, end in pairwise(edges):
        found.update(data[begin:end])
    leaves = b"".join(xxhash.xxh3_128_digest(data[at : at + 64]) for at in range(0, len(data), 64))
    assert found.digest() == found.digest() == image_format.data_digest(data) == xxhash.xxh3_128_digest(leaves)
    flat = DataDigest(image_format.LEAVES - 1)
    for begin, end in pairwise(edges):
        flat.update(data[begin:end])
    assert flat.digest() == xxhash.xxh3_128_digest(data)


def of_format_3(found: ImagePage) -> ImagePage:
    """The same image, with the checksum of an earlier release."""
    return replace(found, number=3, digest=xxhash.xxh3_128_digest(found.path.read_bytes()[found.offset :]))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("older", [False, True])
@settings(max_examples=cases(40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_parts_of_it_are_read_and_all_of_it_is_checked(whole, small_leaves, monkeypatch, mapped, older, data):
    path, before = whole
    path.write_bytes(before)
    monkeypatch.setattr(image_format, "is_in_memory", lambda descriptor: mapped)
    page = read_page(path)
    content = before[page.offset :]
    # its own checksum is of larger leaves
    found = of_format_3(page) if older else replace(page, digest=image_format.data_digest(content))
    edges = sorted(data.draw(st.lists(st.integers(0, 3000), max_size=9)))
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    places = [bytearray(end - begin) for begin, end in ranges]
    threads = data.draw(st.integers(1, 3))
    wants = [(begin, memoryview(place)) for (begin, _), place in zip(ranges, places, strict=True)]
    found.fill(wants[::-1], threads)
    assert places == [content[begin:end] for begin, end in ranges]
    at = found.offset + data.draw(st.integers(0, 2999))
    path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
    with pytest.raises(BadImage, match="checksum"):
        found.fill(wants, threads)
    with pytest.raises(BadImage, match="checksum"):
        found.check(found.read()[1], threads)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_was_cut_off_meanwhile_is_an_error(tmp_path, monkeypatch, mapped):
    monkeypatch.setattr(image_format, "is_in_memory", lambda descriptor: mapped)
    found = read_page(written(tmp_path / "a.image").path)
    os.truncate(found.path, found.used - 1)
    with pytest.raises((BadImage, OSError), match="cut off"):
        found.fill([(0, memoryview(bytearray(3000)))], threads=2)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("moment", [0, 1, 5, 9, 10])
def test_what_is_read_is_one_whole_state_whenever_a_writer_goes_on(tmp_path, small_leaves, monkeypatch, mapped, moment):
    """The checksum is of the reader's own copy: bytes that a writer changes in between cannot be in it."""
    image, place, parts = written(tmp_path / "a.image", count=640), bytearray(640), 0
    before = bytes(image.data)
    monkeypatch.setattr(image_format, "is_in_memory", lambda descriptor: mapped)
    name = "_address" if mapped else "scatter"
    real = getattr(image_format, name)

    def write() -> None:
        image.mark_torn()
        image.data[:] = before[::-1]
        image.mark_whole(KEY, HEAD, 640)

    def write_between(*values: object) -> object:
        nonlocal parts
        if parts == moment + mapped:  # the mapping's own address is the first
            write()
        parts += 1
        return real(*values)

    monkeypatch.setattr(image_format, name, write_between)
    with pytest.raises(BadImage, match="checksum") if moment < 10 else contextlib.nullcontext():
        read_page(image.path).fill([(0, memoryview(place))])
    assert parts == 10 + mapped
    if moment == 10:
        write()
        assert bytes(place) == before
    read_page(image.path).fill([(0, memoryview(place))])
    assert bytes(place) == bytes(image.data)


def test_a_change_between_page_and_data_is_noticed_and_a_later_one_changes_nothing(tmp_path):
    image = written(tmp_path / "a.image")
    found, place = read_page(image.path), bytearray(3000)
    image.data[1500] ^= 1
    with pytest.raises(BadImage, match="checksum"):
        found.fill([(0, memoryview(place))])
    image.data[1500] ^= 1
    found.fill([(0, memoryview(place))])
    wanted = bytes(image.data[:3000])
    image.data[:3000] = bytes(3000)
    assert bytes(place) == wanted


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("images") / "a.image"
    written(path)
    return path, path.read_bytes()


def reads_as_before_or_not_at_all(path: Path, data: bytes, before: bytes) -> bool:
    path.write_bytes(before)
    wanted = sound(read_page(path))
    path.write_bytes(data)
    try:
        return sound(read_page(path)) == wanted
    except (BadImage, OSError):
        return True


@settings(max_examples=cases(400), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_whatever_bytes_change_it_is_noticed_or_harmless(whole, data):
    path, before = whole
    end = len(before) - 1
    changed = bytearray(before)
    for _ in range(data.draw(st.integers(1, 3))):
        place = st.one_of(st.integers(0, 200), st.integers(PAGE, PAGE + len(HEAD)), st.integers(0, end))
        changed[data.draw(place)] ^= data.draw(st.integers(1, 255))
    assert reads_as_before_or_not_at_all(path, bytes(changed), before)


@settings(max_examples=cases(100), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_wherever_it_is_cut_off_or_overwritten_it_is_noticed(whole, data):
    path, before = whole
    at = data.draw(st.integers(0, len(before) - 1))
    assert reads_as_before_or_not_at_all(path, before[:at], before)
    assert reads_as_before_or_not_at_all(path, before[:at] + bytes(len(before) - at), before)
