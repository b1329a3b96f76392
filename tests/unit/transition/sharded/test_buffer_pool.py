"""Buffers for shards: images in the agent's memory, and which of them the next process claims."""

from __future__ import annotations

import errno
import os
import resource
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from unicron_detector.processes.rank_messages import Cut
from unicron_transition.sharded import buffer_pool
from unicron_transition.sharded.buffer_pool import BufferPool, claimant
from unicron_transition.snapshot import checkpoint_file, contents, image_format
from unicron_transition.snapshot.cuts import CutOrder, Cuts
from unicron_transition.snapshot.image_format import PAGE, SHARD, BadImage, ImagePage, Key, read_page

ELEMENTS = 3000
CPU = torch.device("cpu")


def key(slot: int, version: int = 1, shard: int = 0, place: int = 0, size: int = 1) -> Key:
    return Key(SHARD, slot, version, place, size, shard, 4, 1, "00001")


def keep(store: BufferPool, number: float, about: Key, elements: int = ELEMENTS) -> buffer_pool.Buffer:
    """Return a sealed room with a content."""
    room = take(store, elements=elements)
    room.flat.fill_(number)
    store.seal(room, about, b"head")
    store.wait_whole()
    return room


def take(store: BufferPool, head_bytes: int = 100, elements: int = ELEMENTS) -> buffer_pool.Buffer:
    with store.take_buffers(1, elements, head_bytes) as (room,):
        return room


def usable(found: ImagePage) -> str:
    return ""


@pytest.fixture
def lines() -> list[str]:
    return []


def write(cuts: Cuts, about: Key, flat: torch.Tensor) -> bool:
    return cuts.write(about, b"head", flat.nbytes, lambda image: contents.copy_flat(flat, image))


@pytest.fixture
def cuts(tmp_path, lines) -> Cuts:
    return Cuts(tmp_path, 3, lines.append)


@pytest.fixture
def store(tmp_path, lines, cuts) -> BufferPool:
    return BufferPool(tmp_path, 3, CPU, tell=lines.append, cuts=cuts)


def test_the_next_process_has_what_was_kept(tmp_path, store):
    keep(store, 1.0, key(3, 1))
    keep(store, 2.0, key(3, 2))
    found = BufferPool(tmp_path, 3, CPU).claim([2, 3], 0, 1, usable)
    assert [(each.key.iteration, each.head) for each in found] == [(2, b"head"), (1, b"head")]
    assert [float(each.buffer.flat.mean()) for each in found] == [2.0, 1.0]
    assert found[0].buffer.flat.numel() == ELEMENTS


def test_an_image_is_torn_from_when_its_room_is_taken_again_and_whole_until_then(store):
    room = keep(store, 1.0, key(3))
    store.give_back(room)
    assert read_page(room.image.path).key.iteration == 1
    assert take(store) is room
    with pytest.raises(BadImage, match="torn"):
        read_page(room.image.path)


def test_a_room_is_not_written_before_the_thread_has_summed_it(store, monkeypatch):
    """Otherwise it would mark half-written data as whole."""
    gate, order = threading.Event(), []
    finish = buffer_pool._finish

    def late(*arguments):
        gate.wait(10)
        finish(*arguments)
        order.append("summed")

    monkeypatch.setattr(buffer_pool, "_finish", late)
    room = take(store)
    store.seal(room, key(3), b"")
    store.give_back(room)
    threading.Timer(0.05, gate.set).start()
    take(store)
    order.append("taken")
    assert order == ["summed", "taken"]


def test_rooms_of_a_failure_are_dropped_for_a_late_message_may_still_be_written_there(tmp_path, store):
    taken = []
    with pytest.raises(RuntimeError), store.take_buffers(2, ELEMENTS, 100) as both:
        taken += both
        raise RuntimeError("a peer is gone")
    assert store.free == 0 and list(tmp_path.iterdir()) == []
    assert take(store) not in taken


def test_rooms_of_another_size_are_let_go_of_when_the_next_is_taken(tmp_path, store):
    store.give_back(keep(store, 1.0, key(3)))
    assert len(list(tmp_path.iterdir())) == 1
    keep(store, 2.0, key(3, 2), 2 * ELEMENTS)
    assert [read_page(path).data_bytes for path in tmp_path.iterdir()] == [8 * ELEMENTS]


def test_a_head_that_has_grown_gets_a_larger_image(store):
    room = keep(store, 1.0, key(3))
    store.give_back(room)
    larger = take(store, 10 * PAGE)
    store.seal(larger, key(3, 2), bytes(10 * PAGE))
    store.wait_whole()
    assert larger is not room and read_page(larger.image.path).head_bytes == 10 * PAGE
    assert not room.image.path.exists()


def test_rooms_are_used_again_though_own_heads_and_those_of_copies_differ_in_size(tmp_path, store):
    held: list[list[buffer_pool.Buffer]] = []
    made = []
    for version in range(1, 8):
        both: list[buffer_pool.Buffer] = []
        for shard, head in ((3, bytes(10 * PAGE)), (2, b"head")):
            both.append(take(store, len(head)))
            store.seal(both[-1], key(3, version, shard), head)
        store.wait_whole()
        held.append(both)
        if len(held) > 2:
            for room in held.pop(0):
                store.give_back(room)
        made.append({path.name for path in tmp_path.iterdir()})
    assert len(made[2]) == 6 and made[2:] == [made[2]] * 5


def test_a_room_of_an_older_smaller_head_does_not_cost_one_that_fits(store):
    small = keep(store, 1.0, key(3))
    large = take(store, 10 * PAGE)
    for room in (large, small):
        store.give_back(room)
    assert take(store, 10 * PAGE) is large
    assert small.image.path.exists() and store.free == 1


@pytest.mark.parametrize(
    ("about", "here", "claims"),
    [
        (key(3), [2, 3], 3),
        (key(2), [2, 3], 2),
        (key(9, shard=0), [2, 3], 2),  # of a slot that is not on this node
        (key(9, shard=1), [2, 3], 3),
        (key(9, shard=2), [2, 3], 2),
    ],
)
def test_one_rank_of_a_node_claims_each_image(about, here, claims):
    assert claimant(about, here) == claims


def test_what_belongs_to_others_is_read_at_most_and_stays(tmp_path, store, lines):
    for slot, shard in ((2, 0), (8, 1), (9, 2)):
        keep(BufferPool(tmp_path, slot, CPU), float(slot), key(slot, shard=shard))
    keep(BufferPool(tmp_path, 11, CPU), 1.0, key(11, shard=1, place=1, size=2))
    (tmp_path / "copy-7.image").write_bytes(b"no image")
    names = {path.name for path in tmp_path.iterdir()}
    found = store.claim([2, 3], 0, 1, usable)
    assert [each.key.slot for each in found] == [8]
    store.give_back(found[0].buffer)
    assert {path.name for path in tmp_path.iterdir()} == names and lines == []


def test_what_is_torn_or_flipped_or_of_another_model_is_passed_over_with_one_line_each(tmp_path, store, lines):
    for version in range(1, 5):
        keep(store, float(version), key(3, version))
    paths = {read_page(path).key.iteration: path for path in tmp_path.iterdir()}
    flipped, torn = bytearray(paths[1].read_bytes()), bytearray(paths[2].read_bytes())
    flipped[-1] ^= 1
    torn[12:16] = bytes(4)
    paths[1].write_bytes(flipped)
    paths[2].write_bytes(torn)
    (tmp_path / f"{SHARD}-3.9.image.77.new").write_bytes(b"")
    again = BufferPool(tmp_path, 3, CPU, tell=lines.append)
    found = again.claim([3], 0, 1, lambda each: "of another model" if each.key.iteration == 3 else "")
    assert [each.key.iteration for each in found] == [4]
    assert len(lines) == 4 and {path.name for path in tmp_path.iterdir()} == {paths[4].name}
    assert all(any(word in line for line in lines) for word in ("checksum", "torn", "model", "before it was made"))
    assert take(again).image.path.name == f"{SHARD}-3.10.image", "no name is used twice"


def test_an_earlier_process_image_goes_when_its_state_is_not_needed(tmp_path, store):
    keep(store, 1.0, key(3))
    again = BufferPool(tmp_path, 3, CPU)
    (found,) = again.claim([3], 0, 1, usable)
    again.give_back(found.buffer)
    assert list(tmp_path.iterdir()) == [] and again.free == 0
    assert float(found.buffer.flat.sum()) == ELEMENTS, "a reader still has it"


def test_where_there_is_no_room_it_is_reported_once_and_the_process_keeps_the_state_itself(store, lines, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        with store.take_buffers(2, ELEMENTS, 100) as both:
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [room.image for room in both] == [None, None] and [room.flat.numel() for room in both] == [ELEMENTS] * 2
    assert (
        len(lines) == 1 and "no room for" in lines[0] and str(tmp_path) in lines[0] and list(tmp_path.iterdir()) == []
    )
    store.seal(both[0], key(3), b"")
    store.wait_whole()
    store.give_back(both[0])
    assert take(store) is both[0]


def test_a_bit_that_flips_in_a_living_ranks_memory_is_seen(store, lines):
    room = keep(store, 1.0, key(3))
    assert store.is_sound(room)
    data = bytearray(room.image.path.read_bytes())
    data[read_page(room.image.path).offset + 5] ^= 4
    with room.image.path.open("r+b") as file:
        file.write(data)
    assert not store.is_sound(room)
    store.discard_spoiled(room)
    assert len(lines) == 1 and "changed" in lines[0] and not room.image.path.exists()


def test_without_a_folder_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv(image_format.FOLDER, raising=False)
    assert image_format.memory_folder() is None
    monkeypatch.setenv(image_format.FOLDER, str(tmp_path))
    assert image_format.memory_folder() == tmp_path
    store = BufferPool(None, 3, CPU)
    room = keep(store, 1.0, key(3))
    assert room.image is None and store.claim([3], 0, 1, usable) == []
    assert not store.set_aside(room, 4) and not store.aside.is_open


def test_a_shard_without_an_element_is_one_too(tmp_path, store):
    keep(store, 0.0, key(3), 0)
    (found,) = BufferPool(tmp_path, 3, CPU).claim([3], 0, 1, usable)
    assert found.buffer.flat.numel() == 0


def test_the_next_states_do_not_overwrite_the_image_of_a_cut(tmp_path, lines, cuts, store):
    def cut(version: int) -> None:
        room = take(store)
        room.flat.fill_(float(version))
        store.seal(room, key(3, version), b"head", cut=True)
        store.wait_whole()
        store.give_back(room)

    def kept() -> list[int]:
        return sorted(read_page(path).key.iteration for path in tmp_path.glob("cut-shard-3-*"))

    for version, good in ((4, -1), (6, 4), (8, 4), (9, 8)):
        cuts.wanted = CutOrder(version, good)
        cut(version)
    assert kept() == [8, 9], "of two files the one that is not good was written over"
    found = BufferPool(tmp_path, 3, CPU).claim([3], 0, 1, usable)
    assert {each.key.iteration: float(each.buffer.flat.mean()) for each in found}[8] == 8.0
    assert not lines


def test_what_is_set_aside_stays_until_the_agent_has_made_its_file(tmp_path, store):
    room = keep(store, 4.0, key(3, 4))
    assert store.set_aside(room, 4) and store.aside.is_open
    store.give_back(room)
    for version in (5, 6):
        store.give_back(keep(store, float(version), key(3, version)))
    (due,) = checkpoint_file.asides(tmp_path)
    assert due.key.iteration == 4 and contents.read(due)[1].view(torch.float32).mean() == 4.0
    assert len(list(tmp_path.glob("shard-3.*"))) == 1, "the room of what is due was not used again"
    due.path.unlink()
    assert not store.aside.is_open and store.aside.error is None


def test_what_could_not_be_set_aside_is_reported_once_and_written_by_the_caller(store, monkeypatch, lines):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_file, "set_aside", full)
    room = keep(store, 4.0, key(3, 4))
    assert store.set_aside(room, 4)
    store.wait_whole()
    store.give_back(room)
    assert keep(store, 5.0, key(3, 5)) is room, "no agent reads it"
    assert store.aside.error is not None and not store.aside.is_open
    store.forget_missed()
    assert store.aside.error is None and len(lines) == 1 and "No space left" in lines[0]
    room = keep(store, 6.0, key(3, 6))
    assert not store.set_aside(room, 6), "the caller writes it this time"
    monkeypatch.undo()
    assert store.set_aside(room, 6)


def test_a_room_whose_image_somebody_has_removed_is_not_used_again(tmp_path, store):
    room = keep(store, 4.0, key(3, 4))
    room.image.path.unlink()
    store.give_back(room)
    other = keep(store, 5.0, key(3, 5))
    assert other is not room and other.image.path.exists()


def test_no_process_begins_with_what_is_set_aside_for_it_goes_when_its_file_is_made(tmp_path, store):
    room = keep(store, 4.0, key(3, 4))
    assert store.set_aside(room, 4)
    wait([room.aside])
    found = BufferPool(tmp_path, 3, CPU).claim([3], 0, 1, usable)
    assert [each.buffer.path.name for each in found] == ["shard-3.1.image"]


def test_the_memory_of_cuts_is_let_go_of_when_none_are_wanted_any_more(tmp_path, lines, cuts, store):
    flat = torch.ones(ELEMENTS)
    cuts.wanted = CutOrder(4)
    assert write(cuts, key(3, 4), flat)
    store.remove_unwanted_cuts()
    store.wait_whole()
    (path,) = tmp_path.glob("cut-*")
    path.unlink()  # as the agent does
    mapped = Path("/proc/self/maps")
    assert str(path) in mapped.read_text()
    cuts.on_order(Cut(-1, none=True))
    store.remove_unwanted_cuts()
    store.wait_whole()
    assert str(path) not in mapped.read_text() and not lines
    cuts.wanted = CutOrder(6)
    assert write(cuts, key(3, 6), flat) and read_page(path).key.iteration == 6, "and begun again"


def test_the_training_does_not_wait_while_cuts_are_removed(tmp_path, lines, cuts, store, monkeypatch):
    """A state that is kept meanwhile is whole when they are gone."""
    go, unlink = threading.Event(), os.unlink
    cuts.wanted = CutOrder(4)
    assert write(cuts, key(3, 4), torch.ones(ELEMENTS))

    def slowly(path, **how):
        assert threading.current_thread() is not threading.main_thread() and go.wait(20.0)
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", slowly)
    cuts.on_order(Cut(-1, none=True))
    store.remove_unwanted_cuts()
    store.remove_unwanted_cuts()
    room = take(store)
    room.flat.fill_(5.0)
    store.seal(room, key(3, 5), b"head")
    with pytest.raises(BadImage):
        read_page(room.image.path)
    assert list(tmp_path.glob("cut-*"))
    go.set()
    store.wait_whole()
    assert not list(tmp_path.glob("cut-*")) and read_page(room.image.path).key.iteration == 5 and not lines
    monkeypatch.setattr(os, "unlink", unlink)
    assert write(cuts, key(3, 6), torch.ones(ELEMENTS))
    monkeypatch.setattr(os, "unlink", slowly)
    go.clear()
    cuts.unwanted = True
    store.remove_unwanted_cuts()
    threading.Timer(0.2, go.set).start()
    store.wait_whole()  # before another thread keeps one
    assert not list(tmp_path.glob("cut-*"))


def test_a_living_rank_takes_only_the_cuts_and_copies_that_it_lacks(tmp_path, store, lines):
    room = keep(store, 1.0, key(3, 5))
    for number, (slot, shard) in enumerate([(7, 1), (8, 2), (9, 3)]):
        keep(BufferPool(tmp_path, slot, CPU), 2.0, key(slot, 4, shard))
        next(tmp_path.glob(f"shard-{slot}.*")).rename(tmp_path / f"copy-shard-{number}.image")
    spoiled = tmp_path / "copy-shard-2.image"
    data = bytearray(spoiled.read_bytes())
    data[-1] ^= 1
    spoiled.write_bytes(data)
    found = store.claim([3], 0, 1, usable, lambda about: about.shard != 2)
    assert [(each.key.iteration, each.key.shard) for each in found] == [(4, 1)]
    assert len(lines) == 1 and not spoiled.exists(), "the agent no longer reports it"
    assert room.image.path.exists() and (tmp_path / "copy-shard-0.image").exists()


def test_images_become_whole_even_without_a_thread(tmp_path, store, monkeypatch):
    """Defect: the training ended because no thread could be started."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    kept = keep(store, 4.0, key(3, 4))
    assert store.set_aside(kept, 4) and store.aside.is_open
    (found,) = checkpoint_file.asides(tmp_path)
    assert found.key.iteration == 4
