"""Reads Unicron's own checkpoints, and writes one from an index: a single file, which ranks of any layout can read."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from unicron_transition.snapshot import folders, image_format
from unicron_transition.snapshot.checkpoint_file import Head, folder_name, head_of_file, stem, writing
from unicron_transition.snapshot.formats.index import (
    MAINS,
    PARAMETER,
    STATE,
    BadCheckpoint,
    Block,
    Common,
    Index,
    Place,
    Raw,
    Tensor,
    group_steps,
    raw_type,
)
from unicron_transition.snapshot.formats.written import pieces_of
from unicron_transition.snapshot.image_format import ALIGN, STEP, SUFFIX, BadImage, ImagePage, Key, read_page
from unicron_transition.snapshot.reading import unpack

FORMAT = "unicron"


def newest(folder: Path) -> folders.WholeCheckpoint | None:
    """Return the newest whole checkpoint of a folder of checkpoints, or the one whose own folder it is."""
    if (match := folders.FOLDER.fullmatch(folder.name)) is not None:
        return next((each for each in folders.whole(folder.parent) if each.iteration == int(match[1])), None)
    return next(iter(folders.whole(folder)), None)


def read(found: folders.WholeCheckpoint) -> Index:
    """Return the index of a checkpoint. Raises BadCheckpoint, OSError."""
    try:
        pages = [read_page(path) for path in found.paths]
        heads = [head_of_file(page) for page in pages]
    except BadImage as error:
        raise BadCheckpoint(f"{error}: run `unicronctl checkpoint verify`, or use the checkpoint before") from None
    first = heads[0]
    common = Common(
        groups=first.groups,
        schedule=first.scheduler,
        scales=first.scales,
        seed=first.seed,
        loss=first.loss,
        facts=first.facts,
    )
    index = Index(FORMAT, found.iteration, first.layout, {}, common)
    steps: list[float] = []
    for page, head in zip(pages, heads, strict=True):
        about = unpack(head.about)
        for tensor in _tensors(page, head.step, about, steps):
            index.add(*tensor)
        for name, *_, others, _ in about["index"]:
            if others:
                index.others.setdefault(name, {}).update(others)
        index.ties |= about.get("ties", {})
        index.members = about.get("groups", [])
    common.step = max([*steps, *group_steps(common.groups)], default=None)
    return _without_chunk(index)


def lay_out(tensors: list[Any], page: ImagePage) -> list[tuple[str, int, int]]:
    """List (dtype, elements, byte in the file or -1 for the optimizer's step) of the tensors that an image's head
    describes. Raises ValueError for one outside of the image's data."""
    found, at = [], 0
    for kind, count, *where in tensors:
        if where == [STEP]:
            found.append((kind, count, -1))
            continue
        size, begin = count * raw_type(kind).itemsize, where[0] if where else at
        if not 0 <= begin <= begin + size <= page.data_bytes:
            raise ValueError(f"a tensor of it is outside of its {page.data_bytes} bytes")
        found.append((kind, count, page.offset + begin))
        at += -(-size // ALIGN) * ALIGN
    return found


def _tensors(page: ImagePage, step: float, about: Any, steps: list[float]) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of :meth:`Index.add` for each tensor of a file. step: of its head. steps: gets all counts of
    steps."""
    places = lay_out(about["tensors"], page)
    for name, whole, offset, extent, begin, end, keys, others, values in about["index"]:
        for key, number in keys.items():
            kind, count, at = places[number]
            if at < 0:
                continue
            full = name if key == PARAMETER else f"{STATE}{key}.{name}"
            find = partial(Raw, page.path, at, kind, (count,))
            block = Block(tuple(offset), tuple(extent), begin, end, find)
            yield full, whole, kind, block
        if isinstance(others.get("step"), int | float):
            steps.append(float(others["step"]))
        for key, (number, shape) in values.items():
            kind, count, at = places[number]
            find = partial(Raw, page.path, at, kind, tuple(shape))
            if key == "step":
                steps.append(float(step if at < 0 else find().array().item()))
            if at >= 0:
                yield f"{STATE}{key}.{name}", shape, kind, Block.of((0,) * len(shape), tuple(shape), find)


def _without_chunk(index: Index) -> Index:
    """Remove the number of the only chunk from the names of a plain module."""
    if not all(tensor.name.startswith("0.") for tensor in index.parameters()):
        return index
    for name in list(index.tensors):
        tensor = index.tensors.pop(name)
        if name.startswith(STATE):
            key, _, parameter = name.removeprefix(STATE).partition(".")
            tensor.name = f"{STATE}{key}.{parameter.removeprefix('0.')}"
        else:
            tensor.name = name.removeprefix("0.")
        index.tensors[tensor.name] = tensor
    index.others = {name.removeprefix("0."): others for name, others in index.others.items()}
    index.ties = {other.removeprefix("0."): name.removeprefix("0.") for other, name in index.ties.items()}
    index.members = [[name.removeprefix("0.") for name in group] for group in index.members]
    return index


def read_sound(found: folders.WholeCheckpoint) -> Index:
    """Check all files of a checkpoint, then return its index. Raises BadCheckpoint for a damaged file, OSError."""
    if wrong := check(found):
        raise BadCheckpoint(wrong[0])
    return read(found)


def check(found: folders.WholeCheckpoint) -> list[str]:
    """Read all files of a checkpoint and describe each damaged one in a line."""
    wrong = []
    for path in found.paths:
        try:
            page = read_page(path)
            head_of_file(page)
            page.check_file()
        except (BadImage, OSError) as error:
            wrong.append(str(error))
    return wrong


# ------------------------------------------------------------ writing
def write(folder: Path, index: Index) -> Path:
    """Write a checkpoint into a folder of checkpoints, one block in memory at a time, and return its own folder. Raises
    BadCheckpoint, OSError."""
    at = folder / folder_name(index.iteration)
    if at.exists():
        raise BadCheckpoint(f"{at} is there already: move it away, or give another folder")
    about, tensors = _about(index)
    mark = hashlib.blake2b(repr((index.layout, index.iteration, "import")).encode(), digest_size=4).hexdigest()
    key = Key(image_format.STATE, 0, index.iteration, mark=mark)
    common = index.common
    head = Head(
        index.iteration,
        index.layout,
        common.groups,
        common.schedule,
        common.scales,
        common.seed,
        common.loss,
        step=common.step or 0.0,
        untrained="",
        about=about,
        facts=common.facts,
    ).pack()
    path = at / f"{stem(key)}{SUFFIX}"
    size = sum(-(-block.nbytes // ALIGN) * ALIGN for block in tensors)
    at.mkdir(parents=True)
    try:
        with writing(path, key, head, size) as write_data:
            for block in tensors:
                for part in pieces_of((block.offset, block.extent)):
                    array = np.ascontiguousarray(block.tensor.read(*part))
                    write_data(memoryview(array.data).cast("B") if array.size else b"")
                write_data(bytes(-block.nbytes % ALIGN))
    except BaseException:
        with contextlib.suppress(OSError):
            at.rmdir()
        raise
    return at


class _Piece:
    """A block of a tensor to be written."""

    def __init__(self, tensor: Tensor, offset: Place, extent: Place):
        self.tensor, self.offset, self.extent = tensor, offset, extent
        self.count = math.prod(extent)
        self.nbytes = self.count * raw_type(tensor.dtype).itemsize


def _about(index: Index) -> tuple[bytes, list[_Piece]]:
    """Return the description of the tensors (`checkpoint_file.Head.about`) and their blocks in order."""
    lines: list[Any] = []
    blocks: list[_Piece] = []
    step = index.common.step
    # A plain module's names begin with the number of its chunk, Megatron's do not.
    chunk = "" if any(name.startswith("decoder.") for name in index.tensors) else "0."
    for tensor in index.parameters():
        found = {key: state for key, state in index.states(tensor.name).items() if key not in MAINS}
        states = {key: state for key, state in found.items() if state.shape == tensor.shape and state.shape}
        main = index.main(tensor.name)
        if main.shape != tensor.shape:
            raise BadCheckpoint(f"{tensor.name}: its optimizer's state is of another shape")
        others = index.others.get(tensor.name, {})
        values: dict[str, tuple[int, Place]] = {}  # number of the block and shape
        for key, state in found.items():
            if key not in states:
                values[key] = len(blocks), state.shape
                blocks.append(_Piece(state, (0,) * len(state.shape), state.shape))
        for offset, extent in main.boxes():
            keys = {}
            for key, each in {PARAMETER: main, **states}.items():
                keys[key] = len(blocks)
                blocks.append(_Piece(each, offset, extent))
            if states and step is not None and "step" not in values.keys() | others.keys():
                values["step"] = (-1, ())
            line = chunk + tensor.name, tensor.shape, offset, extent, 0, math.prod(extent), keys, others, values
            lines.append(line)
    kinds: list[tuple[Any, ...]] = [(block.tensor.dtype, block.count) for block in blocks]
    for *_, values in lines:  # a step without a block is the one in the head
        if values.get("step", (0,))[0] < 0:
            values["step"] = (len(blocks), ())
    kinds.append(("float32", 1, STEP))
    return msgpack.packb({"index": lines, "tensors": kinds}), blocks
