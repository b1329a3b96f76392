"""What a script without a session keeps in its agent's memory across restarts (restart mode): two lines in the script.

    saved = transition.memory.load()                                # None, or .state and .iteration
    transition.memory.save({"model": model.state_dict(), ...}, iteration)

Plain values and tensors are written as they are; nothing is pickled. Without an agent nothing is kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch
import torch.distributed as dist

from transition.memory import contents
from transition.memory.images import SUFFIX, BadImage, Found, Image, Key, folder, inventory
from transition.memory.keeper import BUFFERS
from transition.migrate import PIECE, broadcast_bytes
from transition.saying import say

KIND = "user"
SAME = "replicated"  # the mark of what was saved so
_TENSOR, _TUPLE = 1, 2  # MessagePack's codes for what it does not know
_NONE = -1


class Saved(NamedTuple):
    """What :func:`save` was given. Tensors are in the host's memory."""

    state: Any
    iteration: int


def save(state: Any, iteration: int, replicated: bool = False) -> None:
    """Keep `state` (nested dictionaries, lists and tuples of tensors and plain values), with which `iteration` comes
    next; when this returns it may change. The last two stay.

    replicated: all ranks give the same, as in data-parallel training; then one rank of each node writes it, and a world
    of any size can go on from it. Raises TypeError for a value of another kind, and for an iteration that is no whole
    number from 0. Where there is no room it is said once, and nothing is kept.
    """
    if not isinstance(iteration, int) or iteration < 0:
        raise TypeError(f"iteration={iteration!r}: give the number of the iteration that comes next, 0 or more")
    world = _World.here()
    if world is not None and (world.local == 0 or not replicated):
        _keeper(world).save(state, iteration, replicated)


def load() -> Saved | None:
    """The newest that the ranks of the present world have in common; None where there is none. All ranks call it, after
    `torch.distributed.init_process_group`, and get the same iteration.

    What was saved `replicated` is in common if one rank has it: the others get it from that. Of the rest each rank
    takes what the rank of its number has left in this node, in a world of the same size. Raises RuntimeError where the
    ranks cannot talk to each other yet.
    """
    world = _World.here()
    if world is None:
        return None
    if world.size > 1 and not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group before transition.memory.load()")
    mine = _mine(world)
    for choice in world.choices(mine):
        saved = world.shared(choice, mine.get(choice)) if choice.replicated else world.own(mine[choice])
        if saved is not None:
            return Saved(saved, choice.iteration)
    return None


# ------------------------------------------------------------ the world
class _Choice(NamedTuple):
    """One that could be taken, in the order in which it is: the newest first, replicated rather than not."""

    iteration: int
    replicated: bool
    base: int


class _World(NamedTuple):
    """Where this process is in the world that its agent has made."""

    folder: Path
    rank: int
    size: int
    local: int
    per_node: int

    @classmethod
    def here(cls) -> _World | None:
        """None without an agent."""
        if (memory := folder()) is None:
            return None
        if "UNICRON_AGENT" in os.environ:
            raise RuntimeError("transition.Session keeps the training state by itself: take transition.memory out")
        numbers = [int(os.environ.get(name, default)) for name, default in _VARIABLES]
        return cls(memory, *numbers)

    @property
    def device(self) -> torch.device:
        """Where collectives want their tensors."""
        nccl = self.size > 1 and dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def choices(self, mine: Mapping[_Choice, Found]) -> list[_Choice]:
        """What all can take, the same list in all ranks."""
        every = [set(mine)] if self.size == 1 else self._told(sorted(mine, reverse=True))
        anywhere = {choice for its in every for choice in its if choice.replicated}
        return sorted(anywhere | set.intersection(*every), reverse=True)

    def _told(self, mine: Sequence[_Choice]) -> list[set[_Choice]]:
        told = torch.full((4 * BUFFERS, len(_Choice._fields)), _NONE, dtype=torch.int64)
        for number, choice in enumerate(mine[: len(told)]):
            told[number] = torch.tensor([int(value) for value in choice])
        every = [torch.empty_like(told, device=self.device) for _ in range(self.size)]
        dist.all_gather(every, told.to(self.device))
        return [
            {_Choice(iteration, bool(same), base) for iteration, same, base in its.tolist() if iteration != _NONE}
            for its in every
        ]

    def all(self, good: bool) -> bool:
        """Whether it is so in all ranks."""
        if self.size == 1:
            return good
        said = torch.tensor([int(good)], device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MIN)
        return bool(said.item())

    def own(self, found: Found) -> Any:
        """Each rank's own state, if it is sound in all; else None."""
        read = _read(found)
        return _unpacked(*read) if self.all(read is not None) and read is not None else None

    def shared(self, choice: _Choice, found: Found | None) -> Any:
        """The state of the first rank that has it sound; None where no rank has."""
        read = _read(found) if found is not None else None
        if self.size == 1:
            return _unpacked(*read) if read is not None else None
        source = torch.tensor([self.rank if read is not None else self.size], device=self.device)
        dist.all_reduce(source, op=dist.ReduceOp.MIN)
        first = int(source.item())
        if first == self.size:
            return None
        head, _ = broadcast_bytes(read[0] if read is not None else None, first, self.device)
        size = torch.tensor([read[1].numel() if read is not None else 0], device=self.device)
        dist.broadcast(size, first)
        data = read[1] if read is not None else torch.empty(int(size.item()), dtype=torch.uint8)
        for piece in data.split(PIECE):
            sent = piece.to(self.device)
            dist.broadcast(sent, first)
            if read is None:
                piece.copy_(sent)
        return _unpacked(head, data)


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))


def _mine(world: _World) -> dict[_Choice, Found]:
    """What this rank could take of what is in its node. Copies of other nodes' images are as good."""
    found: dict[_Choice, Found] = {}
    for each in inventory(world.folder):
        key = each.key
        same = key.mark == SAME
        if key.kind == KIND and (same or (key.place, key.size) == (world.rank, world.size)):
            found.setdefault(_Choice(key.iteration, same, key.base), each)
    return found


def _read(found: Found) -> tuple[bytes, torch.Tensor] | None:
    """(head, data) of a sound one; it is said of another."""
    try:
        return contents.read(found)
    except (BadImage, OSError) as error:
        say(f"passed over in memory: {error}")
        return None


# ------------------------------------------------------------ writing
class _Keeper:
    """Of one process."""

    def __init__(self, world: _World):
        self._world = world
        self._images: dict[int, Image] = {}
        self._thread: threading.Thread | None = None
        self._quiet = False

    def save(self, state: Any, iteration: int, replicated: bool) -> None:
        tensors: list[torch.Tensor] = []
        packed = _packed(state, tensors)
        offsets, size = contents.laid(tensors)
        kinds = [_kind(*each) for each in zip(tensors, offsets, strict=True)]
        head = msgpack.packb({"state": packed, "tensors": kinds})
        world = self._world
        base = int(os.environ.get("UNICRON_GENERATION", "0"))
        key = Key(KIND, world.rank, iteration, world.rank, world.size, base=base, mark=SAME if replicated else "")
        if self._thread is not None:
            self._thread.join()
        try:
            image = self._room(len(head), size)
            image.begin()
            data = contents.raw(image.data[:size])
            contents.fill([tensor.reshape(-1) for tensor in tensors], offsets, data)
        except OSError as error:
            if not self._quiet:
                say(f"the state is not kept in memory, the training goes on: {error}")
            self._quiet = True
            return
        self._thread = threading.Thread(target=self._finish, args=(image, key, head, size, data), name="unicron-memory")
        self._thread.start()

    def _finish(self, image: Image, key: Key, head: bytes, size: int, data: torch.Tensor) -> None:
        image.finish(key, head, size, contents.sums(data))
        self._quiet = False
        if self._world.local == 0:
            self._sweep(key.iteration)

    def _room(self, head_bytes: int, data_bytes: int) -> Image:
        """The file that holds least is written next."""
        left = {found.path: found.key.iteration for found in inventory(self._world.folder)}
        paths = [self._world.folder / f"{KIND}-{self._world.rank}-{number}{SUFFIX}" for number in range(BUFFERS)]
        number = min(range(BUFFERS), key=lambda number: left.get(paths[number], -1))
        image = self._images.get(number)
        if image is None or not image.fits(head_bytes, data_bytes) or not paths[number].exists():
            self._images.pop(number, None)
            paths[number].unlink(missing_ok=True)
            image = self._images[number] = Image(paths[number], head_bytes + head_bytes // 4, data_bytes)
        return image

    def _sweep(self, iteration: int) -> None:
        """Of ranks that ran in this node in an earlier world, what is older goes."""
        first = self._world.rank - self._world.local
        for found in inventory(self._world.folder):
            here = first <= found.key.slot < first + self._world.per_node
            own = found.path.name.startswith(f"{KIND}-")
            if own and not here and found.key.iteration < iteration:
                found.path.unlink(missing_ok=True)


_kept: _Keeper | None = None


def _keeper(world: _World) -> _Keeper:
    global _kept
    if _kept is None or _kept._world != world:
        _kept = _Keeper(world)
    return _kept


def _kind(tensor: torch.Tensor, offset: int) -> tuple[str, list[int], int]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset


# ------------------------------------------------------------ plain values and tensors
def _packed(state: Any, tensors: list[torch.Tensor]) -> bytes:
    """As MessagePack; the tensors are put into the list. Raises TypeError, one line."""

    def other(value: Any) -> msgpack.ExtType:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            tensors.append(value.detach())
            return msgpack.ExtType(_TENSOR, msgpack.packb(len(tensors) - 1))
        if isinstance(value, tuple):
            return msgpack.ExtType(_TUPLE, msgpack.packb(list(value), default=other, strict_types=True))
        if isinstance(value, dict):  # an OrderedDict, as torch's modules give
            return dict(value)
        raise TypeError(
            "transition.memory.save keeps ordinary tensors, numbers, texts, bytes, lists, tuples and dictionaries, and "
            f"no {type(value).__name__}"
        )

    packed: bytes = msgpack.packb(state, default=other, strict_types=True)
    return packed


def _unpacked(head: bytes, data: torch.Tensor) -> Any:
    """The state; its tensors are copies."""
    told = msgpack.unpackb(head, strict_map_key=False)

    def tensor(number: int) -> torch.Tensor:
        kind, shape, at = told["tensors"][number]
        dtype = getattr(torch, kind)
        length = dtype.itemsize
        for extent in shape:
            length *= extent
        return data[at : at + length].clone().view(dtype).view(shape)

    def other(code: int, value: bytes) -> Any:
        if code == _TENSOR:
            return tensor(msgpack.unpackb(value))
        return tuple(_plain(value))

    def _plain(value: bytes) -> Any:
        return msgpack.unpackb(value, ext_hook=other, strict_map_key=False)

    return _plain(told["state"])
