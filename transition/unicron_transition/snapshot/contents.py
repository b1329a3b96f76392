"""The content of an image: a head (MessagePack) that describes a rank's part of the training state, and its tensors,
one after the other. Nothing in it is a pickle."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from unicron_transition.snapshot import parts
from unicron_transition.snapshot.checkpoint_file import Head, head_of_file
from unicron_transition.snapshot.formats import own
from unicron_transition.snapshot.image_format import (
    ALIGN,
    PIECE,
    BadImage,
    DataDigest,
    Image,
    ImagePage,
    reading_threads,
)
from unicron_transition.snapshot.migrate import TrainingState, as_plain, plain
from unicron_transition.snapshot.reading import open_plain, read_into, unpack

SMALL = 1 << 15  # bytes whose copy takes less time than to let go of Python's lock and get it again

_move_small = ctypes.PyDLL(None).memmove  # keeps Python's lock, unlike ctypes.memmove
_move_small.argtypes, _move_small.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p


@dataclass
class Contents:
    """The parts of a state that its image has."""

    tensors: list[torch.Tensor]
    """The live tensors, flat."""
    moving: list[int]
    """Tensors of which a copy is taken at once, because the next forward pass could change them."""
    about: bytes
    """The description of the tensors, the same as long as the tensors are."""
    offsets: list[int] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        self.offsets, self.size = lay_out(self.tensors)

    def still(self) -> list[torch.Tensor]:
        """Return the tensors to be written: for moving ones, copies."""
        tensors = list(self.tensors)
        for number in self.moving:
            tensors[number] = tensors[number].clone()
        return tensors


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor, and the size of all in bytes."""
    offsets, at = [], 0
    for tensor in tensors:
        offsets.append(at)
        at += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
    return offsets, at


# ------------------------------------------------------------ gathering
class Gatherer:
    """Gathers one state repeatedly. As long as its tensors are the same, nothing is looked up again, since Megatron
    takes long to find the place of each parameter."""

    def __init__(self, state: TrainingState):
        self.state = state
        self._before: list[int] = []
        self._contents: Contents | None = None

    def contents(self) -> Contents:
        """Return the state's present tensors."""
        now = self.state.addresses()
        if self._contents is None or now != self._before or self.state.sharded:
            self._contents, lasting = gather(self.state, alone=True)
            known = {tensor.untyped_storage().data_ptr() for tensor in self.state.tensors()}
            views = all(tensor.untyped_storage().data_ptr() in known for tensor in self._contents.tensors)
            self._before = now if lasting and views else []
        return self._contents


def head_of(
    state: TrainingState, about: bytes, iteration: int, layout: str, step: float = 0.0, untrained: str = ""
) -> bytes:
    """Return the present head of a state, packed."""
    groups, schedule = plain(state.optimizer.param_groups), as_plain(state.schedule())
    scales, facts = state.scales(), state.facts
    head = Head(iteration, layout, groups, schedule, scales, state.seed, state.loss, step, untrained, about, facts)
    return head.pack()


def gather(state: TrainingState, alone: bool = False) -> tuple[Contents, bool]:
    """Return this rank's part, and whether everything that changes is in its tensors. alone: include what another rank
    of the replica has too, so that this rank can go on without it."""
    tensors: list[torch.Tensor] = []
    moving, index, lasting = [], [], True
    for part in parts.parts(state.model, state.optimizer):
        if part.duplicate and not alone:
            continue
        if not part.stepped:
            moving.append(len(tensors))
        keys = {key: len(tensors) + number for number, key in enumerate(part.tensors)}
        tensors += [tensor.detach().reshape(-1) for tensor in part.tensors.values()]
        values, others = {}, {}
        for key, value in part.others.items():
            if isinstance(value, torch.Tensor):
                values[key] = [len(tensors), list(value.shape)]
                tensors.append(value.detach().reshape(-1))
            else:
                others[key], lasting = as_plain(value), False
        index.append((*part.box, part.begin, part.end, keys, others, values))
    kinds = [(str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in tensors]
    about: dict[str, Any] = {"index": index, "tensors": kinds}
    if ties := {name: first for name, first in parts.plain_names(state.model).items() if name != first}:
        about["ties"] = ties
    if groups := parts.plain_groups(state.model, state.optimizer):
        about["groups"] = groups
    return Contents(tensors, moving, msgpack.packb(about)), lasting


# ------------------------------------------------------------ copying
@dataclass
class _Piece:
    """Neighbours that are copied, and whose digest is taken then."""

    end: int
    """The end of their bytes."""
    large: list[tuple[int, int, int]] = field(default_factory=list)
    """(to, from, bytes)."""
    small: list[tuple[int, int, int]] = field(default_factory=list)
    """(to, from, bytes) of at most SMALL bytes."""
    others: list[int] = field(default_factory=list)
    """The numbers of tensors that are other ones each time, or not in order in the host's memory."""


class Copier:
    """Copies the same tensors to the same place repeatedly, with the work for each copy prepared once.

    One thread copies tensors in the host's memory, large ones without Python's lock. Each piece gets its digest while
    it is in the processor's cache: a second pass over all of it takes a third more.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], into: torch.Tensor, moving: Sequence[int] = ()
    ):
        self.tensors, self._offsets = tensors, offsets
        self.into = into  # bytes (uint8) in the host's memory, as many as all of them take
        self._pieces = [_Piece(0)]
        others = set(moving)
        ends = [*offsets[1:], into.numel()]
        for number, tensor in enumerate(tensors):
            begin, length = offsets[number], tensor.numel() * tensor.element_size()
            into[begin + length : ends[number]].zero_()
            if number in others or not tensor.is_cpu or not tensor.is_contiguous():
                self._piece(begin).others.append(number)
                continue
            for at in range(0, length, PIECE):
                move = into.data_ptr() + begin + at, tensor.data_ptr() + at, min(PIECE, length - at)
                piece = self._piece(begin + at)
                (piece.large if length > SMALL else piece.small).append(move)
        self._pieces[-1].end = into.numel()

    def _piece(self, begin: int) -> _Piece:
        """Return the piece to which the bytes from `begin` on belong."""
        before = self._pieces[-2].end if len(self._pieces) > 1 else 0
        if begin - before >= PIECE:
            self._pieces[-1].end = begin
            self._pieces.append(_Piece(begin))
        return self._pieces[-1]

    def copy(self, tensors: Sequence[torch.Tensor], total: Any = None) -> None:
        """Copy the tensors. total: a running digest that gets all bytes; only of tensors in the host's memory. Copies
        from a GPU are in the current stream, and might not be over on return."""
        data, begin = self.into.numpy().data, 0
        for piece in self._pieces:
            for target, source, length in piece.large:
                ctypes.memmove(target, source, length)
            for target, source, length in piece.small:
                _move_small(target, source, length)
            for number in piece.others:
                tensor, at = tensors[number].contiguous().view(torch.uint8), self._offsets[number]
                self.into[at : at + tensor.numel()].copy_(tensor, non_blocking=tensor.is_cuda)
            if total is not None:
                total.update(data[begin : piece.end])
            begin = piece.end


def fill(tensors: Sequence[torch.Tensor], offsets: Sequence[int], into: torch.Tensor) -> None:
    """Copy tensors of the host to their offsets in `into`, once (:class:`Copier`)."""
    Copier(tensors, offsets, into).copy(tensors)


def copy_flat(flat: torch.Tensor, image: Image) -> bytes:
    """Copy a flat tensor of the host to the beginning of an image, and return its digest."""
    total, values = DataDigest(), [flat.view(torch.uint8)]
    Copier(values, [0], raw(image.data[: flat.nbytes])).copy(values, total)
    found: bytes = total.digest()
    return found


def raw(data: memoryview) -> torch.Tensor:
    """Return the bytes as a tensor that shares their memory."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


# ------------------------------------------------------------ reading
def read(found: ImagePage) -> tuple[bytes, torch.Tensor]:
    """Check an image and return its head and data (uint8, a private mapping). Raises BadImage, OSError."""
    head, mapped = found.read()
    found.check(mapped, reading_threads())
    return head, raw(mapped)


@dataclass
class ImageContent:
    """An image whose head is sound. Its data are read tensor by tensor on demand."""

    found: ImagePage
    head: Head
    places: list[Any]
    """The index, as :func:`gather` writes it."""
    tensors: list[tuple[torch.dtype, int, int]]
    """(dtype, elements, byte in the file or -1 for the optimizer's step)."""
    _checked: bool = False
    _lent: dict[int, torch.Tensor] = field(default_factory=dict)
    """Memory for tensors, by number, until :meth:`fill`."""

    def tensor(self, number: int, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Read elements [first, last) of a tensor, by default all, after a check of all data the first time. Raises
        BadImage if they are damaged, OSError."""
        if not self._checked:
            self.found.check_file(reading_threads())
            self._checked = True
        return self._read(number, first, last)

    def lend(self, number: int, room: parts.Room) -> torch.Tensor | None:
        """Return the memory of `room` if it can get a tensor with :meth:`fill`: without a copy, and only once."""
        dtype, count, begin = self.tensors[number]
        if begin < 0 or number in self._lent:
            return None
        into = room(dtype)
        if not (into.is_cpu and into.is_contiguous() and (into.dtype, into.numel()) == (dtype, count)):
            return None
        self._lent[number] = into
        return into

    def fill(self) -> None:
        """Read all tensors that :meth:`lend` has promised, and check all data. Raises BadImage, OSError, and then
        their memory can have any content."""
        lent, self._lent = self._lent, {}
        wants = [
            (self.tensors[number][2] - self.found.offset, tensor.view(torch.uint8).numpy().data)
            for number, tensor in lent.items()
            if tensor.numel()
        ]
        if wants:
            self.found.fill(wants, reading_threads())

    def index(self) -> Iterator[tuple[Any, ...]]:
        """Yield (name, whole, offset, extent, begin, end, keys, others) of each part. Raises OSError."""
        for *place, keys, others, values in self.places:
            tensors = {key: self._read(number).view(shape) for key, (number, shape) in values.items()}
            yield *place, keys, others | tensors

    def _read(self, number: int, first: int = 0, last: int | None = None) -> torch.Tensor:
        dtype, all_of_it, begin = self.tensors[number]
        count = (all_of_it if last is None else last) - first
        if begin < 0:
            return torch.full((count,), self.head.step, dtype=dtype)
        data = parts.empty(torch.Size([count * dtype.itemsize]), torch.uint8, torch.device("cpu"))
        with open_plain(self.found.path) as file:
            read_into(file, self.found.path, begin + first * dtype.itemsize, data.numpy().data)
        return data.view(dtype)


def open_image(found: ImagePage) -> ImageContent:
    """Read the head of an image, not its data. Raises BadImage, OSError."""
    head = head_of_file(found)
    try:
        about = unpack(head.about)
        places = own.lay_out(about["tensors"], found)
        tensors = [(getattr(torch, kind), count, begin) for kind, count, begin in places]
        return ImageContent(found, head, about["index"], tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadImage(f"{found.path}: not a training state of this release ({error})") from None
