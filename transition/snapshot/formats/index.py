"""The index of a checkpoint: which tensors there are, of which blocks each is made, and where the bytes of a block lie.

An index is made without reading a tensor. A block's bytes are mapped when they are asked for, so whoever goes through a
checkpoint block by block needs memory for one of them only. bfloat16 and whatever else numpy does not have are moved
as unsigned integers of the same size.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
PARAMETER = "parameter"  # of a tensor, what the optimizer steps; its other keys are the optimizer's own
STATE = "optimizer.state."  # how the name of an optimizer's tensor begins: `optimizer.state.KEY.NAME`, as Megatron's
MAINS = ("param", "fp32_param")  # the keys under which Megatron keeps main parameters
# dtype as torch calls it -> the numpy type that moves it
RAW = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "float4_e2m1fn_x2": "|u1",  # two elements in a byte, which count as one
    "complex32": "<u4",
}
# Megatron's names: how those of the layers begin, and the embedding and the output layer, whose last rows are padding.
LAYERS = "decoder.layers."
VOCABULARY = EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
Place = tuple[int, ...]
# What readers raise where the bytes are not what they were written as.
DAMAGE = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, EOFError, MemoryError),
    BadZipFile,
)


class BadCheckpoint(ValueError):
    """A folder is no checkpoint that can be used; one line says why, and what to do."""


def some(names: Sequence[str]) -> str:
    """The first three of many names, for people."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def raw_type(dtype: str) -> np.dtype[Any]:
    """The numpy type that moves elements of this dtype. Raises BadCheckpoint for one that nobody knows."""
    if dtype not in RAW:
        raise BadCheckpoint(f"tensors of {dtype} are not supported: convert them first")
    return np.dtype(RAW[dtype])


@dataclass(frozen=True)
class Raw:
    """Where elements lie in a file: from byte `offset` on, of this shape; strides in elements, None for row-major. crc:
    the checksum (CRC-32) of these very bytes, where the file has one."""

    path: Path
    offset: int
    dtype: str
    shape: Place
    strides: Place | None = None
    crc: int | None = None

    def array(self) -> Array:
        """The elements, mapped; the mapping is released with the last reference. Raises BadCheckpoint where the file is
        shorter, OSError."""
        kind, count = raw_type(self.dtype), math.prod(self.shape)
        if not count:
            return np.empty(self.shape, kind)
        strides = self.strides or row_major(self.shape)
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, strides, strict=True))
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        end = self.offset + (last + 1) * kind.itemsize
        with self.path.open("rb") as file:
            if self.path.stat().st_size < end:
                raise BadCheckpoint(f"{self.path} is cut off: it ends before byte {end}")
            mapped = mmap.mmap(file.fileno(), end - begin, access=mmap.ACCESS_COPY, offset=begin)
        flat: Array = np.frombuffer(mapped, kind, last + 1, self.offset - begin)
        if self.strides is None:
            return flat.reshape(self.shape)
        return np.lib.stride_tricks.as_strided(flat, self.shape, [stride * kind.itemsize for stride in strides])


def row_major(shape: Place) -> Place:
    """The strides of a contiguous array, in elements."""
    return tuple(math.prod(shape[number + 1 :]) for number in range(len(shape)))


@dataclass(frozen=True)
class Block:
    """Elements [begin, end), in row-major order, of the block of this offset and extent in a whole tensor. find: says
    where they lie; None for zeros. A block that is whole may lie there in any strides."""

    offset: Place
    extent: Place
    begin: int
    end: int
    find: Callable[[], Raw] | None

    @property
    def box(self) -> tuple[Place, Place]:
        return self.offset, self.extent

    @property
    def whole(self) -> bool:
        return self.begin == 0 and self.end == math.prod(self.extent)

    def array(self, dtype: str) -> Array:
        """The elements: of the extent's shape for a whole block, else flat. Raises BadCheckpoint, OSError."""
        shape = self.extent if self.whole else (self.end - self.begin,)
        if self.find is None:
            return np.zeros(shape, raw_type(dtype))
        try:
            raw = self.find()
        except (BadCheckpoint, OSError):
            raise
        except DAMAGE as error:
            raise BadCheckpoint(f"a file of it is damaged ({type(error).__name__}: {error})") from None
        if raw.dtype != dtype or math.prod(raw.shape) != math.prod(shape):
            raise BadCheckpoint(f"{raw.path} does not hold what its index says")
        return raw.array().reshape(shape)

    @classmethod
    def of(cls, offset: Place, extent: Place, find: Callable[[], Raw] | None) -> Block:
        """A whole one."""
        return cls(offset, extent, 0, math.prod(extent), find)


@dataclass
class Tensor:
    """A whole tensor. check: is called with each part of it that is read, and its offset and extent; it raises
    BadCheckpoint for elements that are not this tensor's."""

    name: str
    shape: Place
    dtype: str
    blocks: list[Block]
    check: Callable[[Array, Place, Place], None] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * raw_type(self.dtype).itemsize

    def boxes(self) -> list[tuple[Place, Place]]:
        """The places of its blocks, each once, where they make up the whole; else the whole as one."""
        found = list(dict.fromkeys(block.box for block in self.blocks))
        if sum(math.prod(extent) for _, extent in found) != math.prod(self.shape):
            return [((0,) * len(self.shape), self.shape)]
        return found

    def read(self, offset: Place | None = None, extent: Place | None = None) -> Array:
        """The elements of a part of it, the whole by default. They may be a mapping of the file, which is read-only.
        Raises BadCheckpoint where some are in no block or are not this tensor's, OSError."""
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
            return self._joined(groups[offset, extent])
        into = np.empty(extent, raw_type(self.dtype))
        missing = np.ones(extent, bool) if len(groups) > 1 and self._overlapping(list(groups)) else None
        covered = 0
        for box, blocks in groups.items():
            mine, its = overlap((offset, extent), box) or ((), ())
            into[mine] = self._joined(blocks)[its]
            covered += into[mine].size
            if missing is not None:
                missing[mine] = False
        if bool(missing.any()) if missing is not None else covered != into.size:
            raise BadCheckpoint(f"{self.name}: some of its {math.prod(self.shape)} elements are in no file")
        return into

    @staticmethod
    def _overlapping(boxes: list[tuple[Place, Place]]) -> bool:
        return len(boxes) < 64 and any(
            overlap(one, other) for number, one in enumerate(boxes) for other in boxes[number + 1 :]
        )

    def _joined(self, blocks: Sequence[Block]) -> Array:
        """One block, from ranges of it."""
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


def overlap(one: tuple[Place, Place], other: tuple[Place, Place]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two boxes have in common, as slices of each; None for nothing."""
    mine, its = [], []
    for at, size, there, extent in zip(*one, *other, strict=True):
        begin, end = max(at, there), min(at + size, there + extent)
        if begin >= end:
            return None
        mine.append(slice(begin - at, end - at))
        its.append(slice(begin - there, end - there))
    return tuple(mine), tuple(its)


@dataclass
class Common:
    """What is no tensor, as plain values. groups: settings of the optimizer's groups of parameters. step: its count of
    steps, None where it has none. schedule: the state of the learning rate's schedule. scales: of gradient scalers.
    facts: about the model, see `snapshot.contents.facts`. args: Megatron-LM's arguments. unread: why the optimizer's
    state is not in the index though there is one, "" otherwise. left: what else is there and is not in the
    index. doubt: what its files do not say, "" for nothing."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    step: float | None = None
    schedule: dict[str, Any] | None = None
    scales: list[dict[str, Any]] = field(default_factory=list)
    seed: int = 0
    loss: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    unread: str = ""
    left: list[str] = field(default_factory=list)
    doubt: str = ""

    def lost(self) -> list[str]:
        """What is not in the index, in lines for people."""
        found = [f"the optimizer's state is left out: {self.unread}"] if self.unread else []
        found += [self.doubt] if self.doubt else []
        return found + ([f"left out, for nothing here reads it: {some(self.left)}"] if self.left else [])


@dataclass
class Index:
    """A checkpoint. format: as `unicronctl checkpoint show` calls it; iteration: the one to go on with; layout: of the
    ranks that wrote it, "" where that is not known. others: what the optimizer has for a tensor of the model that is no
    tensor, by the tensor's name and by key."""

    format: str
    iteration: int
    layout: str
    tensors: dict[str, Tensor]
    common: Common = field(default_factory=Common)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, shape: Sequence[int], dtype: str, block: Block) -> None:
        """One more block of the tensor of this name. Raises BadCheckpoint where others say something else of it."""
        found = self.tensors.setdefault(name, Tensor(name, tuple(shape), dtype, []))
        if (found.shape, found.dtype) != (tuple(shape), dtype):
            raise BadCheckpoint(
                f"{name} is {list(found.shape)} {found.dtype} in one file and {list(shape)} {dtype} in another"
            )
        found.blocks.append(block)

    def parameters(self) -> Iterator[Tensor]:
        """The model's tensors."""
        return (tensor for name, tensor in self.tensors.items() if not name.startswith(STATE))

    def states(self, name: str) -> dict[str, Tensor]:
        """What the optimizer has for the model's tensor of this name, by key, main parameters included."""
        return self._by_parameter().get(name, {})

    def _by_parameter(self) -> dict[str, dict[str, Tensor]]:
        if not hasattr(self, "_found"):
            self._found: dict[str, dict[str, Tensor]] = {}
            for name, tensor in self.tensors.items():
                if name.startswith(STATE):
                    key, _, parameter = name.removeprefix(STATE).partition(".")
                    self._found.setdefault(parameter, {})[key] = tensor
        return self._found

    def main(self, name: str) -> Tensor:
        """The main parameter of the model's tensor of this name: in the precision in which it is stepped."""
        states = self.states(name)
        return next((states[key] for key in MAINS if key in states), self.tensors[name])

    def has_optimizer(self) -> bool:
        """Whether there is anything of an optimizer: some have no state of any parameter, but a learning rate."""
        return bool(self.common.groups or self.others) or any(name.startswith(STATE) for name in self.tensors)

    def without_optimizer(self, why: str) -> None:
        """Leave the optimizer's state out; it cannot be read."""
        self.tensors = {tensor.name: tensor for tensor in self.parameters()}
        self.others, self.common.groups, self.common.step, self.common.unread = {}, [], None, why
