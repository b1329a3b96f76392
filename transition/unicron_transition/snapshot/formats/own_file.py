"""Writes a checkpoint of Unicron's own: one file with all of it, which ranks of any layout read."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import xxhash

from unicron_transition.snapshot.checkpoint_file import finished, folder_name, stem, unfinished
from unicron_transition.snapshot.formats.index import MAINS, PARAMETER, BadCheckpoint, Index, Tensor, raw_type
from unicron_transition.snapshot.formats.written import pieces_of
from unicron_transition.snapshot.image_format import ALIGN, DIGEST, STATE, STEP, SUFFIX, Key, file_front


def write(folder: Path, index: Index) -> Path:
    """Into the folder of checkpoints; returns that of this one. One block is in memory at a time. Raises BadCheckpoint,
    OSError."""
    at = folder / folder_name(index.iteration)
    if at.exists():
        raise BadCheckpoint(f"{at} is there already: move it away, or give another folder")
    about, tensors = _about(index)
    mark = hashlib.blake2b(repr((index.layout, index.iteration, "import")).encode(), digest_size=4).hexdigest()
    key = Key(STATE, 0, index.iteration, mark=mark)
    head = _head(index, about)
    path = at / f"{stem(key)}{SUFFIX}"
    size = sum(-(-block.nbytes // ALIGN) * ALIGN for block in tensors)
    at.mkdir(parents=True)
    new = unfinished(path)
    try:
        with new.open("wb") as file:
            file.write(file_front(key, head, size, bytes(DIGEST)))
            total = xxhash.xxh3_128()
            for block in tensors:
                _write(file, total, block)
            file.seek(0)
            file.write(file_front(key, head, size, total.digest()))
            file.flush()
            os.fsync(file.fileno())
        finished(path, mark)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
            at.rmdir()
        raise
    return at


class _Piece:
    """A block of a tensor that is to be written."""

    def __init__(self, tensor: Tensor, offset: tuple[int, ...], extent: tuple[int, ...]):
        self.tensor, self.offset, self.extent = tensor, offset, extent
        self.count = math.prod(extent)
        self.nbytes = self.count * raw_type(tensor.dtype).itemsize


def _write(file: BinaryIO, total: Any, block: _Piece) -> None:
    for part in pieces_of((block.offset, block.extent)):
        array = np.ascontiguousarray(block.tensor.read(*part))
        data = memoryview(array.data).cast("B") if array.size else b""
        file.write(data)
        total.update(data)
    padding = bytes(-block.nbytes % ALIGN)
    file.write(padding)
    total.update(padding)


def _about(index: Index) -> tuple[bytes, list[_Piece]]:
    """(as `snapshot.contents` has it, the blocks in their order)."""
    lines: list[Any] = []
    values: dict[str, Any]
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
        others, values = index.others.get(tensor.name, {}), {}
        for key, state in found.items():
            if key not in states:
                values[key] = [len(blocks), state.shape]
                blocks.append(_Piece(state, (0,) * len(state.shape), state.shape))
        for offset, extent in main.boxes():
            keys = {}
            for key, each in {PARAMETER: main, **states}.items():
                keys[key] = len(blocks)
                blocks.append(_Piece(each, offset, extent))
            if states and step is not None and "step" not in values.keys() | others.keys():
                values["step"] = [-1, ()]
            line = chunk + tensor.name, tensor.shape, offset, extent, 0, math.prod(extent), keys, others, values
            lines.append(line)
    kinds: list[tuple[Any, ...]] = [(block.tensor.dtype, block.count) for block in blocks]
    for *_, values in lines:  # all that are not there are the one in the head
        if values.get("step", (0,))[0] < 0:
            values["step"] = [len(blocks), ()]
    kinds.append(("float32", 1, STEP))
    return msgpack.packb({"index": lines, "tensors": kinds}), blocks


def _head(index: Index, about: bytes) -> bytes:
    common = index.common
    told = {
        "iteration": index.iteration,
        "layout": index.layout,
        "groups": common.groups,
        "scheduler": common.schedule,
        "scales": common.scales,
        "seed": common.seed,
        "loss": common.loss,
        "step": common.step or 0.0,
        "untrained": "",
        "about": about,
        "facts": common.facts | {"arguments": common.args},
    }
    packed: bytes = msgpack.packb(told)
    return packed
