"""A ring of image files, so that one is whole while another is written. Every image in memory is written here or in the
pool of a distributed optimizer's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unicron_transition.snapshot.checkpoint_file import is_aside
from unicron_transition.snapshot.image_format import SUFFIX, Image, Key, inventory

BUFFERS = 2


def ring_paths(folder: Path, name: str, slot: int, count: int = BUFFERS) -> list[Path]:
    """The files of a ring: NAME-SLOT-NUMBER.image."""
    return [folder / f"{name}-{slot}-{number}{SUFFIX}" for number in range(count)]


class ImageRing:
    """Files of one folder that one process alone writes. unmap(path): called before the mapping of one is released.
    replace: each image is a new file, so that readers keep what they have mapped."""

    def __init__(self, paths: Sequence[Path], unmap: Callable[[Path], None] = lambda path: None, replace: bool = False):
        self.paths = list(paths)
        self._unmap, self._replace = unmap, replace
        self._images: dict[Path, Image] = {}
        self._last: Path | None = None  # written by this process

    def write(self, key: Key, head: bytes, data_bytes: int, fill: Callable[[Image], None], needed: int = -1) -> Path:
        """An image of this key, whole; fill(image) writes its data. needed: as for :meth:`reserve`. Raises OSError
        where there is no room."""
        image = self.reserve(len(head), data_bytes, needed)
        fill(image)
        self.finish(image, key, head, data_bytes)
        return image.path

    def reserve(self, head_bytes: int, data_bytes: int, needed: int = -1) -> Image:
        """The next file, torn, with room for so much. needed: the iteration of an image that is not written over.
        Raises OSError where there is no room."""
        path = self._next(needed)
        image = self._images.get(path) if not self._replace else None
        if image is None or not image.fits(head_bytes, data_bytes) or not path.exists() or is_aside(path):
            self._release(path)
            path.unlink(missing_ok=True)  # first: else there would be one more for a moment
            image = self._images[path] = Image(path, head_bytes + head_bytes // 4, data_bytes)
        image.mark_torn()
        return image

    def finish(self, image: Image, key: Key, head: bytes, data_bytes: int) -> None:
        """The data are there: the image is whole, and the next one is another."""
        image.mark_whole(key, head, data_bytes)
        self._last = image.path

    def _next(self, needed: int) -> Path:
        """The file to write: not the one that holds iteration `needed`, if one does, nor the one that was written last.

        A new process begins with the one that holds least: what the process before it has left is not overwritten
        before its time.
        """
        if self._last is not None and needed < 0:
            return self.paths[(self.paths.index(self._last) + 1) % len(self.paths)]
        left = {found.path: found.key.iteration for found in inventory(self.paths[0].parent)}
        free = [path for path in self.paths if needed < 0 or left.get(path) != needed]
        return min(free or self.paths, key=lambda path: (path == self._last, left.get(path, -1)))

    def resume_after(self, path: Path) -> bool:
        """Treat a file of an earlier process as the last one written; False where it is none of the ring's."""
        if path in self.paths:
            self._last = path
        return path in self.paths

    @property
    def has_files(self) -> bool:
        """Whether any of its files is there."""
        return bool(self._images) or any(path.exists() for path in self.paths)

    def release(self) -> None:
        """Let go of the mappings; the folder may be another one by now."""
        for path in list(self._images):
            self._release(path)

    def remove(self) -> None:
        """Remove the files, which frees their memory. Raises OSError."""
        self.release()
        self._last = None
        for path in self.paths:
            path.unlink(missing_ok=True)

    def _release(self, path: Path) -> None:
        if path in self._images:
            self._unmap(path)
            del self._images[path]
