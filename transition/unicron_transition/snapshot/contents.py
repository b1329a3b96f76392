"""The content of an image: what is in a rank's part of the training state (the head, MessagePack) and its tensors, one
behind the other. Nothing in it is a pickle."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from unicron_transition.seams import modules
from unicron_transition.snapshot import checkpoint_file, parts
from unicron_transition.snapshot.image_format import ALIGN, STEP, BadImage, Image, ImagePage
from unicron_transition.snapshot.migrate import Settings, TrainingState, as_plain, plain
from unicron_transition.snapshot.reading import open_plain, read_into, unpack

SMALL = 1 << 15  # bytes of a tensor that torch copies with one thread, however many it has


@dataclass
class Contents:
    """The parts of a state that its image has. tensors: the live ones, flat; a copy of those in `moving` is taken at
    once, for the next forward pass may change them. about: the part of the head that stays while the tensors are the
    same ones."""

    tensors: list[torch.Tensor]
    moving: list[int]
    about: bytes
    offsets: list[int] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        self.offsets, self.size = lay_out(self.tensors)

    def still(self) -> list[torch.Tensor]:
        """The tensors as they are to be copied: of what moves, copies."""
        tensors = list(self.tensors)
        for number in self.moving:
            tensors[number] = tensors[number].clone()
        return tensors


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """(where each begins, bytes of all)."""
    offsets, at = [], 0
    for tensor in tensors:
        offsets.append(at)
        at += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
    return offsets, at


# ------------------------------------------------------------ gathering
class Gatherer:
    """Gathers one state again and again. While its tensors are the same ones, nothing is looked up anew: Megatron takes
    its time to say where each parameter belongs."""

    def __init__(self, state: TrainingState):
        self.state = state
        self._before: list[int] = []
        self._contents: Contents | None = None

    def contents(self) -> Contents:
        """The state's tensors as they are now."""
        live = list(self.state.tensors())
        now = [tensor.data_ptr() for tensor in live]
        if self._contents is None or now != self._before or self.state.sharded:
            self._contents, lasting = gather(self.state, alone=True)
            known = {tensor.untyped_storage().data_ptr() for tensor in live}
            views = all(tensor.untyped_storage().data_ptr() in known for tensor in self._contents.tensors)
            self._before = now if lasting and views else []
        return self._contents


@dataclass
class Head:
    """The part of a state that is no tensor. layout: as people write it. step: the optimizer's, where it is in no
    tensor. untrained: the mark of the image whose data stand behind these in a file (:mod:`checkpoint_file`). about:
    which tensors there are (:class:`Contents`). facts: what an exporter needs to know of the model
    (:mod:`model_facts`)."""

    iteration: int
    layout: str
    groups: list[Settings]
    scheduler: Settings | None
    scales: list[Settings]
    seed: int
    loss: float | None
    step: float
    untrained: str
    about: bytes
    facts: Settings = field(default_factory=dict)


def head_of(
    state: TrainingState, about: bytes, iteration: int, layout: str, step: float = 0.0, untrained: str = ""
) -> bytes:
    """The head of a state as it is now, packed."""
    groups, schedule = plain(state.optimizer.param_groups), as_plain(state.schedule())
    scales, facts = state.scales(), state.facts
    head = Head(iteration, layout, groups, schedule, scales, state.seed, state.loss, step, untrained, about, facts)
    packed: bytes = msgpack.packb(vars(head))
    return packed


def gather(state: TrainingState, alone: bool = False) -> tuple[Contents, bool]:
    """This rank's part, and whether all of it that changes is in tensors. alone: with what another rank of the replica
    has too, so that this rank can go on from it without that one's."""
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
    return Contents(tensors, moving, msgpack.packb({"index": index, "tensors": kinds})), lasting


# ------------------------------------------------------------ copying
class Copier:
    """Copies the same tensors to the same place, again and again: what each copy needs is worked out once.

    into: uint8 in the host's memory, exactly as long as all of them. moving: which of the tensors are other ones each
    time. One thread copies what is in the host's memory, and holds no lock of Python's meanwhile; small tensors go
    together, since each of them alone would have the training's thread wait for that lock.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], into: torch.Tensor, moving: Sequence[int] = ()
    ):
        self.tensors, self.into, self._offsets = tensors, into, offsets
        self._large: list[tuple[int, int, int]] = []  # to, from, bytes
        self._small: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []
        self._others: list[int] = []
        others, ends = set(moving), [*offsets[1:], into.numel()]
        for number, tensor in enumerate(tensors):
            begin, length = offsets[number], tensor.numel() * tensor.element_size()
            into[begin + length : ends[number]].zero_()
            if number in others or not tensor.is_cpu or not tensor.is_contiguous():
                self._others.append(number)
            elif length > SMALL:
                self._large.append((into.data_ptr() + begin, tensor.data_ptr(), length))
            elif length:
                self._small.append(tensor.view(torch.uint8))
                self._places.append(into[begin : begin + length])

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy them as they are now. From a card the copies are in the current stream and may not be over yet."""
        for target, source, length in self._large:
            ctypes.memmove(target, source, length)
        for number in self._others:
            tensor, begin = tensors[number].contiguous().view(torch.uint8), self._offsets[number]
            self.into[begin : begin + tensor.numel()].copy_(tensor, non_blocking=tensor.is_cuda)
        if self._small:
            modules.copy_all(self._places, self._small)


def fill(tensors: Sequence[torch.Tensor], offsets: Sequence[int], into: torch.Tensor) -> None:
    """Copy tensors of the host to their offsets in `into`, once (:class:`Copier`)."""
    Copier(tensors, offsets, into).copy(tensors)


def copy_flat(flat: torch.Tensor, image: Image) -> None:
    """Copy a flat tensor of the host to the beginning of an image."""
    fill([flat.view(torch.uint8)], [0], raw(image.data[: flat.nbytes]))


def raw(data: memoryview) -> torch.Tensor:
    """The bytes as a tensor; it keeps the memory."""
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


# ------------------------------------------------------------ reading
def read(found: ImagePage) -> tuple[bytes, torch.Tensor]:
    """(head, data as uint8, a private mapping) of an image that is as it was written. Raises BadImage, OSError."""
    head, mapped = found.read()
    found.check(mapped)
    return head, raw(mapped)


@dataclass
class ImageContent:
    """An image whose head is as it was written. Its data are read tensor by tensor, when they are asked for.

    tensors: (dtype, elements, byte in the file, or None for the optimizer's step).
    """

    found: ImagePage
    head: Head
    places: list[Any]  # as in the index of :class:`Contents`
    tensors: list[tuple[torch.dtype, int, int | None]]
    _checked: bool = False

    def tensor(self, number: int) -> torch.Tensor:
        """One of them, from data that are checked before. Raises BadImage where they are not what was written,
        OSError."""
        if not self._checked:
            self.found.check_file()
            self._checked = True
        return self._read(number)

    def index(self) -> Iterator[tuple[Any, ...]]:
        """(name, whole, offset, extent, begin, end, keys, others) of each part, as `snapshot.checkpoint` has it.
        Raises OSError."""
        for *place, keys, others, values in self.places:
            tensors = {key: self._read(number).view(shape) for key, (number, shape) in values.items()}
            yield *place, keys, others | tensors

    def _read(self, number: int) -> torch.Tensor:
        dtype, count, begin = self.tensors[number]
        if begin is None:
            return torch.full((count,), self.head.step, dtype=dtype)
        data = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        with open_plain(self.found.path) as file:
            read_into(file, self.found.path, begin, data.numpy().data)
        return data.view(dtype)


def open_image(found: ImagePage) -> ImageContent:
    """Raises BadImage, OSError. The data are not read."""
    head = found.head()
    try:
        told = Head(**unpack(checkpoint_file.file_head(found.key, head)))
        about = unpack(told.about)
        tensors: list[tuple[torch.dtype, int, int | None]] = []
        at = 0
        for kind, count, *where in about["tensors"]:
            dtype = getattr(torch, kind)
            if where == [STEP]:
                tensors.append((dtype, count, None))
                continue
            length, begin = count * dtype.itemsize, where[0] if where else at
            if not 0 <= begin <= begin + length <= found.data_bytes:
                raise ValueError(f"a tensor of it is outside of its {found.data_bytes} bytes")
            tensors.append((dtype, count, found.offset + begin))
            at += -(-length // ALIGN) * ALIGN
        return ImageContent(found, told, about["index"], tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadImage(f"{found.path}: not a training state of this release ({error})") from None
