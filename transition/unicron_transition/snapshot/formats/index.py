"""The index of a checkpoint: its tensors, the blocks of each, and the place of each block's bytes.

An index is made without reading a tensor. Reading a checkpoint block by block needs memory for one block only. Types
that numpy does not have, such as bfloat16, are moved as unsigned integers of the same size.
"""

from __future__ import annotations

import math
import random
import secrets
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np

from unicron_transition.snapshot.image_format import RAW
from unicron_transition.snapshot.model_facts import ModelFacts
from unicron_transition.snapshot.reading import PIECE, PlainValues, open_plain, pieces, read_into

Array = np.ndarray[Any, np.dtype[Any]]
PARAMETER = "parameter"  # the key of the parameter itself; the other keys are the optimizer's own
STATE = "optimizer.state."  # prefix of an optimizer's tensors: `optimizer.state.KEY.NAME`, as Megatron has them
MAINS = ("param", "fp32_param")  # the keys under which Megatron keeps main parameters
# Megatron's names: the prefix of layers, and the embedding and the output layer, whose last rows are padding.
LAYERS = "decoder.layers."
VOCABULARY = EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
Place = tuple[int, ...]
Slices = tuple[slice, ...]
MOST_AXES = 64  # the limit of numpy and torch
MOST_ELEMENTS = 1 << 60
MOST_LETTERS = 1000  # of a tensor's name
# The errors of readers for damaged bytes.
DAMAGE = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, EOFError, MemoryError),
    *(BadZipFile, struct.error, zlib.error, RuntimeError, AssertionError),
)


class BadCheckpoint(ValueError):
    """A checkpoint cannot be used; one line says why, and what to do."""


def some(names: Sequence[str]) -> str:
    """Shorten a list of names for people to the first three."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def raw_type(dtype: str) -> np.dtype[Any]:
    """Return the numpy type that moves elements of this type. Raises BadCheckpoint for an unknown type."""
    if dtype not in RAW:
        raise BadCheckpoint(f"tensors of {dtype} are not supported: convert them first")
    return np.dtype(RAW[dtype])


@dataclass(slots=True)  # not frozen, which takes four times as long: a large model has hundreds of thousands of these
class Raw:
    """The place of elements in a file, from byte `offset` on."""

    path: Path
    offset: int
    dtype: str
    shape: Place
    strides: Place | None = None
    """In elements; None for row-major."""
    crc: int | None = None
    """The CRC-32 of just these bytes, if the file has one."""

    def __call__(self) -> Raw:
        """Return itself, so that it can be the `find` of a block."""
        return self

    def array(self) -> Array:
        """Read the elements. Raises BadCheckpoint, OSError."""
        return self.part(tuple(slice(0, extent) for extent in self.shape))

    def part(self, its: Slices) -> Array:
        """Read some of the elements, and few bytes beside them. Raises BadCheckpoint, OSError."""
        kind, count = raw_type(self.dtype), math.prod(self.shape)
        strides = self.strides or row_major(self.shape)
        check_shape(str(self.path), self.shape)
        if not count:
            return np.empty([each.stop - each.start for each in its], kind)
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, strides, strict=True))
        if self.offset < 0 or min(strides, default=0) < 0:
            raise BadCheckpoint(f"{self.path}: one of its tensors begins before its bytes")
        with open_plain(self.path) as file:
            if self.path.stat().st_size < (end := self.offset + (last + 1) * kind.itemsize):
                raise BadCheckpoint(f"{self.path} is cut off: it ends before byte {end}")
            if self.strides is None:
                into = np.empty([each.stop - each.start for each in its], kind)
                self._fill(file, into, self.offset, self.shape, its)
                return into
            flat = np.empty(last + 1, kind)
            self._fill(file, flat, self.offset, flat.shape, (slice(0, last + 1),))
        return np.lib.stride_tricks.as_strided(flat, self.shape, [stride * kind.itemsize for stride in strides])[its]

    def check(self) -> None:
        """Read all of it, piece by piece. Raises BadCheckpoint if it does not match its checksum, OSError."""
        strides = self.strides or row_major(self.shape)
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, strides, strict=True))
        size = (last + 1) * raw_type(self.dtype).itemsize if all(self.shape) else 0
        found, known = 0, self.crc is not None and self.strides is None
        with open_plain(self.path) as file:
            for piece in pieces(file, self.path, self.offset, size):
                found = zlib.crc32(piece, found) if known else 0
        if known and found != self.crc:
            raise BadCheckpoint("the bytes do not match their checksum")

    def _fill(self, file: BinaryIO, into: Array, begin: int, shape: Place, its: Slices) -> None:
        """Read the part `its` of a row-major array of this shape that begins at this byte. Raises OSError."""
        row = math.prod(shape[1:]) * into.itemsize
        first, stop = (its[0].start, its[0].stop) if shape else (0, 1)
        whole = into.flags.c_contiguous and all(
            each == slice(0, extent) for each, extent in zip(its[1:], shape[1:], strict=True)
        )
        if whole:
            read_into(file, self.path, begin + first * row, into.reshape(-1).view(np.uint8).data)
        elif row > PIECE:
            for number in range(first, stop):
                self._fill(file, into[number - first], begin + number * row, shape[1:], its[1:])
        else:
            step = max(1, PIECE // row)
            for at in range(first, stop, step):
                rows = np.empty((min(step, stop - at), *shape[1:]), into.dtype)
                read_into(file, self.path, begin + at * row, rows.reshape(-1).view(np.uint8).data)
                into[at - first : at - first + len(rows)] = rows[(slice(None), *its[1:])]


def row_major(shape: Place) -> Place:
    """Return the strides of a contiguous array, in elements."""
    return tuple(math.prod(shape[number + 1 :]) for number in range(len(shape)))


def check_shape(name: str, shape: Sequence[Any]) -> None:
    """Raises BadCheckpoint for numbers that cannot be a tensor's shape or place."""
    sound = len(shape) <= MOST_AXES and all(type(each) is int and 0 <= each <= MOST_ELEMENTS for each in shape)
    if not sound or math.prod(shape) > MOST_ELEMENTS:
        raise BadCheckpoint(f"{name}: {str(list(shape[:8]))[:80]} is no shape of a tensor: it is damaged")


def check_name(name: str) -> None:
    """Raises BadCheckpoint for a name that would not fit into a line for people."""
    if len(name) > MOST_LETTERS or not name.isprintable():
        raise BadCheckpoint(f"{name[:60]!r} is no name of a tensor ({len(name)} letters): it is damaged")


PRIME = (1 << 61) - 1
_weights = random.Random(secrets.token_bytes(32))  # unpredictable; asking the system for each number takes long


def tiles(shape: Place, boxes: Iterable[tuple[Place, Place]]) -> bool:
    """Whether the boxes are a partition of a tensor of this shape: each element is in just one of them.

    Each place on each axis gets a random weight, and a box the product of the differences over its axes. The weights of
    the boxes of a partition always add up to the weight of the whole. Those of other boxes do so once in 2**50 times.
    """
    weights: list[defaultdict[int, int]] = [defaultdict(lambda: _weights.getrandbits(61)) for _ in shape]

    def weight(offset: Place, extent: Place) -> int:
        axes = zip(weights, offset, extent, strict=True)
        return math.prod(axis[at + size] - axis[at] for axis, at, size in axes) % PRIME

    return (sum(weight(*box) for box in boxes) - weight((0,) * len(shape), shape)) % PRIME == 0


@dataclass(slots=True)
class Block:
    """Elements [begin, end), in row-major order, of the box of this offset and extent in a whole tensor."""

    offset: Place
    extent: Place
    begin: int
    end: int
    find: Callable[[], Raw] | None
    """Returns the place of the elements, in any strides if the block is whole; None for zeros."""

    @property
    def box(self) -> tuple[Place, Place]:
        return self.offset, self.extent

    @property
    def whole(self) -> bool:
        return self.begin == 0 and self.end == math.prod(self.extent)

    def array(self, dtype: str, its: Slices | None = None) -> Array:
        """Read the elements, or some of them: in the shape of the box for a whole block, otherwise flat. Raises
        BadCheckpoint, OSError."""
        shape = self.extent if self.whole else (self.end - self.begin,)
        wanted = tuple(slice(0, extent) for extent in shape) if its is None else its
        raw = self.raw(dtype)
        if raw is None:
            return np.zeros([each.stop - each.start for each in wanted], raw_type(dtype))
        if raw.strides is None:
            return replace(raw, shape=shape).part(wanted)
        return raw.array().reshape(shape)[wanted]

    def raw(self, dtype: str) -> Raw | None:
        """Return the place of the elements, None for zeros. Raises BadCheckpoint, OSError."""
        if self.find is None:
            return None
        try:
            raw = self.find()
        except (BadCheckpoint, OSError):
            raise
        except DAMAGE as error:
            raise BadCheckpoint(f"a file of it is damaged ({type(error).__name__}: {error})") from None
        if raw.dtype != dtype or math.prod(raw.shape) != self.end - self.begin:
            raise BadCheckpoint(f"{raw.path} does not hold what its index says")
        return raw

    @classmethod
    def of(cls, offset: Place, extent: Place, find: Callable[[], Raw] | None) -> Block:
        """Make a whole block."""
        return cls(offset, extent, 0, math.prod(extent), find)


@dataclass(slots=True)
class Tensor:
    """A whole tensor."""

    name: str
    shape: Place
    dtype: str
    blocks: list[Block]
    check: Callable[[Array, Place, Place], None] | None = None
    """Checks each part that is read: elements, offset and extent. Raises BadCheckpoint for those of another tensor."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * raw_type(self.dtype).itemsize

    def boxes(self) -> list[tuple[Place, Place]]:
        """Return the boxes of its blocks if they make up the whole, otherwise one box for the whole."""
        found = list(dict.fromkeys(block.box for block in self.blocks))
        return found if tiles(self.shape, found) else [((0,) * len(self.shape), self.shape)]

    def check_blocks(self) -> None:
        """Raises BadCheckpoint unless its blocks are a partition: some elements would be there twice or not at all."""
        check_shape(self.name, self.shape)
        first = self.blocks[0] if len(self.blocks) == 1 else None
        if first is not None and first.whole and first.box == ((0,) * len(self.shape), self.shape):
            return
        boxes: dict[tuple[Place, Place], list[Block]] = {}
        for block in self.blocks:
            boxes.setdefault(block.box, []).append(block)
        for numbers in (numbers for box in boxes for numbers in box):
            check_shape(self.name, numbers)
            if len(numbers) != len(self.shape):
                raise BadCheckpoint(f"{self.name}: a part of it has another number of axes: it is damaged")
        if not tiles(self.shape, boxes):
            raise BadCheckpoint(
                f"{self.name}: its parts are no partition of it: some of its {math.prod(self.shape)} elements are in "
                "no file, or in two"
            )
        for (_, extent), blocks in boxes.items():
            reached = 0
            for block in sorted(blocks, key=lambda block: (block.begin, -block.end)):
                if not 0 <= block.begin <= reached:
                    break
                reached = max(reached, block.end)
            if reached != math.prod(extent):
                raise BadCheckpoint(f"{self.name}: elements from {reached} on of a block are in no file")

    def read(self, offset: Place | None = None, extent: Place | None = None) -> Array:
        """Read the elements of a part, by default the whole. Raises BadCheckpoint if some are in no block, in two, or
        of another tensor, OSError."""
        offset, extent = offset or (0,) * len(self.shape), self.shape if extent is None else extent
        found = self._read(offset, extent)
        if self.check is not None:
            self.check(found, offset, extent)
        return found

    def _read(self, offset: Place, extent: Place) -> Array:
        groups: dict[tuple[Place, Place], list[Block]] = {}
        for block in self.blocks:
            if overlap(block.box, (offset, extent)) is not None:
                groups.setdefault(block.box, []).append(block)
        if (offset, extent) in groups:
            return self._join(groups[offset, extent])
        places = {box: overlap((offset, extent), box) or ((), ()) for box in groups}
        if not tiles(extent, [box_of(mine) for mine, _ in places.values()]):
            raise BadCheckpoint(f"{self.name}: some of its {math.prod(self.shape)} elements are in no file, or in two")
        into = np.empty(extent, raw_type(self.dtype))
        for box, (mine, its) in places.items():
            blocks = groups[box]
            whole = next((block for block in blocks if block.whole), None)
            into[mine] = whole.array(self.dtype, its) if whole is not None else self._join(blocks)[its]
        return into

    def _join(self, blocks: Sequence[Block]) -> Array:
        """Assemble the elements of a box from ranges of it."""
        ranges = sorted(blocks, key=lambda block: (block.begin, -block.end))
        if ranges[0].whole:
            return ranges[0].array(self.dtype)
        flat, reached = np.empty(math.prod(ranges[0].extent), raw_type(self.dtype)), 0
        for block in ranges:
            if block.begin > reached:
                break
            if block.end > reached:
                flat[reached : block.end] = block.array(self.dtype)[reached - block.begin :]
                reached = block.end
        if reached != flat.size:
            raise BadCheckpoint(f"{self.name}: elements from {reached} on of a block are in no file")
        return flat.reshape(ranges[0].extent)


def in_pieces(offset: Place, extent: Place, most: int) -> Iterator[tuple[Place, Place]]:
    """Cut a box into parts of at most so many elements, in row-major order."""
    if not extent or math.prod(extent) <= most:
        yield offset, extent
    elif (row := math.prod(extent[1:])) > most:
        for number in range(extent[0]):
            for begin, size in in_pieces(offset[1:], extent[1:], most):
                yield (offset[0] + number, *begin), (1, *size)
    else:
        step = max(1, most // row)
        for number in range(0, extent[0], step):
            yield (offset[0] + number, *offset[1:]), (min(step, extent[0] - number), *extent[1:])


def box_of(part: Slices) -> tuple[Place, Place]:
    """Return the offset and extent of slices."""
    return tuple(each.start for each in part), tuple(each.stop - each.start for each in part)


def overlap(one: tuple[Place, Place], other: tuple[Place, Place]) -> tuple[Slices, Slices] | None:
    """Return the intersection of two boxes as slices of each, None if it is empty."""
    mine, its = [], []
    for at, size, there, extent in zip(*one, *other, strict=True):
        begin, end = max(at, there), min(at + size, there + extent)
        if begin >= end:
            return None
        mine.append(slice(begin - at, end - at))
        its.append(slice(begin - there, end - there))
    return tuple(mine), tuple(its)


def group_steps(groups: Iterable[PlainValues]) -> list[int | float]:
    """List the counts of steps in the settings of an optimizer's groups."""
    return [step for group in groups if isinstance(step := group.get("step"), int | float)]


@dataclass
class Common:
    """The part of a checkpoint that is not a tensor, as plain values."""

    groups: list[PlainValues] = field(default_factory=list)
    """The settings of the optimizer's groups of parameters."""
    step: float | None = None
    """The optimizer's count of steps."""
    schedule: PlainValues | None = None
    """The state of the learning-rate schedule."""
    scales: list[PlainValues] = field(default_factory=list)
    """The states of gradient scalers."""
    seed: int = 0
    loss: float | None = None
    facts: ModelFacts = field(default_factory=ModelFacts)
    unread: str = ""
    """Why the optimizer's state could not be read; "" if it was, or there is none."""
    left: list[str] = field(default_factory=list)
    """Everything else in the checkpoint that is not in the index."""
    doubt: str = ""
    """A question that the files leave open; "" if they leave none."""

    def losses(self) -> list[str]:
        """Describe everything that is not in the index, in lines for people."""
        found = [f"the optimizer's state is left out: {self.unread}"] if self.unread else []
        found += [self.doubt] if self.doubt else []
        return found + ([f"left out, for nothing here reads it: {some(self.left)}"] if self.left else [])


@dataclass
class Index:
    """A checkpoint."""

    format: str
    """The name that `unicronctl checkpoint show` prints."""
    iteration: int
    """The iteration to go on with."""
    layout: str
    """The layout of the ranks that wrote it, "" if unknown."""
    tensors: dict[str, Tensor]
    common: Common = field(default_factory=Common)
    others: dict[str, PlainValues] = field(default_factory=dict)
    """Name of a tensor -> the plain values that the optimizer has for it."""
    ties: dict[str, str] = field(default_factory=dict)
    """Further name of a tied tensor -> its name in the index."""
    members: list[list[str]] = field(default_factory=list)
    """The tensors of each of the optimizer's groups; empty if unknown."""

    def add(self, name: str, shape: Sequence[int], dtype: str, block: Block) -> None:
        """Add a block of a tensor. Raises BadCheckpoint if another block has another shape or type for the tensor."""
        check_name(name)
        found = self.tensors.setdefault(name, Tensor(name, tuple(shape), dtype, []))
        if (found.shape, found.dtype) != (tuple(shape), dtype):
            raise BadCheckpoint(
                f"{name} is {list(found.shape)} {found.dtype} in one file and {list(shape)} {dtype} in another"
            )
        found.blocks.append(block)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the model's tensors."""
        return (tensor for name, tensor in self.tensors.items() if not name.startswith(STATE))

    def states(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's tensors for one of the model's, by key, main parameters included."""
        if not hasattr(self, "_found"):
            self._found: dict[str, dict[str, Tensor]] = {}
            for full, tensor in self.tensors.items():
                if full.startswith(STATE):
                    key, _, parameter = full.removeprefix(STATE).partition(".")
                    self._found.setdefault(parameter, {})[key] = tensor
        return self._found.get(name, {})

    def main(self, name: str) -> Tensor:
        """Return the main parameter for one of the model's tensors, in the precision that the optimizer steps."""
        states = self.states(name)
        return next((states[key] for key in MAINS if key in states), self.tensors[name])

    def has_optimizer(self) -> bool:
        """Whether there is an optimizer. Some have no state of any parameter, but a learning rate."""
        return bool(self.common.groups or self.others) or any(name.startswith(STATE) for name in self.tensors)

    def without_optimizer(self, why: str) -> None:
        """Remove the optimizer's state, which cannot be read, and note the reason."""
        self.tensors = {tensor.name: tensor for tensor in self.parameters()}
        self.others, self.common.groups, self.common.step, self.common.unread = {}, [], None, why
