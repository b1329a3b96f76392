"""The folder of a job's checkpoints: finds the whole ones, removes old ones, and decides whose turn it is to write a
part. Ranks and agents use it."""

from __future__ import annotations

import contextlib
import itertools
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

from unicron_transition.snapshot.checkpoint_file import DAMAGE_SUFFIX, VERIFIED_SUFFIX, folder_name
from unicron_transition.snapshot.image_format import Key

FOREIGN = "foreign"  # the mark of a checkpoint of another format
STALE_SECONDS = 86400.0  # the age of an unfinished file, or a marker, whose process must have died
HOLDER_SUFFIX = "held."  # the start of a marker's name in a checkpoint's folder
UNSOUND_SUFFIX = "unsound"  # of the folder of a checkpoint that is set aside, because its state was found to be wrong
FOLDER = re.compile(r"iteration-(\d+)")
_FILE = re.compile(
    r"([0-9a-f]{8})\.place-(\d+)-of-(\d+)\.shard-(\d+)-of-(\d+)(?:\.slice-(\d+)-of-(\d+)\.([0-9a-f]{8}))?\.image"
)
Part = tuple[int, ...]  # a part of a checkpoint: place, number of places, shard, number of shards


def part_of(key: Key) -> Part:
    """Return the part of a checkpoint that an image has."""
    return key.place, key.size, key.shard, key.count


class WholeCheckpoint(NamedTuple):
    """A checkpoint that has all its files."""

    iteration: int
    """The iteration to go on with."""
    paths: tuple[Path, ...]
    foreign: bool = False
    """Whether it is of another format, and `paths` is the folder that the script named."""

    @property
    def mark(self) -> str:
        """The mark of all its files."""
        return FOREIGN if self.foreign else self.paths[0].name.split(".")[0]

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.paths[0] if self.foreign else self.paths[0].parent

    @property
    def verified(self) -> bool:
        """Whether an audit has found its state sound."""
        return not self.foreign and (self.folder / f"{self.mark}.{VERIFIED_SUFFIX}").exists()


def whole(folder: Path) -> list[WholeCheckpoint]:
    """List the whole checkpoints in `folder`, the newest first. Raises OSError."""
    found = [WholeCheckpoint(iteration, paths) for iteration, path in _folders(folder) for paths in _sets(path)]
    return sorted(found, key=lambda each: (each.iteration, each.paths), reverse=True)


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """List the iteration and the folder of each checkpoint."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [(int(match[1]), path) for path in paths if (match := FOLDER.fullmatch(path.name))]


def prunes(key: Key) -> bool:
    """Whether the writer of this part removes older checkpoints. Of its slices each writer does, since it could be the
    only one that can write; writers of other parts do not, since that lists all files. Without this part no checkpoint
    is whole, so it never comes too early."""
    return key.place == 0 and key.shard == 0


def prune(folder: Path, keep: int) -> int:
    """Remove checkpoints older than the newest `keep`, unless they are held, and return the newest iteration, -1 if no
    checkpoint is whole. The newest verified one stays, too. Others can do so at the same time. Raises OSError."""
    there = whole(folder)
    iterations = sorted({each.iteration for each in there}, reverse=True)
    oldest = iterations[keep - 1] if len(iterations) >= keep else 0
    verified = next((each.iteration for each in there if each.verified), -1)
    for iteration, path in _folders(folder):
        if iteration < oldest and iteration != verified and not _is_held(path):
            shutil.rmtree(path, ignore_errors=True)
    for _, path in _folders(folder):
        for name in _names(path):
            if name.endswith(".new") and _is_stale(path / name):
                with contextlib.suppress(OSError):
                    (path / name).unlink()
    return iterations[0] if iterations else -1


# ------------------------------------------------------------ what is known of a state
def note_verified(folder: Path, iteration: int, mark: str) -> None:
    """Note that an audit has found the state of `iteration` with this mark sound. The note may come before the files.
    Raises OSError."""
    path = folder / folder_name(iteration)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{mark}.{VERIFIED_SUFFIX}").touch()


def set_aside_after(folder: Path, iteration: int) -> list[Path]:
    """Rename the folders of all checkpoints after `iteration`, whose states are unsound, so that nobody begins from
    them. Nothing is removed. Returns their new names. Raises OSError."""
    moved = []
    for at, path in sorted(_folders(folder)):
        if at <= iteration:
            continue
        new = path.with_name(f"{path.name}.{UNSOUND_SUFFIX}")
        if new.exists():  # from an earlier time
            new = new.with_name(f"{new.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):  # another rank has just done it
            path.rename(new)
            moved.append(new)
    return moved


# ------------------------------------------------------------ holding checkpoints
def hold(path: Path, reader: str) -> None:
    """Keep the checkpoint in the folder `path` until :func:`let_go`, or for a day if the reader is killed. reader: a
    unique name. Raises OSError, also if the folder is gone."""
    (path / f"{HOLDER_SUFFIX}{reader}").touch()


def let_go(path: Path, reader: str) -> None:
    """End :func:`hold`, if there was one."""
    with contextlib.suppress(OSError):
        (path / f"{HOLDER_SUFFIX}{reader}").unlink()


@contextlib.contextmanager
def holding(path: Path, reader: str = "") -> Iterator[bool]:
    """Keep a job from removing the checkpoint in the folder `path` while it is read. Gives False if the folder is gone
    or cannot be written to. reader: by default a name for this call."""
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
    """Return a unique name that shows people who reads."""
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
    """A file of a checkpoint, complete or not, or a slice of one."""

    path: Path
    iteration: int
    part: Part
    whole: bool
    """Whether it is complete, with all of its slices, and was not found damaged."""

    @property
    def progress(self) -> tuple[int, int]:
        """A value that changes while the file is written."""
        if self.whole:
            return 0, 0
        try:
            status = self.path.stat()
        except OSError:
            return -1, -1  # it is gone, or complete by now
        return status.st_size, status.st_mtime_ns


def files_in_progress(folder: Path, iteration: int) -> Iterator[FileInProgress]:
    """Yield the files of all checkpoints from `iteration` on, also unfinished ones."""
    for at, path in _folders(folder):
        names = _names(path) if at >= iteration else set()
        sound = set(itertools.chain.from_iterable(_whole_files(names).values()))
        for name in names:
            if file := _FILE.match(name):
                yield FileInProgress(path / name, at, _part_in(file), name in sound)


def slices_of_other_states(own: Path, files: Iterable[FileInProgress]) -> list[int]:
    """Return the numbers of the slices that do not go together with the slice `own`, since the nodes that wrote them
    hold another state of the same place and iteration."""
    mine = _FILE.match(own.name)
    assert mine is not None
    found = [file for each in files if (file := _FILE.match(each.path.name)) and each.path.parent == own.parent]
    others = [each for each in found if each.groups()[:5] == mine.groups()[:5] and each[7] == mine[7]]
    return sorted({int(each[6]) for each in others if each[8] != mine[8]})


def _part_in(file: re.Match[str]) -> Part:
    return tuple(map(int, file.groups()[1:5]))


class Turn:
    """Parts of a checkpoint that other processes write first. This process's turn comes at :attr:`until`, when the
    others have done nothing for `patience` seconds.

    A process writes its parts one after the other, so one new or growing file shows that it is at work on all of them.
    Only changes between two calls count, because a dead process's file does not change, and the file server's clock
    could differ.
    """

    def __init__(
        self, due: Mapping[Part, int], patience: float, now: float, exactly: bool = False, stall: float | None = None
    ):
        self._due = dict(due)  # part -> the oldest iteration of which a file will do
        self._exactly = exactly  # a file of a later iteration will not do
        self._stall = patience if stall is None else stall  # seconds for which a growing file can pause
        self._seen: dict[Path, tuple[int, int]] | None = None
        self._there: set[Part] = set()
        self.until = now + patience

    def note_files(self, begun: Iterable[FileInProgress], now: float) -> None:
        """Note the progress of the files that exist now."""
        ours = [each for each in begun if each.iteration >= self._due.get(each.part, each.iteration + 1)]
        seen = {each.path: each.progress for each in ours}
        if self._seen is not None and any(self._seen.get(path) != what for path, what in seen.items()):
            self.until = max(self.until, now + self._stall)
        self._seen = (self._seen or {}) | seen
        counts = (each for each in ours if not self._exactly or each.iteration == self._due[each.part])
        self._there |= {each.part for each in counts if each.whole}

    @property
    def missing(self) -> dict[Part, int]:
        """The parts that are not complete yet, as in `due`."""
        return {part: iteration for part, iteration in self._due.items() if part not in self._there}


# ------------------------------------------------------------ which are whole
def _sets(folder: Path) -> list[tuple[Path, ...]]:
    """Return the complete sets of files in a checkpoint's folder."""
    sets: dict[tuple[str, int], dict[tuple[int, int], dict[int, tuple[Path, ...]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for (mark, (place, size, shard, count)), names in _whole_files(_names(folder)).items():
        sets[mark, size][place, count][shard] = tuple(folder / name for name in names)
    return [chosen for (_, size), files in sorted(sets.items()) if (chosen := _choose(files, size)) is not None]


def _whole_files(names: set[str]) -> dict[tuple[str, Part], tuple[str, ...]]:
    """Return the name of the file of each mark and part, or the names of all slices of it. A file that was found
    damaged, or whose mark was, is not among them."""
    found: dict[tuple[str, Part], tuple[str, ...]] = {}
    slices: dict[tuple[str, Part, int, str], dict[int, str]] = defaultdict(dict)
    for name in names:
        file = _FILE.fullmatch(name)
        if file is None or not names.isdisjoint({f"{file[1]}.{DAMAGE_SUFFIX}", f"{name}.{DAMAGE_SUFFIX}"}):
            continue
        if file[6] is None:
            found[file[1], _part_in(file)] = (name,)
        else:
            slices[file[1], _part_in(file), int(file[7]), file[8]][int(file[6])] = name
    for (mark, part, count, _), each in sorted(slices.items()):
        if len(each) == count and max(each) < count:
            found.setdefault((mark, part), tuple(each[number] for number in range(count)))
    return found


def _names(folder: Path) -> set[str]:
    """Return the names in a checkpoint's folder, none if another process has removed it."""
    with contextlib.suppress(FileNotFoundError):
        return {path.name for path in folder.iterdir()}
    return set()


def _choose(files: dict[tuple[int, int], dict[int, tuple[Path, ...]]], size: int) -> tuple[Path, ...] | None:
    """Return the files of all places and shards, None if some are missing. files: (place, count) -> shard -> paths."""
    chosen: list[Path] = []
    for place in range(size):
        complete = [shards for (at, count), shards in sorted(files.items()) if at == place and len(shards) == count]
        if not complete:
            return None
        chosen += [path for _, paths in sorted(complete[0].items()) for path in paths]
    return tuple(chosen)
