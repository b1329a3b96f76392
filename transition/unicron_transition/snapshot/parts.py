"""The parts of the whole model and its optimizer's state that a rank holds, by each tensor's name and the place in it.

Megatron's `sharded_state_dict` has both for each parameter: tensor ranks hold a slice, pipeline stages hold some of the
layers, which are stacked under one name. The distributed optimizer gives each data-parallel rank a range of it. A
distributed tensor of torch's knows its place itself. So ranks of any other layout find what they need in these parts
(`unicron_transition/snapshot/checkpoint.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from unicron_transition.seams import dtensors, elastic_buckets
from unicron_transition.seams.dtensors import local
from unicron_transition.snapshot.formats import names
from unicron_transition.snapshot.formats.index import box_of, overlap, tiles
from unicron_transition.snapshot.image_format import ALIGN

PARAMETER = "parameter"
HUGE = 2 << 20  # bytes of a huge page
CHUNK = 64 << 20  # bytes that are taken from the kernel at once; what is not used takes no memory
Room = Callable[[torch.dtype], torch.Tensor]  # returns the memory, flat, in which values of this type are wanted


class Box(NamedTuple):
    """A block of a whole tensor: the tensor's name and shape, the block's offset and extent."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The offset and extent in the whole tensor."""
        return self.offset, self.extent


@dataclass
class Part:
    """Elements [begin, end) of a box, in row-major order."""

    box: Box
    begin: int
    end: int
    parameter: Any
    """The model's own tensor."""
    first: int
    """The first of these elements in it."""
    tensors: dict[str, torch.Tensor]
    """The parameter and the optimizer's tensors, flat, by key."""
    others: dict[str, Any] = field(default_factory=dict)
    """Other values that the optimizer keeps for the parameter, such as a step count, by key."""
    duplicate: bool = False
    """Another rank of the replica holds the same, such as a tied embedding."""
    stepped: bool = True
    """The optimizer changes it."""


class Missing(ValueError):
    """Some elements are in none of the parts."""


# ------------------------------------------------------------ what there is in this rank
@dataclass
class _OptimizerPart:
    """The elements [begin, end) of a parameter that the optimizer of this rank has."""

    main: torch.Tensor
    begin: int
    end: int
    owner: Any  # torch's optimizer, None for what is not trained

    @property
    def here(self) -> torch.Tensor:
        """The elements in this rank, if others have more of the tensor."""
        return local(self.main).detach()


def parts(model: Sequence[Any], optimizer: Any) -> Iterator[Part]:
    """Yield the parts that this rank holds, in a fixed order. Their tensors are views if possible.

    A main parameter replaces the model's own. Raises Missing for a parameter whose place in the model is unknown.
    """
    held = _optimizer_parts(optimizer)
    for parameter, boxes, duplicate in places(model):
        own = held.get(id(parameter), _OptimizerPart(parameter, 0, local(parameter).numel(), None))
        if own.owner is None and parameter.requires_grad and is_sharded(optimizer):
            continue  # other ranks have it
        state = own.owner.state.get(own.main, {}) if own.owner is not None else {}
        tensors = {PARAMETER: own.here.reshape(-1)}
        tensors |= {key: local(value).reshape(-1) for key, value in sorted(state.items()) if _is_like(value, own.main)}
        others = {key: value for key, value in state.items() if not _is_like(value, own.main)}
        if cut := next((key for key, value in others.items() if dtensors.is_distributed(value)), ""):
            raise Missing(f"{boxes[0].name}: the optimizer's {cut} is cut otherwise than it: take another optimizer")
        first = 0
        for box in boxes:
            begin, end = max(own.begin, first), min(own.end, first + box.numel)
            if begin < end:
                cut = slice(begin - own.begin, end - own.begin)
                mine = {key: tensor[cut] for key, tensor in tensors.items()}
                yield Part(
                    box, begin - first, end - first, parameter, begin, mine, others, duplicate, own.owner is not None
                )
            first += box.numel


def _is_like(value: Any, main: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and value.shape == main.shape
        and dtensors.cut_alike(value, main)
    )


def _optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def is_sharded(optimizer: Any) -> bool:
    """Whether data-parallel ranks have different parts of its state."""
    return any(hasattr(each, "model_param_gbuf_map") for each in _optimizers(optimizer))


def _optimizer_parts(optimizer: Any) -> dict[int, _OptimizerPart]:
    """Return the optimizer's part of each parameter, by the id of the model's."""
    found: dict[int, _OptimizerPart] = {}
    for each in _optimizers(optimizer):
        inner = getattr(each, "optimizer", each)
        for parameter, main, begin, end in _mains(each, inner):
            found[id(parameter)] = _OptimizerPart(main, begin, end, inner)
    return found


def _mains(optimizer: Any, inner: Any) -> Iterator[tuple[Any, torch.Tensor, int, int]]:
    """Yield each of the model's parameters, the tensor that the optimizer steps for it, and its range in it."""
    if hasattr(optimizer, "model_param_gbuf_map"):
        for models, mains in (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ):
            for parameter, main in _pairs(models, mains):
                yield parameter, main, *elastic_buckets.own_range(optimizer, parameter)
    elif hasattr(optimizer, "float16_groups"):
        for parameter, main in _pairs(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
            yield parameter, main, 0, main.numel()
        for parameter in itertools.chain.from_iterable(optimizer.fp32_from_fp32_groups):
            yield parameter, parameter, 0, parameter.numel()
    else:
        for parameter in itertools.chain.from_iterable(group["params"] for group in inner.param_groups):
            yield parameter, parameter, 0, local(parameter).numel()


def _pairs(one: Iterable[Sequence[Any]], other: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    for first, second in zip(one, other, strict=True):
        yield from zip(first, second, strict=True)


def places(model: Sequence[Any]) -> Iterator[tuple[torch.Tensor, list[Box], bool]]:
    """Yield each parameter or persistent buffer, its boxes in order, and whether another rank of the replica has it."""
    for number, chunk in enumerate(model):
        module = getattr(chunk, "module", chunk)
        if hasattr(module, "sharded_state_dict"):
            yield from _megatron_places(module)
        else:
            seen: set[int] = set()  # a tied parameter has several names
            for name, tensor in module.state_dict(keep_vars=True).items():
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor, _boxes(f"{number}.{names.without_wrappers(name)}", tensor), dtensors.is_copy(tensor)


def _boxes(name: str, tensor: torch.Tensor) -> list[Box]:
    try:
        return [Box(name, tuple(tensor.shape), *block) for block in dtensors.blocks(tensor)]
    except dtensors.Uneven as error:
        raise Missing(f"{name} cannot be saved or loaded as it is sharded here: {error}") from None


def plain_names(model: Sequence[Any]) -> dict[str, str]:
    """Map every name of a plain module's tensors to the name of the tensor's box; empty for a Megatron module."""
    found = {}
    for number, chunk in enumerate(model):
        module = getattr(chunk, "module", chunk)
        if hasattr(module, "sharded_state_dict"):
            return {}
        first: dict[int, str] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            full = f"{number}.{names.without_wrappers(name)}"
            found[full] = first.setdefault(id(tensor), full)
    return found


def plain_groups(model: Sequence[Any], optimizer: Any) -> list[list[str]]:
    """List the names of the boxes of each of the optimizer's groups; empty for a Megatron module."""
    if not plain_names(model):
        return []
    known = {id(parameter): boxes[0].name for parameter, boxes, _ in places(model)}
    groups = [[known.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]
    return [[name for name in group if name is not None] for group in groups]


def _megatron_places(module: Any) -> Iterator[tuple[torch.Tensor, list[Box], bool]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    further = getattr(getattr(module, "config", None), "mtp_num_layers", None)  # which does not look for it itself
    metadata = {"metadata": ensure_metadata_has_dp_cp_group(None)} if further else {}
    for sharded in module.sharded_state_dict(**metadata).values():
        if isinstance(sharded, ShardedTensorFactory):
            pieces = [piece for piece in nested_values(sharded.build()) if isinstance(piece, ShardedTensor)]
            pieces.sort(key=lambda piece: int(piece.data.data_ptr()))
            if sum(piece.data.numel() for piece in pieces) != sharded.data.numel():
                raise Missing(f"{sharded.key}: its pieces are not the whole of it")
            yield sharded.data, [_box(piece) for piece in pieces], _is_duplicate(sharded.replica_id)
        elif isinstance(sharded, ShardedTensor):
            yield sharded.data, [_box(sharded)], _is_duplicate(sharded.replica_id)


def _box(sharded: Any) -> Box:
    extent = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
    return Box(sharded.key, tuple(sharded.global_shape), tuple(sharded.global_offset), extent)


def _is_duplicate(replica_id: Any) -> bool:
    """Whether another rank of the replica has the same. Of Megatron's (pipeline, tensor, data) ids, the last is the
    data-parallel replica's."""
    return any(replica_id[:-1]) if isinstance(replica_id, tuple | list) else bool(replica_id)


# ------------------------------------------------------------ putting parts together
class Source(NamedTuple):
    """A part that can be read: its box and range in it, and the function that reads elements of a key, flat."""

    box: Box
    begin: int
    end: int
    read: Callable[[str, int, int], torch.Tensor]
    """Reads elements [begin, end) of the part. The numbers begin at 0."""
    lend: Callable[[str, Room], torch.Tensor | None] | None = None
    """Function that promises to read a key later to the room's memory, which it returns; None if that cannot be."""

    @classmethod
    def of(cls, box: Box, begin: int, end: int, flat: torch.Tensor) -> Source:
        """Make a source of a tensor in memory, of a single kind."""
        return cls(box, begin, end, lambda key, first, last: flat[first:last])


class SavedState(NamedTuple):
    """The optimizer's state of a block: the keys of its tensors, and other values by key."""

    box: Box
    keys: Sequence[str]
    others: Mapping[str, object]


def assemble(box: Box, key: str, sources: Sequence[Source]) -> torch.Tensor:
    """Assemble the block `box` of one kind (`key`) from parts of any layout. Shape: the box's extent. Raises
    :class:`Missing` unless they are a partition of it."""
    blocks: dict[Box, list[Source]] = {}
    for source in sources:
        if source.box.whole != box.whole:
            raise Missing(f"{box.name} is {list(source.box.whole)} there and {list(box.whole)} here")
        if overlap(box.place, source.box.place) is not None:
            blocks.setdefault(source.box, []).append(source)
    if box in blocks:  # nothing but this very block is needed
        blocks = {box: blocks[box]}
    places = {block: overlap(box.place, block.place) or ((), ()) for block in blocks}
    if not places or not tiles(box.extent, [box_of(into) for into, _ in places.values()]):
        raise Missing(f"{box.name}: some of {box.numel} elements are not there, or there twice")
    found: torch.Tensor | None = None
    for block, pieces in blocks.items():
        if block == box:
            return _join(block, key, pieces, 0, block.numel).view(box.extent)
        into, out_of = places[block]
        part = _rows(block, key, pieces, out_of)
        if found is None:
            found = torch.empty(box.extent, dtype=part.dtype)
        found[into].copy_(part)
    assert found is not None
    return found


def _rows(block: Box, key: str, pieces: Sequence[Source], its: Sequence[slice]) -> torch.Tensor:
    """Assemble the part `its` of a block. Of the others only what is in the same rows is read: a rank needs no more
    memory for the blocks of fewer ranks than for its own."""
    axis = next((number for number, extent in enumerate(block.extent) if extent > 1), 0)
    row, rows = math.prod(block.extent[axis + 1 :]), its[axis]
    flat = _join(block, key, pieces, rows.start * row, rows.stop * row)
    shape = (*block.extent[:axis], rows.stop - rows.start, *block.extent[axis + 1 :])
    return flat.view(shape)[(*its[:axis], slice(None), *its[axis + 1 :])]


def _join(box: Box, key: str, pieces: Sequence[Source], begin: int, end: int) -> torch.Tensor:
    """Assemble elements [begin, end) of `box`, flat, from ranges of it."""
    if begin == end:
        return pieces[0].read(key, 0, 0)
    tensors, reached = [], begin
    for piece in sorted(pieces, key=lambda piece: (piece.begin, -piece.end)):
        if piece.begin > reached or reached == end:
            break
        if piece.end > reached:
            until = min(piece.end, end)
            tensors.append(piece.read(key, reached - piece.begin, until - piece.begin))
            reached = until
    if reached != end:
        raise Missing(f"{box.name}: elements from {reached} on are not there")
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class Blocks(Protocol):
    """The source from which a model's tensors are restored."""

    def read(self, box: Box, key: str) -> torch.Tensor:
        """Read a block of one kind. Shape: the box's extent. Raises :class:`Missing`."""

    def state(self, box: Box, owner: Any) -> tuple[Sequence[str], Mapping[str, object]]:
        """Return the keys of the tensors and the other values that torch's optimizer `owner` had for this block."""

    def lend(self, box: Box, key: str, room: Room) -> torch.Tensor | None:
        """Return the memory of `room`, flat, if it can get a block of one kind with :meth:`fill`, without a copy. None
        if :meth:`read` must be called."""

    def fill(self) -> None:
        """Read all that was promised. Afterwards nothing else is read."""


class AssembledBlocks:
    """The blocks of parts of any layout, by tensor name."""

    def __init__(
        self,
        sources: Mapping[str, Sequence[Source]],
        saved: Mapping[str, Sequence[SavedState]],
        fill: Callable[[], None] = lambda: None,
    ):
        self._sources, self._saved = sources, saved
        self._fill = fill  # does what the sources' `lend` has promised

    def read(self, box: Box, key: str) -> torch.Tensor:
        if box.name not in self._sources:
            raise Missing(f"{box.name} is not there")
        return assemble(box, key, self._sources[box.name])

    def lend(self, box: Box, key: str, room: Room) -> torch.Tensor | None:
        for each in self._sources.get(box.name, ()):
            if each.box == box and (each.begin, each.end) == (0, box.numel) and each.lend is not None:
                return each.lend(key, room)
        return None

    def fill(self) -> None:
        self._fill()

    def state(self, box: Box, owner: Any) -> tuple[Sequence[str], Mapping[str, object]]:
        """Return the state of this very block: layers that are blocks of one tensor need not all be trained."""
        saved = self._saved.get(box.name, ())
        return next(((each.keys, each.others) for each in saved if overlap(box.place, each.box.place)), ((), {}))


class _Target(NamedTuple):
    """Memory for elements of a parameter, or of its optimizer's state."""

    flat: torch.Tensor
    first: int = 0
    """The first of these elements in the parameter."""

    def among(self, first: int, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what it shares with elements from `first` on: its own memory and theirs."""
        begin = max(self.first, first)
        end = max(begin, min(self.first + self.flat.numel(), first + flat.numel()))
        return self.flat[begin - self.first : end - self.first], flat[begin - first : end - first]


class _Restoring:
    """The tensors that one restore fills: directly if possible, else by copies of what was read."""

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # to, from what is filled at the end

    def add(self, boxes: Sequence[Box], key: str, targets: Callable[[torch.dtype], Sequence[_Target]]) -> None:
        """Restore one kind of all elements of a parameter to each of some places. targets(dtype): they, if the values
        have this type."""
        first = 0
        for box in boxes:
            lent = self._blocks.lend(box, key, partial(_room, targets, first, box.numel))
            values = self._blocks.read(box, key).reshape(-1) if lent is None else lent
            for target in targets(values.dtype):
                into, part = target.among(first, values)
                if lent is None:
                    into.copy_(part)
                elif into.data_ptr() != part.data_ptr():
                    self._copies.append((into, part))
            first += box.numel

    def finish(self) -> None:
        """Fill what is left."""
        self._blocks.fill()
        for into, values in self._copies:
            into.copy_(values)


def _room(
    targets: Callable[[torch.dtype], Sequence[_Target]], first: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the memory of the first target if it has all `count` elements from `first` on, else none."""
    target = targets(dtype)[0]
    return target.flat[max(0, first - target.first) :][:count] if target.first <= first else target.flat[:0]


def _same(targets: Sequence[_Target], dtype: torch.dtype) -> Sequence[_Target]:
    return targets


@torch.no_grad()
def restore(model: Sequence[Any], optimizer: Any, blocks: Blocks) -> None:
    """Restore this rank's model and optimizer from `blocks`. After an error they can have any values."""
    held = _optimizer_parts(optimizer)
    found = []
    for parameter, boxes, _ in places(model):
        own = held.get(id(parameter))
        found.append((parameter, boxes, own, *blocks.state(boxes[0], own.owner if own is not None else None)))
    new = sum(len(keys) * _moment_bytes(own.here) for _, _, own, keys, _ in found if own is not None)
    restoring, states, memory = _Restoring(blocks), [], NewMemory(new)
    for parameter, boxes, own, keys, others in found:
        targets = [_Target(local(parameter).detach().view(-1))]
        if own is not None:
            targets.insert(0, _Target(own.here.view(-1), own.begin))
        restoring.add(boxes, PARAMETER, partial(_same, targets))
        if own is not None:
            states.append((own, state := _State(own, memory)))
            for key in sorted(keys):
                restoring.add(boxes, key, partial(state.targets, key))
            state.others |= {key: _elsewhere(value, _device(own, key)) for key, value in others.items()}
    restoring.finish()
    for own, state in states:
        if state.tensors or state.others:
            values = {key: dtensors.wrap(value, own.main) for key, value in state.tensors.items()}
            own.owner.state[own.main] = values | state.others


def _moment_bytes(main: torch.Tensor) -> int:
    """Return the size of one kind of a parameter's state, as a rule: optimizers keep it in 32 bits at least."""
    size = main.numel() * max(torch.float32.itemsize, main.dtype.itemsize)
    return -(-size // ALIGN) * ALIGN


class _State:
    """The optimizer's new state of one parameter."""

    def __init__(self, own: _OptimizerPart, memory: NewMemory):
        self._own, self._memory = own, memory
        self.tensors: dict[str, torch.Tensor] = {}
        self.others: dict[str, object] = {}

    def targets(self, key: str, dtype: torch.dtype) -> Sequence[_Target]:
        """Return the memory of one kind: that of the state before if it fits."""
        main, here, tensors = self._own.main, self._own.here, self.tensors
        if key not in tensors:
            before = self._own.owner.state.get(main, {}).get(key)
            fits = _is_like(before, main) and local(before).is_contiguous()
            fits = fits and (before.dtype, before.device) == (dtype, here.device)
            tensors[key] = local(before) if fits else self._memory.tensor(here.shape, dtype, here.device)
        return [_Target(tensors[key].view(-1), self._own.begin)]


class NewMemory:
    """New memory for tensors that are going to be filled at once. In huge pages if the kernel has some: the faults of
    small ones take longer than the copy.

    The tensors are side by side, so that small ones are in huge pages, too. Each has a storage of its own, and the
    memory goes back to the kernel with the last tensor in it. No chunk is larger than what all tensors are expected to
    need, since a process can be limited in what it reserves (`ulimit -v`).
    """

    def __init__(self, expected: int = sys.maxsize) -> None:
        self._chunk: mmap.mmap | None = None
        self._at = self._end = 0  # what is left of it
        self._expected = expected  # bytes, of what is still to come

    def tensor(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor with any content. Raises MemoryError."""
        size = shape.numel() * dtype.itemsize
        if device.type != "cpu" or not size:
            return empty(shape, dtype, device)
        if self._at + size > self._end:
            self._take_chunk(size)
        room = -(-size // ALIGN) * ALIGN
        self._expected -= room
        if self._chunk is None or self._at + size > self._end:
            return empty(shape, dtype, device)
        made = torch.frombuffer(self._chunk, dtype=dtype, count=shape.numel(), offset=self._at)
        self._at += room
        return made.view(shape)

    def _take_chunk(self, size: int) -> None:
        """Take a chunk for at least `size` bytes, which begin with a huge page, if they fill one and the kernel has so
        much."""
        room = max(size, min(CHUNK, self._expected))
        if room < HUGE:
            return
        room = -(-room // HUGE) * HUGE
        try:
            chunk = mmap.mmap(-1, room + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # the tensor alone is smaller
            return
        self._chunk, self._at = chunk, -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % HUGE
        self._end = self._at + room
        with contextlib.suppress(OSError):  # a kernel without them
            chunk.madvise(mmap.MADV_HUGEPAGE, self._at, room)


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return torch's own tensor with any content. Raises MemoryError, since torch's error for a lack of memory cannot
    be told from its others."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise MemoryError(str(error).partition("\n")[0]) from None


def _elsewhere(value: object, device: torch.device | str) -> object:
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _device(own: _OptimizerPart, key: str) -> torch.device | str:
    """Return the device on which torch keeps a value for a parameter: mostly the CPU for step counts."""
    on_device = any(group.get("fused") or group.get("capturable") for group in own.owner.param_groups)
    return "cpu" if key == "step" and not on_device else own.main.device
