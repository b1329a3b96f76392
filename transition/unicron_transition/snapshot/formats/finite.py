"""Finds numbers in a checkpoint that are not finite. One such number in a parameter or in the optimizer's state makes a
training worthless, although every byte is as it was written.

The elements are looked at as whole numbers, whose exponent tells, a piece at a time in several threads. So no type
needs torch, and memory is needed for some pieces only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from unicron_detector.words import plural
from unicron_transition.snapshot.formats.index import STATE, Array, Block, Index, Raw, Tensor, raw_type
from unicron_transition.snapshot.image_format import reading_threads
from unicron_transition.snapshot.reading import open_plain, read_into

READ = 1 << 22  # bytes that a thread reads at once
PIECE = 1 << 18  # bytes that it looks at, while they are in its core's cache
MOST_LINES = 20


class _Floats(NamedTuple):
    """The bits of a type of floating-point numbers."""

    unit: str
    """The numpy type of a whole number of the same size."""
    mask: int
    """The bits that tell."""
    value: int
    """Their value in a number that is not finite."""
    fraction: int = 0
    """The bits that are 0 in an infinite one; 0 for a type without infinity."""


# https://onnx.ai/onnx/technical/float8.html has the types of 8 bits
FLOATS = {
    "float64": _Floats("<u8", 0x7FF << 52, 0x7FF << 52, (1 << 52) - 1),
    "float32": _Floats("<u4", 0xFF << 23, 0xFF << 23, (1 << 23) - 1),
    "float16": _Floats("<u2", 0x1F << 10, 0x1F << 10, (1 << 10) - 1),
    "bfloat16": _Floats("<u2", 0xFF << 7, 0xFF << 7, (1 << 7) - 1),
    "float8_e5m2": _Floats("|u1", 0x7C, 0x7C, 0x03),
    "float8_e4m3fn": _Floats("|u1", 0x7F, 0x7F),
    "float8_e4m3fnuz": _Floats("|u1", 0xFF, 0x80),
    "float8_e5m2fnuz": _Floats("|u1", 0xFF, 0x80),
    "float8_e8m0fnu": _Floats("|u1", 0xFF, 0xFF),
}
FLOATS |= {"complex128": FLOATS["float64"], "complex64": FLOATS["float32"], "complex32": FLOATS["float16"]}


class Count(NamedTuple):
    """Numbers that are not finite, by kind."""

    nan: int = 0
    above: int = 0
    """Positive infinity."""
    below: int = 0
    """Negative infinity, as masks have."""

    def __add__(self, other: object) -> Count:
        assert isinstance(other, Count)
        return Count(self.nan + other.nan, self.above + other.above, self.below + other.below)

    @property
    def all(self) -> int:
        return self.nan + self.above + self.below


def count(numbers: Array, floats: _Floats) -> Count:
    """Count the numbers that are not finite among the elements of an array of whole numbers."""
    kind = numbers.dtype.type
    bad = (numbers & kind(floats.mask)) == kind(floats.value)
    if not bad.any():
        return Count()
    found = numbers[bad]
    if not floats.fraction:
        return Count(nan=len(found))
    infinite = found[(found & kind(floats.fraction)) == 0]
    below = int(np.count_nonzero(infinite & kind(1 << (8 * numbers.itemsize - 1))))
    return Count(len(found) - len(infinite), len(infinite) - below, below)


# ------------------------------------------------------------ reading
class _Part(NamedTuple):
    """Some bytes of a file, or a block that has to be read as a whole."""

    tensor: Tensor
    raw: Raw | None
    begin: int
    size: int
    block: Block


def _parts(index: Index) -> Iterator[_Part]:
    for tensor in index.tensors.values():
        for block in tensor.blocks if tensor.dtype in FLOATS else ():
            if (raw := block.raw(tensor.dtype)) is None:
                continue  # zeros
            if raw.strides is not None:
                yield _Part(tensor, None, 0, 0, block)
                continue
            size = (block.end - block.begin) * raw_type(tensor.dtype).itemsize
            for at in range(0, size, READ):
                yield _Part(tensor, raw, raw.offset + at, min(READ, size - at), block)


_own = threading.local()


def _memory() -> Array:
    """Return this thread's memory for READ bytes: new memory for each piece takes longer than the look."""
    if not hasattr(_own, "memory"):
        _own.memory = np.empty(READ, np.uint8)
    memory: Array = _own.memory
    return memory


def _count_in(part: _Part) -> Count:
    floats = FLOATS[part.tensor.dtype]
    if part.raw is None:
        array = np.ascontiguousarray(part.block.array(part.tensor.dtype)).reshape(-1)
        return count(array.view(floats.unit), floats)
    data = _memory()[: part.size]
    with open_plain(part.raw.path) as file:
        read_into(file, part.raw.path, part.begin, data.data)
    numbers, step = data.view(floats.unit), PIECE // np.dtype(floats.unit).itemsize
    return sum((count(numbers[at : at + step], floats) for at in range(0, len(numbers), step)), Count())


def find(index: Index) -> dict[str, Count]:
    """Return the numbers that are not finite, by the tensor's name. Raises BadCheckpoint, OSError."""
    found: dict[str, Count] = {}
    parts = list(_parts(index))
    with ThreadPoolExecutor(reading_threads(), "unicron-finite") as pool:
        for part, its in zip(parts, pool.map(_count_in, parts), strict=True):
            if its.all:
                found[part.tensor.name] = found.get(part.tensor.name, Count()) + its
    return found


# ------------------------------------------------------------ what it means
def examine(index: Index) -> tuple[list[str], list[str]]:
    """Return a line for each tensor whose numbers make the checkpoint worthless, and one for each buffer with
    infinities that may be meant, as a mask's are. Raises BadCheckpoint, OSError."""
    trained = {name for group in index.members for name in group}
    trained |= {name.removeprefix(STATE).partition(".")[2] for name in index.tensors if name.startswith(STATE)}
    wrong, notes = [], []
    for name, its in sorted(find(index).items()):
        # Weights alone do not say which are buffers: only what is below everything is a mask's then.
        meant = not its.nan and not name.startswith(STATE) and name not in trained and bool(trained or not its.above)
        if meant:
            notes.append(f"{name}: {_words(its, index.tensors[name])}: not judged, since a buffer may have them")
        else:
            wrong.append(f"{name}: {_words(its, index.tensors[name])}")
    return _shorten(wrong), _shorten(notes)


def _words(its: Count, tensor: Tensor) -> str:
    elements = int(np.prod(tensor.shape, dtype=np.int64)) * (2 if tensor.dtype.startswith("complex") else 1)
    kinds = [f"{its.nan} NaN"] * bool(its.nan) + [f"{its.above + its.below} infinite"] * bool(its.above + its.below)
    return (
        f"{its.all} of {plural(elements, 'number')} {'is' if its.all == 1 else 'are'} not finite ({', '.join(kinds)})"
    )


def _shorten(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return lines if more <= 1 else [*lines[:MOST_LINES], f"and {more} more tensors"]
