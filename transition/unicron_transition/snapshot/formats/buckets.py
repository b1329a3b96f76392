"""Finds each parameter's state in a distributed optimizer of Megatron's that was saved by buckets (`dp_reshardable`).

Each model-parallel rank has a buffer for each chunk of its model. A buffer holds the chunk's parameters, the last one
first, each at a multiple of 64 elements, and is cut into buckets. The checkpoint has a flat tensor for each bucket and
kind of state, without the names of parameters. Their order is assumed to be that of Megatron's modules, and proven
twice: every parameter must begin and end where chunks of the flat tensors do, and main parameters, rounded to the
model's precision, must be the model's own bit for bit wherever they are read (`prove`).
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from unicron_transition.snapshot.formats.index import (
    EMBEDDING,
    LAYERS,
    MAINS,
    OUTPUT,
    STATE,
    Array,
    BadCheckpoint,
    Block,
    Index,
    Place,
    Raw,
    Tensor,
    raw_type,
)
from unicron_transition.snapshot.formats.written import cast

PREFIX = "optimizer.distributed."
NAME = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\([^)]*\)\.bucket_idx_(\d+)\.(\w+)"
)
ALIGN = 64  # elements
PROOF_ELEMENTS = 1 << 20  # compared at once
INSTEAD = "save it once with --dist-ckpt-optim-fully-reshardable"
# Parameters in the order in which Megatron's modules register them.
BEFORE = (EMBEDDING, "embedding.position_embeddings.weight")
AFTER = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", OUTPUT, "output_layer.bias")
_PROJECTION = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
_NORM = ("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias")
_FIRST = ("input_layernorm.weight", "input_layernorm.bias")
_REST = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.q_layernorm.bias",
    "self_attention.k_layernorm.weight",
    "self_attention.k_layernorm.bias",
    "pre_mlp_layernorm.weight",
    "pre_mlp_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
)
# In a layer, the attention's norm is a module of its own, or part of Transformer Engine's linear layer after it.
ORDERS = ((*_FIRST, *_NORM, *_PROJECTION, *_REST), (*_FIRST, *_PROJECTION, *_NORM, *_REST))
Box = tuple[Place, Place]


class _Unfit(Exception):
    """The parameters do not fit into the buckets in this order."""


@dataclass(frozen=True)
class _Parameter:
    """A parameter of one model-parallel rank."""

    tensor: Tensor
    boxes: Sequence[Box]
    """Its places in the whole tensor, in order."""
    kept: bool = True
    """Its state is read here, not from another rank that has it too."""

    @property
    def numel(self) -> int:
        return sum(math.prod(extent) for _, extent in self.boxes)


@dataclass
class _Bucket:
    """One bucket: its flat tensors, by kind of state."""

    kinds: dict[str, Tensor] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return self._any.shape[0]

    @property
    def _any(self) -> Tensor:
        return next(iter(self.kinds.values()))

    def edges(self) -> set[int]:
        """Return the places at which its chunks begin and end."""
        return {edge for block in self._any.blocks for edge in (block.offset[0], block.offset[0] + block.extent[0])}


Buffers = Mapping[tuple[int, int], Sequence[_Bucket]]  # (model-parallel rank, chunk of the model) -> its buckets


# ------------------------------------------------------------ the buckets
def unpack(index: Index, tensors: Sequence[Tensor], tensor_size: int) -> None:
    """Add the state in these flat tensors to the index, by parameter. tensor_size: of tensor parallelism.

    Raises BadCheckpoint if the places of the parameters cannot be proven; then nothing is added.
    """
    buffers = _buffers(tensors)
    ranks = len({rank for rank, _ in buffers})
    every = set(itertools.product(range(ranks), range(len({chunk for _, chunk in buffers}))))
    if tensor_size < 1 or ranks % tensor_size or set(buffers) != every:
        raise BadCheckpoint(
            f"its optimizer's buckets are of {ranks} ranks, which its arguments do not explain: {INSTEAD}"
        )
    for order in ORDERS:
        try:
            found = _Model(index, order, tensor_size, ranks // tensor_size).states(buffers)
        except _Unfit:
            continue
        index.tensors |= found
        return
    raise BadCheckpoint(
        f"its distributed optimizer has buckets (dp_reshardable) that are not those of its model: {INSTEAD}"
    )


def _buffers(tensors: Sequence[Tensor]) -> Buffers:
    found: dict[tuple[int, int], dict[int, _Bucket]] = {}
    for tensor in tensors:
        match = NAME.fullmatch(tensor.name)
        if match is None or len(tensor.shape) != 1:
            raise BadCheckpoint(f"its distributed optimizer has {tensor.name}, which is not known: {INSTEAD}")
        rank, chunk, number = (int(each) for each in match.groups()[:3])
        found.setdefault((rank, chunk), {}).setdefault(number, _Bucket()).kinds[match[4]] = tensor
    kinds = {frozenset(bucket.kinds) for buckets in found.values() for bucket in buckets.values()}
    if len(kinds) != 1 or MAINS[0] not in next(iter(kinds)):
        raise BadCheckpoint(f"its distributed optimizer has no main parameters in some buckets: {INSTEAD}")
    for buckets in found.values():
        if sorted(buckets) != list(range(len(buckets))):
            raise BadCheckpoint(f"its distributed optimizer lacks buckets: {INSTEAD}")
        for bucket in buckets.values():
            if len({tensor.shape for tensor in bucket.kinds.values()}) != 1:
                raise BadCheckpoint(f"its distributed optimizer has buckets of several sizes: {INSTEAD}")
    return {place: [buckets[number] for number in range(len(buckets))] for place, buckets in found.items()}


# ------------------------------------------------------------ the parameters in them
class _Model:
    """The parameters of every rank. Raises BadCheckpoint for parameters whose order is unknown."""

    def __init__(self, index: Index, order: Sequence[str], tensor: int, pipeline: int):
        self._tensors = {each.name: each for each in index.parameters()}
        self._layered = [LAYERS + name for name in order if LAYERS + name in self._tensors]
        self._before = [name for name in BEFORE if name in self._tensors]
        self._after = [name for name in AFTER if name in self._tensors]
        known = {*self._layered, *self._before, *self._after}
        unknown = next((name for name in self._tensors if name not in known), None)
        if unknown is not None:
            raise BadCheckpoint(
                f"the place of {unknown} in its distributed optimizer's buckets (dp_reshardable) is unknown: {INSTEAD}"
            )
        self._tensor, self._pipeline = tensor, pipeline  # sizes of tensor and pipeline parallelism
        counts = {self._tensors[name].shape[0] for name in self._layered}
        if len(counts) > 1:
            raise _Unfit
        self._layers = next(iter(counts), 0)
        self._boxes = {name: self._by_layer(name) for name in known}

    def _by_layer(self, name: str) -> dict[int, list[Box]]:
        """Return the boxes of a tensor in order, by layer."""
        found: dict[int, list[Box]] = {}
        for box in sorted(self._tensors[name].boxes()):
            layer = box[0][0] if name in self._layered else 0
            if name in self._layered and box[1][0] != 1:
                raise _Unfit
            found.setdefault(layer, []).append(box)
        return found

    def _parameter(self, name: str, rank: int, layer: int = 0, kept: bool = True) -> _Parameter:
        """Return a tensor-parallel rank's parameter: the whole, or its boxes, of which a gated layer has two."""
        boxes = self._boxes[name].get(layer, [])
        if len(boxes) == 1:
            return _Parameter(self._tensors[name], boxes, kept and rank == 0)
        if not boxes or len(boxes) % self._tensor:
            raise _Unfit
        return _Parameter(self._tensors[name], boxes[rank :: self._tensor], kept)

    def _chunk(self, rank: int, begin: int, end: int, first: bool, last: bool) -> list[_Parameter]:
        """List the parameters of a chunk with the layers [begin, end), in the order of its modules."""
        found = [self._parameter(name, rank) for name in self._before] if first else []
        found += [self._parameter(name, rank, layer) for layer in range(begin, end) for name in self._layered]
        found += [self._parameter(name, rank) for name in self._after] if last else []
        if last and not first and OUTPUT not in self._tensors:  # the last stage has the tied embedding too
            found.append(self._parameter(EMBEDDING, rank, kept=False))
        return found

    def states(self, buffers: Buffers) -> dict[str, Tensor]:
        """Return the optimizer's tensors by name."""
        found: dict[str, Tensor] = {}
        chunks = len(buffers) // (self._tensor * self._pipeline)
        begin = 0
        for number in range(chunks * self._pipeline):  # in the order of their layers
            chunk, stage = divmod(number, self._pipeline)
            first, last = number == 0, number == chunks * self._pipeline - 1
            left = chunks * self._pipeline - number
            end = self._end(buffers[stage * self._tensor, chunk], begin, left, first, last)
            for rank in range(self._tensor):
                buckets = buffers[stage * self._tensor + rank, chunk]
                for parameter, bucket, at in _places(self._chunk(rank, begin, end, first, last), buckets):
                    if parameter.kept:
                        _add(found, parameter, bucket, at)
            begin = end
        if begin != self._layers:
            raise _Unfit
        return found

    def _end(self, buckets: Sequence[_Bucket], begin: int, left: int, first: bool, last: bool) -> int:
        """Return the layer at which the chunk from `begin` on ends: the one with which its buckets are full."""
        likely = begin + -(-(self._layers - begin) // left)
        ends = [self._layers] if last else sorted(range(begin, self._layers + 1), key=lambda end: abs(end - likely))
        for end in ends:
            try:
                _places(self._chunk(0, begin, end, first, last), buckets)
            except _Unfit:
                continue
            return end
        raise _Unfit


def _places(parameters: Sequence[_Parameter], buckets: Sequence[_Bucket]) -> list[tuple[_Parameter, _Bucket, int]]:
    """Find the bucket and the place of each parameter. Raises _Unfit if a bucket has room left."""
    sizes = [bucket.numel for bucket in buckets]
    found: list[tuple[_Parameter, _Bucket, int]] = []
    number = at = 0
    for parameter in reversed(parameters):
        if at and sizes[number] in (at, align(at)):
            number, at = number + 1, 0
        at = align(at)
        if number == len(sizes) or at + parameter.numel > sizes[number]:
            raise _Unfit
        found.append((parameter, buckets[number], at))
        at += parameter.numel
    if number != len(sizes) - 1 or at != sizes[number]:
        raise _Unfit
    edges = {id(bucket): bucket.edges() for bucket in buckets}
    if not all({begin, begin + each.numel} <= edges[id(bucket)] for each, bucket, begin in found):
        raise _Unfit
    return found


def align(at: int) -> int:
    """Return the place of the next parameter in a bucket that is filled up to `at`."""
    return -(-at // ALIGN) * ALIGN


# ------------------------------------------------------------ their state
def _add(found: dict[str, Tensor], parameter: _Parameter, bucket: _Bucket, at: int) -> None:
    whole = parameter.tensor
    for key, flat in bucket.kinds.items():
        name = f"{STATE}{key}.{whole.name}"
        check = partial(prove, whole, flat.dtype) if key in MAINS else None
        tensor = found.setdefault(name, Tensor(name, whole.shape, flat.dtype, [], check))
        begin = at
        for box in parameter.boxes:
            tensor.blocks += _blocks(flat, begin, box)
            begin += math.prod(box[1])


def _blocks(flat: Tensor, start: int, box: Box) -> Iterator[Block]:
    """Yield the parts of a box whose elements begin at `start` in the flat tensor."""
    flat.blocks.sort(key=lambda block: block.offset)
    end = start + math.prod(box[1])
    for chunk in flat.blocks[bisect.bisect_right(flat.blocks, start, key=lambda block: block.offset[0]) - 1 :]:
        at = chunk.offset[0]
        if at >= end:
            return
        low, high = max(start, at), min(end, at + chunk.extent[0])
        if low < high:
            yield Block(*box, low - start, high - start, partial(_cut, chunk, low - at, high - low))


def _cut(chunk: Block, begin: int, count: int) -> Raw:
    """Return the place of some elements of a chunk. Raises BadCheckpoint, OSError."""
    assert chunk.find is not None
    raw = chunk.find()
    if raw.strides is not None or raw.shape != chunk.extent:
        raise BadCheckpoint(f"{raw.path} does not hold what its index says")
    size = raw_type(raw.dtype).itemsize
    crc = raw.crc if (count,) == raw.shape else None
    return Raw(raw.path, raw.offset + begin * size, raw.dtype, (count,), None, crc)


# ------------------------------------------------------------ whether main parameters are those of the model
def prove(whole: Tensor, dtype: str, found: Array, offset: Place, extent: Place) -> None:
    """Raises BadCheckpoint unless these main parameters, rounded, are the model's parameters in that place; OSError."""
    flat, its = found.reshape(-1), whole.read(offset, extent).reshape(-1)
    for begin in range(0, flat.size, PROOF_ELEMENTS):
        piece = slice(begin, begin + PROOF_ELEMENTS)
        if not np.array_equal(_bits(cast(flat[piece], dtype, whole.dtype)), _bits(its[piece])):
            raise BadCheckpoint(
                f"{whole.name}: what its optimizer has in this place, rounded, is not the model's parameter: give "
                '--no-load-optim (begin_with="model"), or save it once with --ckpt-format torch_dist '
                "--dist-ckpt-optim-fully-reshardable"
            )


def _bits(array: Array) -> Array:
    """Return elements as bytes, so that zeros of both signs differ and NaNs can be equal."""
    return np.ascontiguousarray(array).view(np.uint8)
