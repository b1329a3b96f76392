"""What a rank with a distributed optimizer keeps of a cut: its own shard, and what is not trained, in files that the
next states do not overwrite (docs/design/sharded-optimizer.md, "Where all replicas of a place lie in one node")."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from unicron.transition.snapshot import contents
from unicron.transition.snapshot.cuts import CUT_PREFIX, Wanted
from unicron.transition.snapshot.double_buffer import BUFFERS, Turns
from unicron.transition.snapshot.images import SUFFIX, Key


class Cutting:
    """Of one rank. folder: None keeps nothing. say: one line, once, when there is no room."""

    def __init__(self, folder: Path | None, slot: int, say: Callable[[str], None]):
        self._folder, self._slot, self._say = folder, slot, say
        self.wanted = Wanted()  # set by the channel's thread
        self.none = False  # ... too: no cut is to be kept, and what there is goes
        self._turns: dict[str, Turns] = {}
        self._quiet = False

    def due(self, iteration: int) -> bool:
        """The state with which `iteration` comes next is to stay."""
        return self._folder is not None and iteration == self.wanted.at

    def drop(self) -> None:
        """Let go of the files, and of their memory. While nobody keeps one."""
        with contextlib.suppress(OSError):
            for turns in self._turns.values():
                turns.clear()

    def keep(self, key: Key, head: bytes, flat: torch.Tensor) -> bool:
        """Copy what an image of this key holds; whether it is there. flat: of the host."""
        assert self._folder is not None
        data = flat.view(torch.uint8)
        names = (f"{CUT_PREFIX}{key.kind}-{self._slot}-{number}{SUFFIX}" for number in range(BUFFERS))
        turns = self._turns.setdefault(key.kind, Turns([self._folder / name for name in names]))
        try:
            image = turns.room(turns.next(self.wanted.good), len(head), data.numel())
        except OSError as error:
            if not self._quiet:
                self._say(f"no copies of the training state are kept for other nodes, the training goes on: {error}")
            self._quiet = True
            return False
        image.mark_torn()
        contents.fill([data], [0], contents.raw(image.data[: data.numel()]))
        image.mark_whole(key, head, data.numel())
        turns.written(image.path)
        self._quiet = False
        return True
