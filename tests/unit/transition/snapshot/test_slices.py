"""Nodes that hold the same state write a slice of its file each: what is in them, and when they are a checkpoint."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.flips import flip
from tests.support.kept import WRITER, everything, kept, same, training
from unicron_transition.snapshot import checkpoint_file, folders
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.checkpoint_file import (
    LEAST_SLICE,
    MOST_SLICES,
    WHOLE,
    Slice,
    cut_out,
    slice_in,
    slices_of,
)
from unicron_transition.snapshot.folders import Turn
from unicron_transition.snapshot.formats import own
from unicron_transition.snapshot.image_format import LEAF, RAW, BadImage, ImagePage, inventory, item_bytes
from unicron_transition.snapshot.migrate import TrainingState


def image_of(folder: Path, state: TrainingState) -> ImagePage:
    """The image of iteration 4 in the memory of one node."""
    folder.mkdir(exist_ok=True)
    kept(folder, state, 4).close()
    (found,) = inventory(folder)
    return found


def written(found: ImagePage, saves: Path, count: int, *numbers: int) -> list[Path]:
    return [checkpoint_file.persist(found, saves, cut=Slice(number, count)) for number in numbers or range(count)]


# ------------------------------------------------------------ how a state is cut
@pytest.mark.parametrize("kind", RAW)
def test_a_type_has_the_size_that_torch_gives_it(kind):
    assert item_bytes(kind) == getattr(torch, kind).itemsize


def test_no_more_nodes_write_than_is_worth_it():
    assert [slices_of(size, 3) for size in (0, LEAST_SLICE, 2 * LEAST_SLICE, 9 * LEAST_SLICE)] == [1, 1, 2, 3]
    assert slices_of(100 * LEAST_SLICE, 50) == MOST_SLICES and slices_of(100 * LEAST_SLICE, 1) == 1


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 3)), min_size=1, max_size=12), st.integers(1, 8))
def test_each_parameter_is_in_one_slice_and_slices_differ_by_the_largest_at_most(sizes, count):
    """sizes: the elements of each parameter, and the tensors that it has."""
    index, tensors = [], []
    for name, (elements, kinds) in enumerate(sizes):
        keys = {str(key): len(tensors) + key for key in range(kinds - 1)}
        index.append([str(name), [], [], [], 0, elements, keys, {}, {"step": [len(tensors) + kinds - 1, []]}])
        tensors += [["float32", elements]] * (kinds - 1) + [["int64", 1]]
    ends = list(itertools.accumulate(-(-count * item_bytes(kind) // 64) * 64 for kind, count in tensors))
    about = msgpack.packb({"index": index, "tensors": tensors})
    found = [cut_out(about, ends[-1], Slice(number, count)) for number in range(count)]
    assert [begin for _, begin, _ in found] == [0, *(end for _, _, end in found[:-1])] and found[-1][2] == ends[-1]
    parts = [msgpack.unpackb(part) for part, _, _ in found]
    assert [entry[0] for part in parts for entry in part["index"]] == [str(name) for name in range(len(sizes))]
    assert [tensor for part in parts for tensor in part["tensors"]] == tensors
    for part in parts:
        numbers = [number for *_, keys, _, values in part["index"] for number in [*keys.values(), values["step"][0]]]
        assert numbers == list(range(len(part["tensors"])))
    largest = max(end - begin for begin, end in itertools.pairwise([0, *ends])) * 3
    assert all(abs((end - begin) - ends[-1] / count) <= largest for _, begin, end in found)


@pytest.mark.parametrize(
    "about",
    [
        {"index": [["a", [], [], [], 0, 1, {"parameter": 1}, {}, {}]], "tensors": [["float32", 1], ["float32", 1]]},
        {"index": [["a", [], [], [], 0, 1, {"parameter": 0}, {}, {}]], "tensors": [["float32", 1], ["float32", 1]]},
        {"index": [["a", [], [], [], 0, 1, {"parameter": 0}, {}, {}]], "tensors": [["float32", 1, 64]]},
        {"index": [["a", [], [], [], 0, 1, {"parameter": 0}, {}, {}]], "tensors": [["text", 1]]},
        {"index": [["a", {"parameter": 0}]], "tensors": [["float32", 1]]},
    ],
)
def test_what_no_rank_describes_like_this_is_not_cut(about):
    with pytest.raises((ValueError, KeyError, TypeError)):
        cut_out(msgpack.packb(about), 64, Slice(0, 2))


def test_the_name_of_an_image_says_which_slice_its_node_writes(tmp_path):
    for cut in (WHOLE, Slice(0, 2), Slice(11, 12)):
        assert slice_in(checkpoint_file.aside_path(tmp_path, 3, 40, cut)) == cut


# ------------------------------------------------------------ when they are a checkpoint
@pytest.mark.parametrize("count", [2, 3, 7])
def test_slices_of_several_nodes_are_read_as_one_state(tmp_path, count):
    """7: more than the parameters, so some have none."""
    state, other = training(), training(seed=3)
    for number in range(count):
        written(image_of(tmp_path / f"node{number}", state), tmp_path / "saves", count, number)
    (found,) = folders.whole(tmp_path / "saves")
    assert len(found.paths) == count and found.mark == WRITER.mark and own.check(found) == []
    assert Checkpoints(tmp_path / "saves").load(other) == 4
    assert (
        same(everything(state), everything(other))
        and state.optimizer.state_dict()["param_groups"] == (other.optimizer.state_dict()["param_groups"])
    )
    (whole,) = folders.whole(written(image_of(tmp_path / "alone", state), tmp_path / "whole", 1)[0].parent.parent)
    names = [{name: each.shape for name, each in own.read(one).tensors.items()} for one in (found, whole)]
    assert names[0] == names[1]


def test_it_is_no_checkpoint_before_the_last_slice_and_the_one_before_is_used(tmp_path):
    state, saves, before = training(), tmp_path / "saves", training(seed=5)
    Checkpoints(saves).save_last(before, 2, WRITER)
    for count, numbers in ((3, (0, 2)), (2, (1,))):  # of another number of nodes: they do not go together
        written(image_of(tmp_path / f"node{count}", state), saves, count, *numbers)
    (saves / "iteration-00000004" / f"{WRITER.mark}.place-0-of-1.shard-0-of-1.slice-1-of-3.0a1b2c3d.image").touch()
    for path in (saves / "iteration-00000004").glob("*slice-0-of-3*"):  # of another mark
        path.with_name(path.name.replace(WRITER.mark, "0a1b2c3d").replace("slice-0", "slice-1")).touch()
    assert [each.iteration for each in folders.whole(saves)] == [2]
    assert Checkpoints(saves).load(state) == 2 and same(everything(state), everything(before))
    written(image_of(tmp_path / "other", before), saves, 3, 1)
    assert [each.iteration for each in folders.whole(saves)] == [2], "a slice of another state does not complete it"
    written(image_of(tmp_path / "again", training()), saves, 3, 1)
    assert [each.iteration for each in folders.whole(saves)] == [4, 2]


@pytest.mark.parametrize("how", ["flipped", "cut off", "empty"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_torn_slice_is_found_and_the_checkpoint_before_is_used(tmp_path, how, number):
    state, saves, before = training(), tmp_path / "saves", training(seed=5)
    Checkpoints(saves).save_last(before, 2, WRITER)
    paths = written(image_of(tmp_path / "node", state), saves, 2)
    if how == "flipped":
        flip(paths[number])
    else:
        paths[number].write_bytes(paths[number].read_bytes()[: -1 if how == "cut off" else 0])
    (wrong,) = own.check(folders.whole(saves)[0])
    assert paths[number].name in wrong
    found = training(seed=7)
    assert Checkpoints(saves).load(found) == 2 and same(everything(found), everything(before))


def test_what_was_found_damaged_counts_again_when_each_of_its_slices_was_written_anew(tmp_path):
    """The training goes on from the checkpoint before, and computes the same iteration again. The damage is in slice
    1."""
    state, saves, found = training(), tmp_path / "saves", training(seed=7)
    Checkpoints(saves).save_last(training(seed=5), 2, WRITER)
    nodes = [image_of(tmp_path / f"node{number}", state) for number in (0, 1)]
    flip(written(nodes[0], saves, 2)[1])
    assert Checkpoints(saves).load(found) == 2 and [each.iteration for each in folders.whole(saves)] == [2]
    written(nodes[0], saves, 2, 0)
    assert [each.iteration for each in folders.whole(saves)] == [2]
    assert folders.prune(saves, 1) == 2, "the checkpoint before stays"
    written(nodes[1], saves, 2, 1)
    assert [each.iteration for each in folders.whole(saves)] == [4, 2] and not list(saves.glob("*/*.damaged"))
    assert own.check(folders.whole(saves)[0]) == []
    assert Checkpoints(saves).load(found) == 4 and same(everything(state), everything(found))


def test_of_a_whole_file_and_slices_one_is_read(tmp_path):
    found = image_of(tmp_path / "node", training())
    paths = written(found, tmp_path / "saves", 2)
    (whole,) = written(found, tmp_path / "saves", 1)
    assert [each.paths for each in folders.whole(tmp_path / "saves")] == [(whole,)]
    whole.unlink()
    assert [each.paths for each in folders.whole(tmp_path / "saves")] == [tuple(paths)]
    checkpoint_file.persist(found, tmp_path / "saves", cut=Slice(1, 2))
    paths[0].with_name(f"{WRITER.mark}.damaged").touch()
    assert not folders.whole(tmp_path / "saves")


def test_a_name_that_promises_more_slices_than_there_are_numbers_costs_nothing(tmp_path):
    folder = tmp_path / "iteration-00000004"
    folder.mkdir()
    for number in (0, 9**12 - 1):
        (folder / f"0a1b2c3d.place-0-of-1.shard-0-of-1.slice-{number}-of-{9**12}.0a1b2c3d.image").touch()
    (folder / "0a1b2c3d.place-0-of-1.shard-0-of-1.slice-1-of-1.0a1b2c3d.image").touch()
    assert folders.whole(tmp_path) == []


# ------------------------------------------------------------ whose turn it is
def test_who_waits_sees_each_slice_as_progress_and_all_of_them_as_the_file(tmp_path):
    found, saves = image_of(tmp_path / "node", training()), tmp_path / "saves"
    turn = Turn({folders.part_of(found.key): 4}, 5.0, 0.0, exactly=True)
    for number, now in ((0, 1.0), (1, 4.0), (2, 8.0)):
        written(found, saves, 3, number)
        turn.note_files(folders.files_in_progress(saves, 4), now)
        assert bool(turn.missing) == (number < 2)
    assert turn.until == 13.0


# ------------------------------------------------------------ what is written
def large() -> TrainingState:
    """A state of several leaves."""
    state = training()
    state.model[0].module.register_buffer("much", torch.arange(3 * LEAF // 4, dtype=torch.float32))
    return state


def test_no_bit_that_flipped_in_memory_gets_into_a_slice_not_even_one_of_another_slice(tmp_path):
    made = image_of(tmp_path / "node", large())
    flip(made.path)
    for number in (0, 1):
        with pytest.raises(BadImage, match="do not match their checksum"):
            written(made, tmp_path / "saves", 2, number)
    assert not list(tmp_path.glob("saves/*/*"))


def test_a_byte_that_changes_between_the_check_and_the_copy_is_found(tmp_path, monkeypatch):
    made = image_of(tmp_path / "node", large())
    check = ImagePage.check_file

    def checked(self: ImagePage, *more: Any) -> list[bytes]:
        leaves = check(self, *more)
        flip(self.path)
        return leaves

    monkeypatch.setattr(ImagePage, "check_file", checked)
    with pytest.raises(BadImage, match="changed while it was copied"):
        written(made, tmp_path / "saves", 2)
    assert not list(tmp_path.glob("saves/*/*slice-1-of-2*"))


def test_others_see_that_a_node_is_at_work_before_it_writes_and_while_its_disk_is_slow(tmp_path, monkeypatch):
    """Else they would write its slice as well."""
    made, saves, seen, sizes = image_of(tmp_path / "node", large()), tmp_path / "saves", [], []
    utime, sync = os.utime, os.fsync

    def touched(path: Path) -> None:
        time.sleep(0.01)  # the clock of files is coarse
        utime(path)
        seen.append([each.progress for each in folders.files_in_progress(saves, 4) if not each.whole])

    def synced(descriptor: int) -> None:
        sync(descriptor)
        sizes.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(checkpoint_file, "TOUCH_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint_file, "SYNC_BYTES", LEAF)
    monkeypatch.setattr(os, "utime", touched)
    monkeypatch.setattr(os, "fsync", synced)
    written(made, saves, 2, 0)
    assert len({tuple(each) for each in seen}) >= 3, "while the image is checked"
    assert len(set(sizes)) >= 3, "while it is written"
