"""Samples in tar files, laid out as WebDataset does: the files of one sample follow each other and share their name up
to its first dot; the rest of the name names the part.

The place of each part is found once, with Python's `tarfile`, and kept in an index beside the tar file, so that any
sample can be read directly.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgpack

from unicron_transition.data.files import OpenFiles, Sample, Shards

INDEX = ".unicron-index"
VERSION = 2
_META = re.compile(r"__[^/]*__($|/)")  # metadata, which WebDataset (1.0.2) skips
Parts = dict[str, tuple[int, int]]  # name -> (first byte, bytes)


class Tars:
    """A map-style dataset of the samples in tar files, in the order of the files' names.

    Parameters
    ----------
    paths
        The files, or a pattern such as "/data/train-*.tar".
    index
        A folder for the indices, by default that of each tar file. Without write access each process makes them again.
    decode
        `decode(sample)` converts a sample; by default it is a dictionary of bytes by part, with its name in "__key__".

    Raises
    ------
    ValueError
        If there are no files, or one is compressed or no tar file.

    Examples
    --------
    >>> import tarfile
    >>> folder.mkdir()
    >>> (folder / "0001.txt").write_text("a sample")
    8
    >>> with tarfile.open(folder / "train-0.tar", "w") as tar:
    ...     tar.add(folder / "0001.txt", "0001.txt")
    >>> unicron.data.Tars(folder / "train-*.tar", decode=lambda sample: sample["txt"])[0]
    b'a sample'
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        index: str | os.PathLike[str] | None = None,
        decode: Callable[[Sample], Any] | None = None,
    ):
        pattern = isinstance(paths, str | os.PathLike)
        files = sorted(glob.glob(os.fspath(paths))) if pattern else sorted(map(os.fspath, paths))  # type: ignore[arg-type]
        if not files:
            raise ValueError(f"no tar files: {paths}; check the path")
        self._paths, self._decode = files, decode
        self._samples = [_read_index(Path(path), None if index is None else Path(index)) for path in files]
        self._shards, self._files = Shards(map(len, self._samples)), OpenFiles()

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, number: int) -> Any:
        shard, place = self._shards.find(number)
        key, parts = self._samples[shard][place]
        path = self._paths[shard]
        sample: Sample = {"__key__": key}
        sample |= {name: self._files.read(path, begin, size) for name, (begin, size) in parts.items()}
        return sample if self._decode is None else self._decode(sample)


def _read_index(path: Path, folder: Path | None) -> list[tuple[str, Parts]]:
    """Return the samples of one file, from its index if that is up to date."""
    kept = (folder or path.parent) / f"{path.name}{INDEX}"
    status = path.stat()
    mark = [VERSION, status.st_size, status.st_mtime_ns]
    with contextlib.suppress(OSError, ValueError, msgpack.UnpackException):
        index = msgpack.unpackb(kept.read_bytes(), strict_map_key=False)
        if index["mark"] == mark:
            return [(key, {name: (begin, size) for name, begin, size in parts}) for key, parts in index["samples"]]
    samples = _scan(path)
    entries = [(key, [(name, *where) for name, where in parts.items()]) for key, parts in samples]
    new = kept.with_name(f"{kept.name}.{os.getpid()}.new")
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(msgpack.packb({"mark": mark, "samples": entries}))
        new.replace(kept)
    return samples


def _scan(path: Path) -> list[tuple[str, Parts]]:
    samples: list[tuple[str, Parts]] = []
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, dot, part = name.partition(".")
                if not member.isfile() or not stem or not dot or member.issparse() or _META.match(member.name):
                    continue
                key, part = f"{folder}/{stem}" if folder else stem, part.lower()
                if not samples or samples[-1][0] != key:
                    samples.append((key, {}))
                if part in samples[-1][1]:
                    raise ValueError(
                        f"{path} has two files {member.name}: give each part of a sample a name of its own"
                    )
                samples[-1][1][part] = member.offset_data, member.size
    except tarfile.TarError as error:
        raise ValueError(f"{path} is no plain tar file ({error}): unpack a compressed one first") from None
    return samples
