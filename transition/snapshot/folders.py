"""The folder of a job's checkpoints: which of them are whole, and which are removed. Ranks and agents look at it."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unicron.transition.snapshot.files import DAMAGED
from unicron.transition.snapshot.images import Key

STALE_SECONDS = 86400.0  # a file that was being written when its writer died
OLD_NAME = re.compile(r"iteration-(\d+)\.pt")  # of the first release, one file
_FOLDER = re.compile(r"iteration-(\d+)")
_FILE = re.compile(r"([0-9a-f]{8})\.place-(\d+)-of-(\d+)\.shard-(\d+)-of-(\d+)\.(?:pt|image)")


class Found(NamedTuple):
    """A checkpoint that has all its files. iteration: the one to go on with."""

    iteration: int
    paths: tuple[Path, ...]

    @property
    def mark(self) -> str:
        """Of all its files; empty in those of the first release."""
        match = _FILE.fullmatch(self.paths[0].name)
        return match[1] if match else ""


def whole(folder: Path) -> list[Found]:
    """All whole checkpoints in `folder`, the newest first. Raises OSError."""
    found: list[Found] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := OLD_NAME.fullmatch(path.name):
            found.append(Found(int(match[1]), (path,)))
        elif match := _FOLDER.fullmatch(path.name):
            found += [Found(int(match[1]), paths) for paths in _sets(path)]
    return sorted(found, key=lambda each: (each.iteration, each.paths), reverse=True)


def prunes(key: Key) -> bool:
    """Of all who write a checkpoint's files the writer of this one removes older checkpoints: each look for them is one
    at the names of all files. Without this file no checkpoint is whole, so there is none that makes others old."""
    return key.place == 0 and key.shard == 0


def prune(folder: Path, keep: int) -> int:
    """Remove what is older than the newest `keep`; returns the newest iteration, -1 where nothing is whole. Others may
    do so at the same time. Raises OSError."""
    iterations = sorted({each.iteration for each in whole(folder)}, reverse=True)
    oldest = iterations[keep - 1] if len(iterations) >= keep else 0
    for path in folder.iterdir():
        match = OLD_NAME.fullmatch(path.name) or _FOLDER.fullmatch(path.name)
        if match and int(match[1]) < oldest:
            _remove(path)
    for new in _unfinished(folder):
        with contextlib.suppress(OSError):
            if time.time() - new.stat().st_mtime > STALE_SECONDS:
                new.unlink()
    return iterations[0] if iterations else -1


def _unfinished(folder: Path) -> Iterator[Path]:
    """Files that somebody writes, or wrote when it died."""
    for path in folder.iterdir():
        if _FOLDER.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another one has removed it meanwhile
                yield from [each for each in path.iterdir() if each.name.endswith(".new")]
        elif path.name.startswith("iteration-") and path.name.endswith(".new"):
            yield path


class Begun(NamedTuple):
    """A file of a checkpoint. part: place, of how many, shard, of how many. whole: it has its own name, and nobody has
    found its checkpoint damaged."""

    path: Path
    iteration: int
    part: tuple[int, ...]
    whole: bool


def begun(folder: Path, iteration: int) -> Iterator[Begun]:
    """The files of all checkpoints from that of `iteration` on, also those that somebody writes."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match and int(match[1]) >= iteration:
            for name in (names := _names(path)):
                if file := _FILE.match(name):
                    sound = file.end() == len(name) and f"{file[1]}.{DAMAGED}" not in names
                    yield Begun(path / name, int(match[1]), tuple(map(int, file.groups()[1:])), sound)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sets(folder: Path) -> list[tuple[Path, ...]]:
    """The sets of files in one checkpoint's folder that are complete."""
    sets: dict[tuple[str, int], dict[tuple[int, int], dict[int, Path]]] = defaultdict(lambda: defaultdict(dict))
    names = _names(folder)
    for path in map(folder.joinpath, names):
        match = _FILE.fullmatch(path.name)
        if match and f"{match[1]}.{DAMAGED}" not in names:
            place, size, shard, count = map(int, match.groups()[1:])
            sets[match[1], size][place, count][shard] = path
    return [chosen for (_, size), files in sorted(sets.items()) if (chosen := _chosen(files, size)) is not None]


def _names(folder: Path) -> set[str]:
    """Of the files in a checkpoint's folder, which another one may have removed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return {path.name for path in folder.iterdir()}
    return set()


def _chosen(files: dict[tuple[int, int], dict[int, Path]], size: int) -> tuple[Path, ...] | None:
    """For each place all its shards; None where some are missing. files: (place, count) -> shard -> path."""
    chosen: list[Path] = []
    for place in range(size):
        complete = [shards for (at, count), shards in sorted(files.items()) if at == place and len(shards) == count]
        if not complete:
            return None
        chosen += [path for _, path in sorted(complete[0].items())]
    return tuple(chosen)
