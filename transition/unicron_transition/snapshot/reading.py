"""Reads files of a checkpoint. They may be on a file system that fails, and may come from anybody.

Nothing of them is mapped: a file that is cut, or whose server answers EIO or ESTALE, is an OSError or a short read here
and would be SIGBUS there, which ends a process without a word.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

PIECE = 1 << 22  # bytes
LEAST_LISTS = 1000
# A file may be as large as this, and as so many times what is written in it: one that is nothing but a hole can have
# any length. Zeros may be holes, too.
ROOM, DENSE = 1 << 24, 16
# Of a checkpoint: tensors, files, and bytes of JSON. The largest models have about 210,000 tensors and 200 files
# (docs/behaviour/checkpoint-files.md).
MOST_NAMES, MOST_FILES, MOST_TEXT = 300_000, 10_000, 1 << 26
# What stands where a file should be, by how it begins (docs/behaviour/checkpoint-layouts.md), and how many bytes tell.
STAND_INS = (
    (
        rb"version https?://(git-lfs|hawser|git-media)\.",
        "this is a Git LFS pointer: fetch the file with `git lfs pull`",
    ),
    (rb"/annex/objects/", "this is a pointer of git-annex: fetch the file with `git annex get`"),
    (rb"# xet version ", "this is a pointer of git-xet: fetch the file with `git xet materialize`"),
    (
        rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml)",
        "this is a page of a web server (HTML): fetch the file again, with the login or token that its server asks for",
    ),
)
FRONT = 256
MOST_ENTRIES = 100_000  # names of a folder that are looked at
# What a file system answers that has lost what it was given, or a part of it.
LOST_ERRORS = (errno.EIO, errno.ESTALE, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EREMOTEIO)


def open_plain(path: Path, holes: bool = False) -> BinaryIO:
    """A plain file, opened without a buffer. holes: it may be one, for the most part.

    Raises OSError, also for a pipe, a device or a folder, where nobody waits, for what stands in the place of a file,
    and within :func:`files_of` for a file of somebody else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, _why_gone(path) or error.strerror, str(path)) from None
    found = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if _owners and found.st_uid not in _owners:
            raise OSError(errno.EPERM, "not of the owner of its folder: work as that user, not as root", str(path))
        if not holes and found.st_size > ROOM + DENSE * _count_written(descriptor, found):
            raise OSError(errno.EFBIG, "larger than what is written in it: it is damaged", str(path))
        front = os.pread(descriptor, FRONT, 0) if found.st_size <= ROOM else b""
        if instead := next((what for begin, what in STAND_INS if re.match(begin, front, re.IGNORECASE)), ""):
            raise OSError(errno.EINVAL, instead, str(path))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb", buffering=0)


def names_in(folder: Path) -> list[str]:
    """The names in a folder, no more than are looked at; none of one that cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(each.name for each in itertools.islice(entries, MOST_ENTRIES))
    except OSError:
        return []


def text_in(file: BinaryIO) -> str:
    """That an open file begins as a text, such as a server's answer that it has no such file; "" where it does not."""
    front = os.pread(file.fileno(), FRONT, 0).strip().decode("ascii", errors="replace").partition("\n")[0]
    return f" but a text: {front[:60]!r}" if front and front.isprintable() and front.isascii() else ""


def _why_gone(path: Path) -> str:
    """Why a file is not there whose name is: the name is a link; "" where it is none."""
    try:
        target = os.readlink(path)
    except OSError:
        return ""
    how = ": fetch the file with `git annex get`" if "annex/objects/" in target else ""
    return f"this is a link to {target[:200]}, which is not there{how}"


_owners: set[int] = set()  # of the files that are read; empty for anybody


@contextlib.contextmanager
def files_of(folder: Path) -> Iterator[None]:
    """Makes root read nothing but files of the folder's owner meanwhile: a link that he puts there would give him what
    he may not read. Raises OSError, also where a link of somebody else leads to the folder."""
    owner, place = folder.stat().st_uid if folder.exists() else 0, folder.absolute()
    if os.geteuid() == 0 and folder.exists():
        for each in (place, *place.parents):
            if each.is_symlink() and each.lstat().st_uid not in (0, owner):
                raise OSError(errno.EPERM, "a link of somebody else: name the folder itself", str(each))
        _owners.update({owner} - {0})
    try:
        yield
    finally:
        _owners.discard(owner)


def _count_written(descriptor: int, found: os.stat_result) -> int:
    """Bytes that are written in a file, or enough of them. The count of blocks is quick to ask for, and may be low: of
    what is compressed, on tape, or not on disk yet."""
    data, at, enough = 512 * found.st_blocks, 0, found.st_size // DENSE
    if data >= enough:
        return data
    data = 0
    while at < found.st_size and data < enough:
        begin = behind_hole(descriptor, at)
        at = os.lseek(descriptor, begin, os.SEEK_HOLE) if begin < found.st_size else found.st_size
        data += at - begin
    os.lseek(descriptor, 0, os.SEEK_SET)
    return data


def count_written(path: Path) -> int:
    """Count the bytes of a file that are not holes, or enough of them. Raises OSError."""
    with open_plain(path, holes=True) as file:
        return _count_written(file.fileno(), os.fstat(file.fileno()))


def behind_hole(descriptor: int, position: int) -> int:
    """Return where something is written in a file from there on; its end where nothing is. Raises OSError."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.lseek(descriptor, 0, os.SEEK_END)


def allowance(file: BinaryIO) -> int:
    """Return how many bytes of an open file may be read to learn what is in it."""
    found = os.fstat(file.fileno())
    return ROOM + DENSE * _count_written(file.fileno(), found)


def read_small(path: Path) -> bytes:
    """The whole of a file that says what is in others. Raises OSError."""
    with open_plain(path) as file:
        return b"".join(pieces(file, path, 0, os.fstat(file.fileno()).st_size))


def parse_json(data: bytes, each: int = 1, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON. It is looked at first: a few bytes may describe what takes a hundred times as many. each: how
    many values there are for one name; hook: as the module json has it.

    Raises ValueError, also for more than a checkpoint has, and RecursionError.
    """
    most = each * MOST_NAMES
    kinds = (data.count(b":"), data.count(b"{") + data.count(b"["), data.count(b",") // 2)
    if len(data) > (MOST_TEXT if data.isascii() else MOST_TEXT // 4) or max(kinds) > most:
        raise ValueError(f"more than the {MOST_NAMES} names that a checkpoint may have, or than the text for them")
    return json.loads(data, object_pairs_hook=hook)


def unpack(data: bytes) -> Any:
    """Parse the MessagePack that describes an image. An empty list takes one byte there, and 64 in memory; what ranks
    write has four bytes and more for each list. Raises ValueError, also for far more lists."""
    left = LEAST_LISTS + len(data) // 3

    def count(value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("it describes far more than itself")
        return value

    return msgpack.unpackb(data, strict_map_key=False, list_hook=count, object_hook=count)


def pieces(file: BinaryIO, path: Path, begin: int, size: int) -> Iterator[bytearray]:
    """So many bytes from there on, piece by piece. Raises OSError where the file ends before."""
    for at in range(begin, begin + size, PIECE):
        into = bytearray(min(PIECE, begin + size - at))
        read_into(file, path, at, memoryview(into))
        yield into


def read_into(file: BinaryIO, path: Path, begin: int, into: memoryview) -> None:
    """Fill `into` with the bytes from there on. Raises OSError where the file ends before."""
    while into:
        count = os.preadv(file.fileno(), [into[: 1 << 30]], begin)
        if not count:
            raise OSError(errno.EIO, f"cut off: it ends before byte {begin + len(into)}", str(path))
        begin, into = begin + count, into[count:]
