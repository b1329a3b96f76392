"""Keeps cuts. A cut is an iteration named by the controller, of which every rank's state stays in memory until enough
nodes have it (docs/design/memory.md, "Copies in other nodes")."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgpack

from unicron_detector.processes.rank_messages import Cut
from unicron_transition.snapshot.checkpoint_file import is_aside
from unicron_transition.snapshot.image_format import SUFFIX, Image, ImagePage, Key, inventory, write_note

NOTE = "cut.msgpack"  # beside the images
CUT_PREFIX = "cut-"  # images that later ones do not overwrite
COPY_PREFIX = "copy-"  # images from another node
BUFFERS = 2


def ring_paths(folder: Path, name: str, slot: int, count: int = BUFFERS) -> list[Path]:
    """Return the files of a ring: NAME-SLOT-NUMBER.image."""
    return [folder / f"{name}-{slot}-{number}{SUFFIX}" for number in range(count)]


class ImageRing:
    """Files of one folder that only one process writes, in turn."""

    def __init__(
        self,
        paths: Sequence[Path],
        unmap: Callable[[Path], None] = lambda path: None,
        replace: bool = False,
        holds_verified: bool = False,
    ):
        self.paths = list(paths)
        self._unmap = unmap  # called with a file before its mapping is released
        self._replace = replace  # make each image a new file, so that readers keep their mapping of the old one
        self._holds_verified = holds_verified  # the newest verified image stays until another one is verified
        self._images: dict[Path, Image] = {}
        self._last: Path | None = None  # the file that this process wrote last
        self._verified: Path | None = None  # the file with that image, as far as it was looked for

    def write(
        self, key: Key, head: bytes, data_bytes: int, fill: Callable[[Image], bytes | None], needed: int = -1
    ) -> Path:
        """Write a whole image of this key, whose data fill(image) writes; it may return their digest. needed: as for
        :meth:`reserve`. Raises OSError if there is no room."""
        image = self.reserve(len(head), data_bytes, needed)
        self.finish(image, key, head, data_bytes, fill(image))
        return image.path

    def reserve(self, head_bytes: int, data_bytes: int, needed: int = -1) -> Image:
        """Return the next file, torn, with room for a head and data. needed: the iteration of an image that must not be
        overwritten. Raises OSError if there is no room."""
        path = self._next(needed)
        image = self._images.get(path) if not self._replace else None
        if image is None or not image.fits(head_bytes, data_bytes) or not path.exists() or is_aside(path):
            self._release(path)
            path.unlink(missing_ok=True)  # first, so that there is never one file more
            image = self._images[path] = Image(path, head_bytes + head_bytes // 4, data_bytes)
        image.mark_torn()
        return image

    def finish(self, image: Image, key: Key, head: bytes, data_bytes: int, found: bytes | None = None) -> None:
        """Mark the image as whole, after its data were written. found: their digest if it is known. The next image goes
        to another file."""
        image.mark_whole(key, head, data_bytes, found)
        self._last = image.path

    def _next(self, needed: int) -> Path:
        """Choose a file that neither holds iteration `needed` nor was written last. A new process begins with the
        oldest iteration, so that the newest one of the process before is overwritten last. The verified image stays in
        any case, even if then only the needed one is left to overwrite."""
        if self._last is not None and needed < 0:
            after = self.paths.index(self._last) + 1
            return next(path for path in (*self.paths[after:], *self.paths[:after]) if path != self._verified)
        there = [found for found in inventory(self.paths[0].parent) if found.path in self.paths]
        left = {found.path: found.key.iteration for found in there}
        self._verified = self._newest_verified(there)  # also that of an earlier process
        others = [path for path in self.paths if path != self._verified]
        free = [path for path in others if needed < 0 or left.get(path) != needed]
        return min(free or others, key=lambda path: (path == self._last, left.get(path, -1)))

    def _newest_verified(self, there: Sequence[ImagePage]) -> Path | None:
        """Return the file that must stay because it holds the newest verified image; None if there is none."""
        found = [each for each in there if each.verified] if self._holds_verified else []
        return max(found, key=lambda each: (each.key.iteration, each.key.base)).path if found else None

    def note_verified(self) -> None:
        """Take in that images of it were marked as verified, or removed."""
        there = [found for found in inventory(self.paths[0].parent) if found.path in self.paths]
        self._verified = self._newest_verified(there)

    def forget(self, path: Path) -> None:
        """Release the mapping of a file that is removed."""
        self._release(path)
        self._last = None if path == self._last else self._last

    def resume_after(self, path: Path) -> bool:
        """Treat a file of an earlier process as the last one written; False if it is not in the ring."""
        if path in self.paths:
            self._last = path
        return path in self.paths

    @property
    def has_files(self) -> bool:
        """Whether any of its files exists."""
        return bool(self._images) or any(path.exists() for path in self.paths)

    def release(self) -> None:
        """Release the mappings, because the folder might have been replaced."""
        for path in list(self._images):
            self._release(path)

    def remove(self) -> None:
        """Remove the files, which frees their memory. Raises OSError."""
        self.release()
        self._last = self._verified = None
        for path in self.paths:
            path.unlink(missing_ok=True)

    def _release(self, path: Path) -> None:
        if path in self._images:
            self._unmap(path)
            del self._images[path]


class CutOrder(NamedTuple):
    """The controller's order about states in memory. -1 for none."""

    at: int = -1
    """Keep the first state that is saved from this iteration on."""
    good: int = -1
    """The iteration that enough nodes have."""


def write_cut_note(folder: Path, wanted: CutOrder) -> None:
    """Leave the order for scripts without a session, to which the agent has no connection. Raises OSError."""
    write_note(folder / NOTE, msgpack.packb(list(wanted)))


def read_cut_note(folder: Path) -> CutOrder:
    """Read that note; no order without one."""
    try:
        at, good = msgpack.unpackb((folder / NOTE).read_bytes())
        return CutOrder(int(at), int(good))
    except (OSError, ValueError, TypeError):
        return CutOrder()


class Cuts:
    """The cuts of one rank: for each kind of image a ring of files that its other states do not overwrite."""

    def __init__(
        self,
        folder: Path | None,
        slot: int,
        say: Callable[[str], None] = lambda text: None,
        unmap: Callable[[Path], None] = lambda path: None,
    ):
        self._folder = folder  # None keeps nothing
        self._say = say  # called with one line when there is no room
        self._slot, self._unmap = slot, unmap
        self.wanted = CutOrder()  # set by the channel's thread
        self.unwanted = False  # set by it too: remove all cuts
        self._rings: dict[str, ImageRing] = {}
        self._warned = False

    def on_order(self, message: Cut) -> None:
        """Take over the agent's order to keep an iteration, or none."""
        if message.none:
            self.wanted, self.unwanted = CutOrder(), True
        else:
            self.wanted = CutOrder(message.iteration, message.good)

    def is_due(self, iteration: int) -> bool:
        """Whether the state after which `iteration` comes next must be kept."""
        return self._folder is not None and iteration == self.wanted.at

    def reserve(self, kind: str, head_bytes: int, data_bytes: int) -> tuple[ImageRing, Image]:
        """Return a torn image for a cut, and its ring. Raises OSError if there is no room."""
        ring = self._ring(kind)
        image = ring.reserve(head_bytes, data_bytes, self.wanted.good)
        self._warned = False
        return ring, image

    def write(self, key: Key, head: bytes, data_bytes: int, fill: Callable[[Image], bytes | None]) -> bool:
        """Write an image of this key, whose data fill(image) writes, which may return their digest; returns whether
        there was room."""
        try:
            self._ring(key.kind).write(key, head, data_bytes, fill, self.wanted.good)
        except OSError as error:
            self.complain(error)
            return False
        self._warned = False
        return True

    def complain(self, error: OSError) -> None:
        """Report a lack of room, once until there is room again."""
        if not self._warned:
            self._warned = True
            self._say(f"no copies of the training state are kept for other nodes, the training goes on: {error}")

    def paths(self, kind: str) -> list[Path]:
        """Return the files of one kind of image."""
        return self._ring(kind).paths

    def forget(self, path: Path) -> None:
        """Release the mapping of a file that is removed."""
        for ring in self._rings.values():
            ring.forget(path)

    def release(self) -> None:
        """Release the mappings."""
        for ring in self._rings.values():
            ring.release()

    def remove_unwanted(self) -> None:
        """Remove the files if the controller wants no cut. Freeing their memory takes seconds, so this is for the
        thread that writes."""
        if self.unwanted:
            self.unwanted = False
            with contextlib.suppress(Exception):  # also errors of a GPU's driver: the copies go on
                for ring in self._rings.values():
                    ring.remove()

    def _ring(self, kind: str) -> ImageRing:
        assert self._folder is not None
        if kind not in self._rings:
            self._rings[kind] = ImageRing(ring_paths(self._folder, f"{CUT_PREFIX}{kind}", self._slot), self._unmap)
        return self._rings[kind]
