"""The tensors of a new checkpoint: the name and the source of each. Elements are read a block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unicron_transition.snapshot.formats.index import Array, BadCheckpoint, Place, Tensor, in_pieces, raw_type

LEAST = 1 << 22  # elements that are read at once
FLOATS = ("float64", "float32", "float16", "bfloat16")


def pieces_of(box: tuple[Place, Place]) -> Iterator[tuple[Place, Place]]:
    """Cut a block into the parts in which it is read and written. A block that is assembled from ranges is assembled
    again for each part, so there are some eight."""
    return in_pieces(*box, max(LEAST, math.prod(box[1]) // 8))


@dataclass(frozen=True)
class Options:
    """The options of an export."""

    names: str = ""
    """The table of Hugging Face's names (`names.choose`)."""
    config: Path | None = None
    """The model's config.json."""
    dtype: str = ""
    """The precision of the model's tensors, "" for that of the model."""
    say: Callable[[str], None] = lambda line: None
    """Called with each line for people."""


@dataclass(frozen=True)
class Out:
    """A tensor of the new checkpoint."""

    name: str
    shape: Place
    dtype: str
    boxes: list[tuple[Place, Place]]
    """The blocks in which it is written; they make up the whole."""
    read: Callable[[Place, Place], Array]
    """Reads the elements of a block."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * raw_type(self.dtype).itemsize

    def whole(self) -> Iterator[Array]:
        """Yield its elements in row-major order: block by block if the blocks are rows, otherwise all at once."""
        zeros = (0,) * len(self.shape)
        rows = sorted(self.boxes)
        if all(offset[1:] == zeros[1:] and extent[1:] == self.shape[1:] for offset, extent in rows):
            for box in rows:
                for part in pieces_of(box):
                    yield np.ascontiguousarray(self.read(*part))
        else:
            yield np.ascontiguousarray(self.read(zeros, self.shape))


def of(tensor: Tensor, name: str = "", dtype: str = "") -> Out:
    """Return a tensor of an index, under another name or in another precision."""
    wanted = dtype or tensor.dtype

    def read(offset: Place, extent: Place) -> Array:
        return cast(tensor.read(offset, extent), tensor.dtype, wanted)

    return Out(name or tensor.name, tensor.shape, wanted, tensor.boxes(), read)


def cast(array: Array, dtype: str, wanted: str) -> Array:
    """Return the elements in another precision, rounded to the nearest as torch does. Raises BadCheckpoint unless both
    types are floats."""
    if dtype == wanted:
        return array
    if dtype not in FLOATS or wanted not in FLOATS:
        raise BadCheckpoint(f"{dtype} is not converted to {wanted}")
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if wanted != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(raw_type(wanted))
    bits = array.astype(np.float32, copy=False).view(np.uint32)
    rounded = np.empty(bits.shape, np.uint16)
    flat, into, step = bits.reshape(-1), rounded.reshape(-1), 1 << 20
    for begin in range(0, flat.size, step):  # no second copy of all of it
        piece = flat[begin : begin + step]
        up = piece + (((piece >> 16) & 1) + np.uint32(0x7FFF))
        nan = (piece & 0x7FFFFFFF) > 0x7F800000
        into[begin : begin + step] = np.where(nan, np.uint32(0x7FC0), up >> 16)
    return rounded
