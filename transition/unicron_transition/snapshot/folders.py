"""The folder of a job's checkpoints: which of them are whole, which are removed, and whose turn it is to write a part.
Ranks and agents look at it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from unicron_transition.snapshot.checkpoint_file import DAMAGE_SUFFIX
from unicron_transition.snapshot.image_format import Key

FOREIGN = "foreign"  # in place of a mark: what the script begins from
STALE_SECONDS = 86400.0  # a file that was being written, or a marker, when its process died
HOLDER_SUFFIX = "held."  # begins the name of a marker in a checkpoint's folder
FOLDER = re.compile(r"iteration-(\d+)")
_FILE = re.compile(r"([0-9a-f]{8})\.place-(\d+)-of-(\d+)\.shard-(\d+)-of-(\d+)\.image")
Part = tuple[int, ...]  # of a checkpoint: place, of how many, shard, of how many


def part_of(key: Key) -> Part:
    """Which part of a checkpoint an image is."""
    return key.place, key.size, key.shard, key.count


class WholeCheckpoint(NamedTuple):
    """A checkpoint that has all its files. iteration: the one to go on with. foreign: it is of another format or
    another folder, and `paths` is the folder that the script has named."""

    iteration: int
    paths: tuple[Path, ...]
    foreign: bool = False

    @property
    def mark(self) -> str:
        """The mark of all its files."""
        return FOREIGN if self.foreign else self.paths[0].name.split(".")[0]

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.paths[0] if self.foreign else self.paths[0].parent


def whole(folder: Path) -> list[WholeCheckpoint]:
    """All whole checkpoints in `folder`, the newest first. Raises OSError."""
    found = [WholeCheckpoint(iteration, paths) for iteration, path in _folders(folder) for paths in _sets(path)]
    return sorted(found, key=lambda each: (each.iteration, each.paths), reverse=True)


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """(iteration, folder) of each checkpoint."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [(int(match[1]), path) for path in paths if (match := FOLDER.fullmatch(path.name))]


def prunes(key: Key) -> bool:
    """Whether the writer of this part removes older checkpoints. One does, since each look for them is one at the names
    of all files; and without this part no checkpoint is whole, so none makes others old."""
    return key.place == 0 and key.shard == 0


def prune(folder: Path, keep: int) -> int:
    """Remove what is older than the newest `keep`, unless it is held; returns the newest iteration, -1 where nothing is
    whole. Others may do so at the same time. Raises OSError."""
    iterations = sorted({each.iteration for each in whole(folder)}, reverse=True)
    oldest = iterations[keep - 1] if len(iterations) >= keep else 0
    for iteration, path in _folders(folder):
        if iteration < oldest and not _is_held(path):
            shutil.rmtree(path, ignore_errors=True)
    for _, path in _folders(folder):
        for name in _names(path):
            if name.endswith(".new") and _is_stale(path / name):
                with contextlib.suppress(OSError):
                    (path / name).unlink()
    return iterations[0] if iterations else -1


# ------------------------------------------------------------ not to be removed
def hold(path: Path, reader: str) -> None:
    """Have the checkpoint in the folder `path` stay until :func:`let_go`, or for a day: who reads it was killed then.
    reader: a name that nobody else has. Raises OSError, also where the folder is gone."""
    (path / f"{HOLDER_SUFFIX}{reader}").touch()


def let_go(path: Path, reader: str) -> None:
    """The end of :func:`hold`, if there was one."""
    with contextlib.suppress(OSError):
        (path / f"{HOLDER_SUFFIX}{reader}").unlink()


@contextlib.contextmanager
def holding(path: Path, reader: str = "") -> Iterator[bool]:
    """The checkpoint in the folder `path` stays meanwhile: a job removes its old ones, and a large one takes long to
    read. Gives False where the folder is gone or cannot be written to; then nothing is done. reader: by default a
    name for this call."""
    name = reader or new_reader()
    try:
        hold(path, name)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        let_go(path, name)


def new_reader() -> str:
    """A name that nobody else has; people see from it who reads."""
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


def _is_held(path: Path) -> bool:
    return any(name.startswith(HOLDER_SUFFIX) and not _is_stale(path / name) for name in _names(path))


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > STALE_SECONDS
    except OSError:
        return False  # it is gone


# ------------------------------------------------------------ whose turn it is
class FileInProgress(NamedTuple):
    """A file of a checkpoint. whole: it has its own name, and nobody has found its checkpoint damaged."""

    path: Path
    iteration: int
    part: Part
    whole: bool

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes while somebody writes it."""
        if self.whole:
            return 0, 0
        try:
            status = self.path.stat()
        except OSError:
            return -1, -1  # it is gone, or has its own name by now
        return status.st_size, status.st_mtime_ns


def files_in_progress(folder: Path, iteration: int) -> Iterator[FileInProgress]:
    """The files of all checkpoints from that of `iteration` on, also those that somebody writes."""
    for at, path in _folders(folder):
        for name in (names := _names(path)) if at >= iteration else ():
            if file := _FILE.match(name):
                sound = file.end() == len(name) and f"{file[1]}.{DAMAGE_SUFFIX}" not in names
                yield FileInProgress(path / name, at, tuple(map(int, file.groups()[1:])), sound)


class Turn:
    """Parts of a checkpoint that others write first. This process's turn comes at :attr:`until`, when the others have
    done nothing for `patience` seconds.

    due: part -> the oldest iteration of which a file will do. exactly: a later one will not. stall: seconds for which
    a file that has grown may stand still. A process writes its parts one after the other, so one file that comes or
    grows shows that all of them are in hand, also those that nobody has begun. Only what changes between two looks
    counts: what a process has left that died does not change, and the file server's clock may be another one.
    """

    def __init__(
        self, due: Mapping[Part, int], patience: float, now: float, exactly: bool = False, stall: float | None = None
    ):
        self._due, self._exactly, self._stall = dict(due), exactly, patience if stall is None else stall
        self._seen: dict[Path, tuple[int, int]] | None = None
        self._there: set[Part] = set()
        self.until = now + patience

    def note_files(self, begun: Iterable[FileInProgress], now: float) -> None:
        """begun: the files that there are."""
        ours = [each for each in begun if each.iteration >= self._due.get(each.part, each.iteration + 1)]
        seen = {each.path: each.progress for each in ours}
        if self._seen is not None and any(self._seen.get(path) != what for path, what in seen.items()):
            self.until = max(self.until, now + self._stall)
        self._seen = (self._seen or {}) | seen
        counts = (each for each in ours if not self._exactly or each.iteration == self._due[each.part])
        self._there |= {each.part for each in counts if each.whole}

    @property
    def missing(self) -> dict[Part, int]:
        """The parts that nobody has written yet, as in `due`."""
        return {part: iteration for part, iteration in self._due.items() if part not in self._there}


# ------------------------------------------------------------ which are whole
def _sets(folder: Path) -> list[tuple[Path, ...]]:
    """The sets of files in one checkpoint's folder that are complete."""
    sets: dict[tuple[str, int], dict[tuple[int, int], dict[int, Path]]] = defaultdict(lambda: defaultdict(dict))
    names = _names(folder)
    for path in map(folder.joinpath, names):
        match = _FILE.fullmatch(path.name)
        if match and f"{match[1]}.{DAMAGE_SUFFIX}" not in names:
            place, size, shard, count = map(int, match.groups()[1:])
            sets[match[1], size][place, count][shard] = path
    return [chosen for (_, size), files in sorted(sets.items()) if (chosen := _choose(files, size)) is not None]


def _names(folder: Path) -> set[str]:
    """The names in a checkpoint's folder, which another process may have removed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return {path.name for path in folder.iterdir()}
    return set()


def _choose(files: dict[tuple[int, int], dict[int, Path]], size: int) -> tuple[Path, ...] | None:
    """For each place all its shards; None where some are missing. files: (place, count) -> shard -> path."""
    chosen: list[Path] = []
    for place in range(size):
        complete = [shards for (at, count), shards in sorted(files.items()) if at == place and len(shards) == count]
        if not complete:
            return None
        chosen += [path for _, path in sorted(complete[0].items())]
    return tuple(chosen)
