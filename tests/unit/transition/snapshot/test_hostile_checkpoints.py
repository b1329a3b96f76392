"""Checkpoints that are damaged, or are there to do harm: each is refused in one line, by little work in little memory.

All of them are small, and nothing in them goes wrong in a program that is not ours.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tests.support.kept import training
from unicron_transition.snapshot import contents, reading
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints
from unicron_transition.snapshot.formats import opening, pickles
from unicron_transition.snapshot.formats.index import BadCheckpoint, Block, Raw, Tensor, in_pieces, tiles
from unicron_transition.snapshot.image_format import BadImage, read_page

LIMIT = 120.0
HOLE = 40 << 30  # bytes of a file that takes a few on disk


# ------------------------------------------------------------ parts
def whole(size: int) -> torch.Tensor:
    return torch.arange(100, 100 + size, dtype=torch.float32)


def stored(data: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


@contextlib.contextmanager
def changed_metadata(folder: Path) -> Iterator[Any]:
    """The metadata of a checkpoint of torch's own, which are written again afterwards."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    yield found
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def chunked(folder: Path, values: torch.Tensor, boxes: list[tuple[list[int], list[int]]]) -> Path:
    """A checkpoint of torch's own with one tensor, of these parts (begin, end)."""
    dcp.save({"w": values}, checkpoint_id=str(folder), no_dist=True)
    data = b""
    with changed_metadata(folder) as found:
        found.state_dict_metadata["w"].chunks, found.storage_data = [], {}
        for begin, end in boxes:
            size = torch.Size([e - b for b, e in zip(begin, end, strict=True)])
            piece = stored(values[tuple(slice(b, e) for b, e in zip(begin, end, strict=True))].clone())
            found.state_dict_metadata["w"].chunks.append(metadata.ChunkStorageMetadata(torch.Size(begin), size))
            place = metadata.MetadataIndex("w", torch.Size(begin))
            found.storage_data[place] = _StorageInfo("__0_0.distcp", len(data), len(piece))
            data += piece
    (folder / "__0_0.distcp").write_bytes(data)
    return folder


class Storage:
    """In a pickle, an archive's only storage."""


class Stored:
    """In a pickle, a tensor of that storage, with any place in it."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0):
        self.args = shape, strides, offset

    def __reduce__(self) -> Any:
        shape, strides, offset = self.args
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, (Storage(), offset, shape, strides, False, collections.OrderedDict())


def archive(path: Path, content: Any, size: int = 16, compress: int = zipfile.ZIP_STORED) -> Path:
    """An archive of torch's with one storage of so many floats, and any content."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, each: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", size) if isinstance(each, Storage) else None

    buffer = io.BytesIO()
    if isinstance(content, bytes):
        buffer.write(content)
    else:
        Pickler(buffer, 2).dump(content)
    with zipfile.ZipFile(io.BytesIO(stored(torch.zeros(size)))) as source, zipfile.ZipFile(path, "w", compress) as out:
        for each in source.infolist():
            out.writestr(each.filename, buffer.getvalue() if each.filename.endswith("data.pkl") else source.read(each))
    return path


def common(folder: Path, content: Any, **more: Any) -> Path:
    """A checkpoint of Megatron's whose common part is this."""
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=str(folder), no_dist=True)
    archive(folder / "common.pt", content, **more)
    return folder


def sparse(path: Path, front: bytes = b"", size: int = HOLE) -> Path:
    """A file of this size, of which almost nothing is on disk."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(front)
        file.truncate(size)
    return path.parent


def refusal(folder: Path) -> str:
    """The line with which a checkpoint is refused, when its index is read or all of it; empty where it is not."""
    try:
        with reading.files_of(folder):
            opening.index_of(folder)
            _, wrong = opening.verify(folder)
    except (BadCheckpoint, OSError) as error:
        wrong = [str(error)]
    assert all(0 < len(said) < 600 and "\n" not in said and "defect" not in said for said in wrong), wrong
    assert len(wrong) < 2, wrong
    return "".join(wrong)


# ------------------------------------------------------------ parts of a tensor
def test_boxes_tile_a_tensor_or_they_do_not():
    cut = [((0, 0), (2, 2)), ((0, 2), (2, 3)), ((2, 0), (1, 5))]
    assert tiles((3, 5), cut) and tiles((), [((), ())]) and tiles((0, 4), [])
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert tiles((3, 3), wheel), "no line cuts it in two"
    for number in range(len(wheel)):
        assert not tiles((3, 3), wheel[:number] + wheel[number + 1 :])
        assert not tiles((3, 3), [*wheel, wheel[number]])
    assert not tiles((4,), [((0,), (2,)), ((1,), (2,))]), "the sizes add up"
    assert not tiles((4,), [((0,), (3,)), ((4,), (1,))]), "one is behind the end"
    assert tiles((4,), [((0,), (4,)), ((2,), (0,))]), "what is empty is nowhere"


def test_any_cut_of_a_tensor_tiles_it_and_no_part_of_it_moved_does():
    rng = random.Random(3)
    for _ in range(200):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(rng.randint(1, 8)):
            offset, extent = boxes.pop(rng.randrange(len(boxes)))
            axis = rng.randrange(len(shape))
            at = rng.randint(0, extent[axis])
            first = (*extent[:axis], at, *extent[axis + 1 :])
            second = (*extent[:axis], extent[axis] - at, *extent[axis + 1 :])
            boxes += [(offset, first), ((*offset[:axis], offset[axis] + at, *offset[axis + 1 :]), second)]
        assert tiles(shape, boxes)
        boxes = [box for box in boxes if all(box[1])]
        number, axis = rng.randrange(len(boxes)), rng.randrange(len(shape))
        offset, extent = boxes[number]
        moved = (*offset[:axis], offset[axis] + rng.choice((-1, 1)), *offset[axis + 1 :])
        assert not tiles(shape, [*boxes[:number], (moved, extent), *boxes[number + 1 :]])


@pytest.mark.parametrize(
    "boxes",
    [
        [([0], [2]), ([1], [3])],
        [*(([n], [n + 1]) for n in range(62)), ([62], [64]), ([63], [65])],
        [([0], [2])],
        [([0], [2]), ([2], [4]), ([3], [4])],
    ],
    ids=["overlap and hole", "of 64", "hole", "twice"],
)
def test_chunks_that_are_no_partition_are_refused(tmp_path, boxes):
    size = 66 if len(boxes) > 4 else 4
    folder = chunked(tmp_path / "in", whole(size), boxes)
    assert "no partition" in refusal(folder)
    with pytest.raises(CheckpointError, match="no partition"):
        Checkpoints(tmp_path / "new", begin_from=folder).choices()


def test_chunks_that_are_one_are_read_whatever_their_order(tmp_path):
    values = whole(12).reshape(3, 4)
    boxes = [([1, 2], [3, 4]), ([0, 0], [1, 4]), ([1, 0], [3, 2])]
    index = opening.index_of(chunked(tmp_path / "in", values, boxes))
    np.testing.assert_array_equal(index.tensors["w"].read(), values.numpy())
    np.testing.assert_array_equal(index.tensors["w"].read((0, 1), (3, 2)), values.numpy()[:, 1:3])


def test_a_part_of_which_some_is_there_twice_and_some_not_at_all_is_not_read(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(whole(4).numpy().tobytes())
    blocks = [Block.of((at,), (2,), lambda: Raw(path, 0, "float32", (2,))) for at in (0, 1, 3)]
    tensor = Tensor("w", (8,), "float32", blocks)
    with pytest.raises(BadCheckpoint, match="in no file, or"):
        tensor.read((0,), (4,))
    np.testing.assert_array_equal(tensor.read((0,), (2,)), whole(2).numpy())


# ------------------------------------------------------------ bytes of a tensor
@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((2, 2), (-64, 65), 0),
        ((2, 2), (-1, 2), 4),
        ((2, 2), (65, -64), 0),
        ((4,), (1,), -1),
        ((4,), (1,), 13),
        ((4,), (5,), 1),
        ((1 << 40,), (0,), 0),
        ((1 << 20, 1 << 20, 1 << 20, 1 << 20), (0, 0, 0, 0), 0),
        ((17,), (0,), 0),
        ((1,) * 100, (1,) * 100, 0),
        ((-1, -4), (1, 1), 0),
    ],
)
@pytest.mark.parametrize("where", ["a chunk", "common"])
def test_a_tensor_outside_of_its_bytes_is_refused(tmp_path, shape, strides, offset, where):
    tensor = Stored(shape, strides, offset)
    found = pickles.archive(archive(tmp_path / "x", {"a": tensor} if where == "common" else tensor))
    with pytest.raises(BadCheckpoint, match=r"larger than|no shape"):
        found.raw(found.content["a"] if where == "common" else found.content)


def test_a_tensor_within_its_bytes_is_read_in_any_strides(tmp_path):
    values = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    for number, view in enumerate((values.t(), values[1:, ::2], values[2], values[:, :1], values[3, 5])):
        path = tmp_path / str(number)
        torch.save(view, path)
        found = pickles.archive(path)
        np.testing.assert_array_equal(found.raw(found.content).array(), view.numpy())


@pytest.mark.parametrize("piece", [8, 64, 1 << 20])
def test_a_part_is_read_without_the_rest(tmp_path, monkeypatch, piece):
    from unicron_transition.snapshot.formats import index

    monkeypatch.setattr(index, "PIECE", piece)
    values = np.arange(2 * 5 * 7 * 3, dtype="<f4").reshape(2, 5, 7, 3)
    path = tmp_path / "x"
    path.write_bytes(b"front" + values.tobytes())
    raw = Raw(path, 5, "float32", values.shape)
    rng = random.Random(1)
    for _ in range(100):
        cut = [sorted(rng.sample(range(extent + 1), 2)) for extent in values.shape]
        its = tuple(slice(*each) for each in cut)
        np.testing.assert_array_equal(raw.part(its), values[its])
    read = []
    monkeypatch.setattr(index, "read_into", lambda file, path, at, into: read.append(len(into)))
    raw.part((slice(1, 2), slice(0, 5), slice(0, 7), slice(0, 3)))
    assert sum(read) == values[1].nbytes, "the other half is left alone"


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    save_file({"w": torch.ones(1 << 16)}, tmp_path / "model.safetensors")
    raw = opening.index_of(tmp_path).tensors["w"].blocks[0].find()
    with reading.open_plain(raw.path) as file:
        os.truncate(raw.path, 4096)
        with pytest.raises(OSError, match="cut off"):
            reading.read_into(file, raw.path, raw.offset, memoryview(bytearray(4 << 16)))
    array = Raw(raw.path, 8, "float32", (4,)).array()
    os.truncate(raw.path, 0)
    assert array.sum() is not None, "what was read is in memory"


# ------------------------------------------------------------ the note that says "damaged"
def written(folder: Path) -> tuple[Checkpoints, Path]:
    saves = Checkpoints(folder, interval=1)
    saves.save_last(training(), 3)
    return saves, next(folder.glob("*/*.image"))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("where", ["head", "data"])
def test_a_file_system_that_has_lost_a_file_leaves_the_note(tmp_path, monkeypatch, code, where):
    saves, image = written(tmp_path)
    begin, real = (read_page(image).offset if where == "data" else 0), os.preadv

    def preadv(descriptor: int, into: Any, at: int) -> int:
        if at >= begin and os.readlink(f"/proc/self/fd/{descriptor}") == str(image):
            raise OSError(code, os.strerror(code))
        return real(descriptor, into, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError, match="no checkpoint can be"):
        saves.load(training())
    assert list(image.parent.glob("*.damaged")) and not saves.whole_ones(), "all ranks pass it over"


def test_a_file_that_is_cut_after_its_head_was_read_leaves_the_note(tmp_path):
    saves, image = written(tmp_path)
    opened, read = contents.open_image, []

    def cut(found: Any) -> Any:
        read.append(opened(found))
        os.truncate(image, found.offset + 8)
        return read[-1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="no checkpoint can be"):
        patch.setattr(contents, "open_image", cut)
        saves.load(training())
    assert read and list(image.parent.glob("*.damaged"))


def test_a_file_that_may_not_be_read_is_passed_over_without_a_note(tmp_path, monkeypatch):
    saves, image = written(tmp_path)

    def preadv(*_: Any) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError):
        saves.load(training())
    assert not list(image.parent.glob("*.damaged")), "it may be sound"


def test_verify_names_a_cut_file_of_unicrons_own(tmp_path):
    _, image = written(tmp_path)
    found = read_page(image)
    os.truncate(image, found.used - 1)
    assert opening.verify(tmp_path)[1] and "cut off" in opening.verify(tmp_path)[1][0]
    with pytest.raises((BadImage, OSError), match="cut off"):
        found.check_file()


# ------------------------------------------------------------ pickles that expand
def nested(depth: int) -> list[Any]:
    value: list[Any] = ["x"]
    for _ in range(depth):
        value = [value, value]
    return value


def pairs(depth: int) -> tuple[Any, ...]:
    value: tuple[Any, ...] = ("x",)
    for _ in range(depth):
        value = (value, value)
    return value


def said_again(front: bytes, call: bytes, count: int) -> bytes:
    """A pickle of a list of the same call, so many times. front: makes what it needs."""
    return b"\x80\x02" + front + b"](" + call * count + b"e."


TEXT = b"X" + struct.pack("<I", 1 << 16) + b"x" * (1 << 16)
MANY = b"}q\x02(" + b"".join(b"K" + bytes([n]) + b"N" for n in range(256)) + b"u0"
LIST = b"](" + b"N" * 5000 + b"eq\x020"
# What a pickle of a few KB tells to make: gigabytes, or what nobody waits for.
EXPANDING: dict[str, bytes] = {
    "lists in lists": pickle.dumps({"args": nested(40)}, 2),
    "dicts in dicts": pickle.dumps({"optimizer": {"param_groups": nested(40)}}, 2),
    "a set of tuples in tuples": pickle.dumps({pairs(8)}, 2),
    "a key of tuples in tuples": pickle.dumps({pairs(8): 1}, 2),
    "a frozenset of tuples": pickle.dumps({"x": frozenset([pairs(8)])}, 4),
    "a text encoded again": said_again(TEXT + b"q\x010c_codecs\nencode\nq\x020", b"h\x02h\x01\x85R", 20000),
    "a state told again": said_again(MANY + b"cargparse\nNamespace\nq\x010", b"h\x01)\x81h\x02b", 20000),
    "keywords told again": said_again(MANY + b"cargparse\nNamespace\nq\x010", b"h\x01)h\x02\x92", 20000),
    "a set made again": said_again(LIST + b"cbuiltins\nset\nq\x010", b"h\x01h\x02\x85R", 20000),
    "a size made again": said_again(LIST.replace(b"N", b"K\1") + b"ctorch\nSize\nq\x010", b"h\x01h\x02\x85R", 20000),
    "empty sets": b"\x80\x04](" + b"\x8f" * 400_000 + b"e.",
    "classes": b"\x80\x02](" + b"".join(b"cmegatron.core.x\nA%d\n" % n for n in range(9000)) + b"e.",
    "text of a path": said_again(TEXT + b"q\x010cpathlib\nPosixPath\nq\x020", b"h\x02h\x01h\x01\x86R", 20000),
    "announced bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 38) + b"xx.",
    "announced text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 38) + b"xx.",
    "bytes of a number": b"\x80\x02c__builtin__\nbytearray\nJ" + struct.pack("<i", 64 << 20) + b"\x85R.",
    "a key that is never hashed": b"\x80\x02}" + pickle.dumps(pairs(12), 2)[2:-1] + b"K\1s.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 38) + b"N.",
}


@pytest.mark.parametrize("what", EXPANDING)
@pytest.mark.parametrize("where", [".metadata", "common.pt"])
def test_what_expands_is_refused(tmp_path, what, where):
    folder = common(tmp_path / "in", EXPANDING[what])
    if where == ".metadata":
        (folder / ".metadata").write_bytes(EXPANDING[what])
    assert refusal(folder)


def test_a_far_place_in_the_memo_takes_no_room():
    data = b"\x80\x02Nr" + struct.pack("<I", 1 << 20) + b"."
    assert pickles.unpickle(data, Path("x")) is None
    assert issubclass(pickles._TableUnpickler, pickle._Unpickler), "the one in C makes room for all places before it"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02c_codecs\nencode\nN}X\x05\x00\x00\x00limitK\x01s\x86b.",
        b"\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02cbuiltins\ngetattr\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02cargparse\nNamespace\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02cmegatron.core.x\nA\n}X\x01\x00\x00\x00aK\x01sb.",
        b"\x80\x02ctorch\nFloatStorage\n}X\x01\x00\x00\x00aK\x01sb.",
    ],
)
def test_a_pickle_changes_nothing_of_ours(data):
    before = {name: dict(vars(each)) for name, each in vars(pickles).items() if hasattr(each, "__dict__")}
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        pickles.unpickle(data, Path("x"))
    assert {name: dict(vars(each)) for name, each in vars(pickles).items() if hasattr(each, "__dict__")} == before


@pytest.mark.parametrize("op", [b"(cbuiltins\nset\no.", b"(ibuiltins\nset\n.", b"\x82\x01.", b"\x97."])
def test_what_no_pickle_of_python_3_needs_is_not_known(op):
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        pickles.unpickle(b"\x80\x02" + op, Path("x"))


def test_honest_pickles_are_within_their_budget(tmp_path):
    told = {name: {"a": [1, 2.5, None, True, b"x", "y"], ("t", 1): {3, 4}} for name in map(str, range(3000))}
    data = pickle.dumps(told, 2)
    assert pickles.unpickle(data, Path("x")) == told
    found = pickles.archive(archive(tmp_path / "x", told))
    assert len(pickles.plain(found.content, found)) == len(told)
    chunks = [([n], [n + 1]) for n in range(300)]
    assert len(opening.index_of(chunked(tmp_path / "in", whole(300), chunks)).tensors["w"].blocks) == 300


def test_a_reading_of_a_pickle_is_interrupted_in_the_middle():
    data = pickle.dumps([{"a": n} for n in range(150_000)])
    before = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as found:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.02)  # of this process's own time, however busy the machine is
            pickles.unpickle(data, Path("x"))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert any(Path(each.path).name == "pickle.py" for each in found.traceback), "and not when it was over"


# ------------------------------------------------------------ archives and files
def test_a_compressed_archive_is_not_unpacked(tmp_path):
    content = pickle.dumps({"iteration": 1, "args": "x" * (64 << 20)}, 2)
    folder = common(tmp_path / "in", content, compress=zipfile.ZIP_DEFLATED)
    assert (folder / "common.pt").stat().st_size < 1 << 20 and "compressed" in refusal(folder)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("what", ["byteorder", "data/7"])
def test_no_other_member_expands(tmp_path, what):
    folder = common(tmp_path / "in", {"iteration": 1})
    with zipfile.ZipFile(folder / "common.pt", "a", zipfile.ZIP_DEFLATED) as out:
        root = out.namelist()[0].partition("/")[0]
        out.writestr(f"{root}/{what}", b"little" + b"\0" * (64 << 20))
    assert "compressed" in refusal(folder)


def test_a_member_that_is_a_hole_is_not_read(tmp_path):
    """An archive whose pickle is a long run of nothing, which takes no room on disk."""
    folder, size = common(tmp_path / "in", {"iteration": 1}), 1 << 30
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, size, size, 9, 0) + b"a/data.pk"[:8] + b"l"
    name = b"/data.pkl"
    local = local[:30] + name
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, size, size, 9, 0, 0, 0, 0, 0, 0) + name
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local) + size, 0)
    with (folder / "common.pt").open("wb") as file:
        file.write(local)
        file.seek(len(local) + size)
        file.write(entry + end)
    with zipfile.ZipFile(folder / "common.pt") as found:
        assert found.infolist()[0].file_size == size, "for others it is an archive"
    assert "larger than" in refusal(folder)


def test_any_broken_archive_is_one_line(tmp_path):
    folder = common(tmp_path / "in", {"iteration": 1, "args": {"a": Stored((2,), (1,))}})
    sound, rng = (folder / "common.pt").read_bytes(), random.Random(5)
    for _ in range(400):
        data = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            at = rng.choice((rng.randrange(len(data)), len(data) - 1 - rng.randrange(400)))
            data[at] = rng.choice((0, 1, 255, rng.randrange(256)))
        (folder / "common.pt").write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        refusal(folder)


def test_the_same_bytes_under_many_names_are_not_read_as_often(tmp_path):
    folder = tmp_path / "in"
    dcp.save({f"x{n}": torch.zeros(2 if n else 1 << 18) for n in range(40)}, checkpoint_id=str(folder), no_dist=True)
    assert not refusal(folder)
    with changed_metadata(folder) as found:
        first = next(iter(found.storage_data.values()))
        size = (folder / first.relative_path).stat().st_size
        for each in found.storage_data.values():
            each.relative_path, each.offset, each.length = first.relative_path, 0, size
    assert "many times" in refusal(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", "../other/x", "/etc/hostname", "..", "", "a/../b"])
def test_only_files_of_the_folder_are_read(tmp_path, name):
    folder = chunked(tmp_path / "in", whole(4), [([0], [4])])
    with changed_metadata(folder) as found:
        for each in found.storage_data.values():
            each.relative_path = name
    assert ("outside of the folder" in refusal(folder)) == (name != "__0_0.distcp")


@pytest.mark.parametrize("name", ["../other.safetensors", "/x/model.safetensors", "a/b.safetensors"])
def test_an_index_of_hugging_faces_names_files_of_its_folder(tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": torch.zeros(2)}, folder.parent / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    assert "outside of its folder" in refusal(folder)


def safetensors(folder: Path, told: Any, size: int) -> Path:
    """A file of safetensors with this header."""
    folder.mkdir(exist_ok=True)
    head = told if isinstance(told, bytes) else json.dumps(told).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(size))
    return folder


def tensor(*offsets: int, shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("told", "size"),
    [
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12),
        ({"a": tensor(0, 8), "b": tensor(0, 8)}, 8),
        ({"a": tensor(0, 8), "b": tensor(12, 20)}, 20),
        ({"a": tensor(4, 12)}, 12),
        ({"a": tensor(0, 8)}, 12),
        ({"a": tensor(0, 8)}, 4),
        ({"a": tensor(0, 8, shape=[1 << 62, 1 << 62])}, 8),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", 0),
    ],
)
def test_safetensors_are_refused_as_their_library_does(tmp_path, told, size):
    folder = safetensors(tmp_path / "in", told, size)
    with pytest.raises(SafetensorError), safe_open(folder / "model.safetensors", "np"):
        pass
    assert refusal(folder)


def test_safetensors_are_read_as_their_library_does(tmp_path):
    folder = safetensors(tmp_path / "in", {"a": tensor(0, 8), "e": tensor(8, 8, shape=[0]), "b": tensor(8, 16)}, 16)
    with safe_open(folder / "model.safetensors", "np") as file:
        assert {name: file.get_tensor(name).shape for name in file.keys()} == {
            name: each.read().shape for name, each in opening.index_of(folder).tensors.items()
        }


def test_a_shape_of_many_axes_is_none(tmp_path):
    told = tensor(0, 4, shape=(1,) * 20000)
    assert "no shape" in refusal(safetensors(tmp_path / "in", {"a": told}, 4))


def holes() -> dict[str, Callable[[Path], Path]]:
    """What makes a folder whose one file is as long as one likes, and takes nothing on disk."""

    def index(folder: Path) -> Path:
        return sparse(folder / "model.safetensors.index.json", b'{"weight_map": {')

    def config(folder: Path) -> Path:
        safetensors(folder, {"a": tensor(0, 8)}, 8)
        return sparse(folder / "config.json", b"{")

    def shared(folder: Path) -> Path:
        common(folder, {"iteration": 1})
        return sparse(folder / "common.pt")

    def backend(folder: Path) -> Path:
        common(folder, {"iteration": 1})
        return sparse(folder / "metadata.json", b"{")

    def image(folder: Path) -> Path:
        from unicron_transition.snapshot.image_format import Key, file_front

        at = folder / "iteration-00000001"
        at.mkdir(parents=True)
        front = file_front(Key("state", 0, 1, mark="0" * 8), b"", 0, bytes(16))
        return sparse(at / f"{'0' * 8}.place-0-of-1.shard-0-of-1.image", front).parent

    return {
        "metadata": lambda folder: sparse(folder / ".metadata", b"\x80\x04\x8d" + struct.pack("<Q", HOLE - 20)),
        "tracker": lambda folder: sparse(folder / "latest_checkpointed_iteration.txt", b"100"),
        "header": lambda folder: sparse(folder / "model.safetensors", struct.pack("<Q", 99_000_000) + b"{"),
        "archive": lambda folder: sparse((folder / "mp_rank_00") / "model_optim_rng.pt", b"PK\3\4"),
        "index": index,
        "config": config,
        "common": shared,
        "backend": backend,
        "image": image,
    }


@pytest.mark.parametrize("what", holes())
def test_a_file_that_is_a_hole_is_not_read(tmp_path, what):
    (tmp_path / "in").mkdir()
    holes()[what](tmp_path / "in")
    assert refusal(tmp_path / "in") or what == "image", "of an image without a head nothing is read"


def test_a_tensor_that_is_a_hole_is_not_read(tmp_path):
    size = 4 << 33
    folder = safetensors(tmp_path / "in", {"a": tensor(0, size, shape=[1 << 33])}, 0)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size + size)
    assert "larger than" in refusal(folder)


def test_zeros_may_be_holes(tmp_path):
    """As of a copy without them, or on a file system that compresses."""
    values = torch.cat([torch.zeros(1 << 21), torch.ones(1 << 19)])
    save_file({"w": values}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(4096)
        file.truncate(len(data))
        file.seek(len(data) - (1 << 20))
        file.write(data[-(1 << 20) :])
    raw = opening.index_of(tmp_path).tensors["w"].read()
    assert raw[: 1 << 21].sum() == 0.0 and raw[-4:].tolist() == [1.0] * 4


def test_a_box_is_cut_into_pieces_in_its_order():
    for extent in ((7,), (3, 5), (2, 3, 4), (1, 9, 1), (), (4, 0)):
        values = np.arange(int(np.prod(extent))).reshape(extent)
        for most in (1, 2, 4, 6, 100):
            found = list(in_pieces((0,) * len(extent), extent, most))
            cut = [values[tuple(slice(a, a + b) for a, b in zip(at, size, strict=True))] for at, size in found]
            assert np.concatenate([each.reshape(-1) for each in cut]).tolist() == values.reshape(-1).tolist()
            assert all(each.size <= max(most, 1) for each in cut)


@pytest.mark.parametrize("name", ["model.safetensors", "mp_rank_00/model_optim_rng.pt", "own"])
def test_nobody_waits_for_a_pipe(tmp_path, name):
    folder = tmp_path / "in"
    if name == "own":
        name = f"iteration-00000001/{'0' * 8}.place-0-of-1.shard-0-of-1.image"
    (folder / name).parent.mkdir(parents=True)
    os.mkfifo(folder / name)
    assert "not a plain file" in refusal(folder)


def test_no_layers_are_counted_that_are_not_there(tmp_path):
    """A distributed optimizer's buckets, of a model that says that it has a million million layers."""
    folder, shape = tmp_path / "in", (1 << 40, 4)
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    dcp.save({"decoder.layers.mlp.linear_fc2.bias": torch.zeros(4), name: torch.zeros(64)}, checkpoint_id=str(folder))
    with changed_metadata(folder) as found:
        layers = found.state_dict_metadata["decoder.layers.mlp.linear_fc2.bias"]
        layers.size = layers.chunks[0].sizes = torch.Size(shape)
        layers.chunks[0].offsets = torch.Size((0, 0))
        for place in list(found.storage_data):
            if place.fqn.startswith("decoder"):
                moved = metadata.MetadataIndex(place.fqn, torch.Size((0, 0)))
                found.storage_data[moved] = found.storage_data.pop(place)
    archive(folder / "common.pt", {"iteration": 1, "args": {"tensor_model_parallel_size": 1}})
    assert refusal(folder)


LIMITED = """
import resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_hostile_checkpoints as tests
import torch.distributed.checkpoint
now = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (now + (192 << 20),) * 2)
for number, folder in enumerate(sys.argv[2:]):
    said = tests.refusal(Path(folder))
    assert "MemoryError" not in said, (folder, said)
print("all")
"""


@pytest.mark.long
def test_none_of_them_takes_much_memory(tmp_path):
    folders = []
    for number, (what, data) in enumerate(EXPANDING.items()):
        folders.append(common(tmp_path / f"c{number}", data))
        assert len(data) < 1 << 20, what
    for what, make in holes().items():
        (tmp_path / what).mkdir()
        folders.append(tmp_path / what)
        make(tmp_path / what)
    words = [sys.executable, "-c", LIMITED, str(Path(__file__).parent), *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.stdout == "all\n", done.stderr[-2000:]
