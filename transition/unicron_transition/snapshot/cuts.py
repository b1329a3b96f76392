"""A cut: the iteration that the controller has named, of which every rank's state stays in memory until it lies in
enough nodes (docs/design/memory.md, "Copies in other nodes")."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgpack

from unicron_detector.processes.rank_messages import Cut
from unicron_transition.snapshot.image_format import Image, Key, write_note
from unicron_transition.snapshot.image_ring import ImageRing, ring_paths

NOTE = "cut.msgpack"  # beside the images
CUT_PREFIX = "cut-"  # names of images that the next ones do not overwrite
COPY_PREFIX = "copy-"  # names of images that came from another node


class Wanted(NamedTuple):
    """What the controller wants of the states in memory.

    at: the first state that is saved from this iteration on is to stay. good: the iteration that lies in enough
    nodes. -1: none."""

    at: int = -1
    good: int = -1


def write_cut_note(folder: Path, wanted: Wanted) -> None:
    """Tell scripts without a session, to whom the agent cannot talk. Raises OSError."""
    write_note(folder / NOTE, msgpack.packb(list(wanted)))


def read_cut_note(folder: Path) -> Wanted:
    """What the note says; nothing is wanted without one."""
    try:
        at, good = msgpack.unpackb((folder / NOTE).read_bytes())
        return Wanted(int(at), int(good))
    except (OSError, ValueError, TypeError):
        return Wanted()


class Cuts:
    """What one rank keeps of the cuts: for each kind of image a ring of files that its other states do not overwrite.

    folder: None keeps nothing. say: called with one line, once, when there is no room. unmap: as of the rings.
    """

    def __init__(
        self,
        folder: Path | None,
        slot: int,
        say: Callable[[str], None] = lambda text: None,
        unmap: Callable[[Path], None] = lambda path: None,
    ):
        self._folder, self._slot, self._say, self._unmap = folder, slot, say, unmap
        self.wanted = Wanted()  # set by the channel's thread
        self.unwanted = False  # ... too: no cut is to be kept, and what there is goes
        self._rings: dict[str, ImageRing] = {}
        self._warned = False

    def on_order(self, message: Cut) -> None:
        """The agent says which iteration is to be kept, or that none is."""
        if message.none:
            self.wanted, self.unwanted = Wanted(), True
        else:
            self.wanted = Wanted(message.iteration, message.good)

    def is_due(self, iteration: int) -> bool:
        """Whether the state with which `iteration` comes next is to stay."""
        return self._folder is not None and iteration == self.wanted.at

    def reserve(self, kind: str, head_bytes: int, data_bytes: int) -> tuple[ImageRing, Image]:
        """A torn image for a state that is due, and its ring. Raises OSError where there is no room."""
        ring = self._ring(kind)
        image = ring.reserve(head_bytes, data_bytes, self.wanted.good)
        self._warned = False
        return ring, image

    def write(self, key: Key, head: bytes, data_bytes: int, fill: Callable[[Image], None]) -> bool:
        """An image of this key; whether it is there. fill(image) writes its data."""
        try:
            self._ring(key.kind).write(key, head, data_bytes, fill, self.wanted.good)
        except OSError as error:
            self.complain(error)
            return False
        self._warned = False
        return True

    def complain(self, error: OSError) -> None:
        """There is no room for a cut. This is said once, until there is."""
        if not self._warned:
            self._warned = True
            self._say(f"no copies of the training state are kept for other nodes, the training goes on: {error}")

    def paths(self, kind: str) -> list[Path]:
        """The files of one kind of image."""
        return self._ring(kind).paths

    def release(self) -> None:
        """Let go of the mappings."""
        for ring in self._rings.values():
            ring.release()

    def remove_unwanted(self) -> None:
        """Where the controller wants no cut the files go, and their memory. To give that back takes seconds: this is
        for the thread that writes."""
        if self.unwanted:
            self.unwanted = False
            with contextlib.suppress(Exception):  # whatever it is, as a card's driver: the copies go on
                for ring in self._rings.values():
                    ring.remove()

    def _ring(self, kind: str) -> ImageRing:
        assert self._folder is not None
        if kind not in self._rings:
            self._rings[kind] = ImageRing(ring_paths(self._folder, f"{CUT_PREFIX}{kind}", self._slot), self._unmap)
        return self._rings[kind]
