"""Files of images that take turns, so that one is whole while another is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unicron.transition.snapshot.files import is_aside
from unicron.transition.snapshot.images import Image, inventory

BUFFERS = 2


class Turns:
    """Of one process, which alone writes these files; they lie in one folder. let_go(path): called before the mapping
    of one is."""

    def __init__(self, paths: Sequence[Path], let_go: Callable[[Path], None] = lambda path: None):
        self.paths = list(paths)
        self._let_go = let_go
        self._images: dict[Path, Image] = {}
        self._last: Path | None = None  # written by this process

    def next(self, keep: int = -1) -> Path:
        """The file to write: not the one that holds iteration `keep`, if one does, nor the one that was written last.

        A new process begins with the one that holds least: what the process before it has left is not overwritten
        before its time.
        """
        if self._last is not None and keep < 0:
            return self.paths[(self.paths.index(self._last) + 1) % len(self.paths)]
        left = {found.path: found.key.iteration for found in inventory(self.paths[0].parent)}
        free = [path for path in self.paths if keep < 0 or left.get(path) != keep]
        return min(free or self.paths, key=lambda path: (path == self._last, left.get(path, -1)))

    def room(self, path: Path, head_bytes: int, data_bytes: int) -> Image:
        """The file, with room for so much. Raises OSError where there is none."""
        image = self._images.get(path)
        if image is not None and image.fits(head_bytes, data_bytes) and path.exists() and not is_aside(path):
            return image
        self._forget(path)
        path.unlink(missing_ok=True)  # first: else there would be one more for a moment
        image = self._images[path] = Image(path, head_bytes + head_bytes // 4, data_bytes)
        return image

    def written(self, path: Path) -> None:
        """It is whole: the next one is another."""
        self._last = path

    @property
    def holds(self) -> bool:
        """There are files."""
        return bool(self._images) or any(path.exists() for path in self.paths)

    def forget(self) -> None:
        """The mappings are let go of; the folder may be another one by now."""
        for path in list(self._images):
            self._forget(path)

    def clear(self) -> None:
        """The files are removed. Raises OSError."""
        self.forget()
        self._last = None
        for path in self.paths:
            path.unlink(missing_ok=True)

    def _forget(self, path: Path) -> None:
        if path in self._images:
            self._let_go(path)
            del self._images[path]
