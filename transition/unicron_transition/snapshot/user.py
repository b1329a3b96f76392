"""Keeps the state of a script without a session in its agent's memory across restarts (restart mode), by two lines.

    saved = unicron.memory.load()                                # None, or .state and .iteration
    unicron.memory.save({"model": model.state_dict(), ...}, iteration)

Plain values and tensors are written as they are; nothing is pickled. Without an agent nothing is kept.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch
import torch.distributed as dist

from unicron_transition.iteration.rank_log import warn
from unicron_transition.snapshot import contents
from unicron_transition.snapshot.common import World, choices
from unicron_transition.snapshot.cuts import CUT_PREFIX, Cuts, ImageRing, read_cut_note, ring_paths
from unicron_transition.snapshot.image_format import SAME, USER, Image, Key, inventory
from unicron_transition.snapshot.worker import Worker

_TENSOR, _TUPLE = 1, 2  # codes of MessagePack extension types


class UserState(NamedTuple):
    """A state passed to :func:`save`, with its tensors in the host's memory."""

    state: Any
    iteration: int


def save(state: Any, iteration: int, replicated: bool = False) -> None:
    """Keep `state` (nested dictionaries, lists and tuples of tensors and plain values), after which `iteration` comes
    next. The state can change when this returns. The last two states are kept. If the ranks wait for each other between
    two calls, as training does, all have one of the two whole at any moment.

    replicated: the state is the same in all ranks, as in data-parallel training. Then one rank of each node writes it,
    and a world of any size can go on from it. Raises TypeError for a value of another kind, and unless the iteration is
    a whole number from 0. If there is no room, this is reported once, and nothing is kept.
    """
    if not isinstance(iteration, int) or iteration < 0:
        raise TypeError(f"iteration={iteration!r}: give the number of the iteration that comes next, 0 or more")
    world = World.here()
    if world is not None and (world.local == 0 or not replicated) and (keeper := _keeper(world)) is not None:
        keeper.save(state, iteration, replicated)


def load() -> UserState | None:
    """Return the newest state that all ranks can have, or None. All ranks must call it, after
    `torch.distributed.init_process_group`, also those whose node has no memory, and all get the same iteration.

    A state that was saved as `replicated` comes from any rank that has it. Otherwise each rank gets what the rank of
    the same number saved in a world of the same size, from any node that has it. Raises RuntimeError if the ranks are
    not connected yet.
    """
    world = World.here()
    if world is None:
        return None
    if world.size > 1 and not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group before unicron.memory.load()")
    there = world.everything()
    for choice in choices(there, world.size):
        images = [each for each in there if each.choice == choice]
        if (content := world.fetch(images)) is not None:
            if (keeper := _keeper(world)) is not None:
                keeper.needed = choice.iteration
            return UserState(_unpack(*content), choice.iteration)
    return None


# ------------------------------------------------------------ writing
class _Keeper:
    """Keeps the states that one process saves in the memory of its node."""

    def __init__(self, world: World, folder: Path):
        self.world, self._folder = world, folder
        self._ring, self._cuts = ImageRing(ring_paths(folder, USER, world.rank)), Cuts(folder, world.rank)
        self.needed = -1  # the iteration that it began with, not overwritten before another one is whole
        self._before = -1  # the iteration that was saved before the last one
        self._warned = False
        self._worker = Worker("unicron-memory")
        atexit.register(self._worker.close)  # the last image becomes whole
        self._whole: Future[None] | None = None

    def save(self, state: Any, iteration: int, replicated: bool) -> None:
        tensors: list[torch.Tensor] = []
        packed = _pack(state, tensors)
        offsets, size = contents.lay_out(tensors)
        kinds = [
            (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        head = msgpack.packb({"state": packed, "tensors": kinds})
        world = self.world
        base = int(os.environ.get("UNICRON_GENERATION", "0"))
        key = Key(USER, world.rank, iteration, world.rank, world.size, base=base, mark=SAME if replicated else "")
        try:
            if self._whole is not None:
                self._whole.exception()
            ring, image = self._reserve(iteration, base, len(head), size)
            contents.fill([tensor.reshape(-1) for tensor in tensors], offsets, contents.raw(image.data[:size]))
            self._whole = self._finish_beside(lambda: self._finish(ring, image, key, head, size), replicated)
        except OSError as error:
            self._whole = None
            if not self._warned:
                warn(f"the state is not kept in memory, the training goes on: {error}")
            self._warned = True

    def _finish_beside(self, finish: Callable[[], None], replicated: bool) -> Future[None] | None:
        """Finish the image: a replicated one in a thread, beside the training. All ranks need parts of the same state,
        so a part is finished at once, before others overwrite their older one."""
        if replicated:
            with contextlib.suppress(RuntimeError):  # no thread can be started
                return self._worker.submit(finish)
        finish()
        return None

    def _reserve(self, iteration: int, base: int, head_bytes: int, data_bytes: int) -> tuple[ImageRing, Image]:
        """Reserve an image for a cut, if this is one and there is room, or one of the ring."""
        self._cuts.wanted = wanted = read_cut_note(self._folder)
        if 0 <= wanted.at <= iteration and self._newest_cut(base) < wanted.at:
            with contextlib.suppress(OSError):
                return self._cuts.reserve(USER, head_bytes, data_bytes)
        return self._ring, self._ring.reserve(head_bytes, data_bytes, self.needed)

    def _newest_cut(self, base: int) -> int:
        """Return the newest cut of this rank in this world. One of an earlier world could be further."""
        mine = (found.key for found in inventory(self._folder) if found.path in self._cuts.paths(USER))
        return max((key.iteration for key in mine if key.base == base), default=-1)

    def _finish(self, ring: ImageRing, image: Image, key: Key, head: bytes, size: int) -> None:
        ring.finish(image, key, head, size)
        self.needed, self._warned = -1, False
        if self.world.local == 0:
            self._remove_older(self._before)
        self._before = key.iteration

    def _remove_older(self, iteration: int) -> None:
        """Remove older states of ranks that ran on this node in an earlier world, and their cuts if enough nodes have a
        newer one."""
        good, first = read_cut_note(self._folder).good, self.world.node
        for found in inventory(self._folder):
            here = first <= found.key.slot < first + self.world.per_node
            own, cut = found.path.name.startswith(f"{USER}-"), found.path.name.startswith(f"{CUT_PREFIX}{USER}-")
            if not here and ((own and found.key.iteration < iteration) or (cut and found.key.iteration < good)):
                found.path.unlink(missing_ok=True)


_current: _Keeper | None = None


def _keeper(world: World) -> _Keeper | None:
    """Return the keeper of this process, None if the node has no memory."""
    global _current
    if world.folder is None:
        return None
    if _current is None or _current.world != world:
        _current = _Keeper(world, world.folder)
    return _current


# ------------------------------------------------------------ plain values and tensors
def _pack(state: Any, tensors: list[torch.Tensor]) -> bytes:
    """Pack the state as MessagePack and append its tensors to the list. Raises TypeError."""

    def other(value: Any) -> msgpack.ExtType:
        ordinary = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if ordinary and not value.is_meta:
            tensors.append(value.detach().resolve_conj().resolve_neg())
            return msgpack.ExtType(_TENSOR, msgpack.packb(len(tensors) - 1))
        if isinstance(value, tuple):
            return msgpack.ExtType(_TUPLE, msgpack.packb(list(value), default=other, strict_types=True))
        if isinstance(value, dict):  # the OrderedDict of torch's modules
            return dict(value)
        raise TypeError(
            "unicron.memory.save keeps ordinary tensors, numbers, texts, bytes, lists, tuples and dictionaries, and "
            f"no {type(value).__name__}"
        )

    packed: bytes = msgpack.packb(state, default=other, strict_types=True)
    return packed


def _unpack(head: bytes, data: torch.Tensor) -> Any:
    """Unpack a state, with copies of its tensors."""
    content = msgpack.unpackb(head, strict_map_key=False)

    def other(code: int, value: bytes) -> Any:
        if code == _TUPLE:
            return tuple(plain(value))
        kind, shape, at = content["tensors"][msgpack.unpackb(value)]
        dtype = getattr(torch, kind)
        return data[at : at + math.prod(shape) * dtype.itemsize].clone().view(dtype).view(shape)

    def plain(value: bytes) -> Any:
        return msgpack.unpackb(value, ext_hook=other, strict_map_key=False)

    return plain(content["state"])
