"""Reads files of a checkpoint, which can be on a failing file system and come from anybody.

They are not mapped: a truncated file, or one whose server answers EIO or ESTALE, causes an OSError or a short read this
way. With a mapping it would cause SIGBUS, which kills a process without a message.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

PlainValues = dict[str, object]  # by name: of an optimizer's group, a schedule, a scaler, a program's arguments
PIECE = 1 << 22  # bytes
LEAST_LISTS = 1000
# A file can have ROOM bytes plus DENSE times the bytes that are written in it. A sparse file could have any length, but
# zeros in an honest file can be holes too.
ROOM, DENSE = 1 << 24, 16
# Limits of tensors, files, and bytes of JSON. The largest models have about 210,000 tensors and 200 files
# (docs/behaviour/checkpoint-files.md).
MOST_NAMES, MOST_FILES, MOST_TEXT = 300_000, 10_000, 1 << 26
# Stand-ins for a file that was not fetched, by their first bytes (docs/behaviour/checkpoint-layouts.md).
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
FRONT = 256  # bytes that are compared with them
MOST_PLACES = 512  # of one read; the kernel takes 1,024
MOST_ENTRIES = 100_000  # names of a folder that are read
# Errors of a file system that has lost data.
LOST_ERRORS = (errno.EIO, errno.ESTALE, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EREMOTEIO)


def open_plain(path: Path, holes: bool = False) -> BinaryIO:
    """Open a plain file without a buffer. holes: it can be sparse.

    Raises OSError, also for a pipe, a device or a folder, without waiting, for a stand-in, and within :func:`files_of`
    for a file of another user.
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
    """Return the names in a folder, up to MOST_ENTRIES; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(each.name for each in itertools.islice(entries, MOST_ENTRIES))
    except OSError:
        return []


def text_in(file: BinaryIO) -> str:
    """Quote an open file that begins as a text, such as a server's error message; "" if it does not."""
    front = os.pread(file.fileno(), FRONT, 0).strip().decode("ascii", errors="replace").partition("\n")[0]
    return f" but a text: {front[:60]!r}" if front and front.isprintable() and front.isascii() else ""


def _why_gone(path: Path) -> str:
    """Explain a missing file whose name is a dangling link; "" if it is not."""
    try:
        target = os.readlink(path)
    except OSError:
        return ""
    how = ": fetch the file with `git annex get`" if "annex/objects/" in target else ""
    return f"this is a link to {target[:200]}, which is not there{how}"


_owners: set[int] = set()  # whose files can be read; empty for everybody's


@contextlib.contextmanager
def files_of(folder: Path) -> Iterator[None]:
    """Let root read only files of the folder's owner meanwhile: otherwise a link there would show the owner a file that
    only others can read. Raises OSError, also if a link of another user leads to the folder."""
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
    """Count the bytes of a file that are not holes, or enough of them. The number of blocks is fast to get, but can be
    too low: for compressed files, files on tape, and data not on disk yet."""
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
    """Return the next written byte of a file from a position on, its end if there is none. Raises OSError."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.lseek(descriptor, 0, os.SEEK_END)


def allowance(file: BinaryIO) -> int:
    """Return how many bytes of an open file can be read to learn about its contents."""
    found = os.fstat(file.fileno())
    return ROOM + DENSE * _count_written(file.fileno(), found)


def read_small(path: Path) -> bytes:
    """Read a whole file that describes others. Raises OSError."""
    with open_plain(path) as file:
        return b"".join(pieces(file, path, 0, os.fstat(file.fileno()).st_size))


def parse_json(data: bytes, each: int = 1, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON, after a check of its size: parsed, it can take a hundred times as much memory. each: the number of
    values for one name; hook: the `object_pairs_hook` of the module json.

    Raises ValueError, also for more than a checkpoint has, and RecursionError.
    """
    most = each * MOST_NAMES
    kinds = (data.count(b":"), data.count(b"{") + data.count(b"["), data.count(b",") // 2)
    if len(data) > (MOST_TEXT if data.isascii() else MOST_TEXT // 4) or max(kinds) > most:
        raise ValueError(f"more than the {MOST_NAMES} names that a checkpoint may have, or than the text for them")
    return json.loads(data, object_pairs_hook=hook)


def unpack(data: bytes) -> Any:
    """Parse the MessagePack that describes an image. An empty list takes one byte there, and 64 in memory, but ranks
    write four bytes or more for each list. Raises ValueError, also for far more lists."""
    left = LEAST_LISTS + len(data) // 3

    def count(value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("it describes far more than itself")
        return value

    return msgpack.unpackb(data, strict_map_key=False, list_hook=count, object_hook=count)


def number_in(values: Mapping[str, object], name: str) -> int:
    """Return the whole number of this name, 0 if there is none. Raises TypeError for any other value."""
    value = values.get(name) or 0
    if not isinstance(value, int) and not (isinstance(value, float) and value.is_integer()):
        raise TypeError(f"{name} is {str(value)[:40]!r}, no whole number")
    return int(value)


def values_in(values: Mapping[str, object], name: str) -> PlainValues:
    """Return the dictionary of this name, empty if there is none. Raises TypeError for any other value."""
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise TypeError(f"{name} is {str(found)[:40]!r}, no dictionary")
    return found


def pieces(file: BinaryIO, path: Path, begin: int, size: int) -> Iterator[bytearray]:
    """Yield `size` bytes from `begin` on, in pieces. Raises OSError if the file ends before."""
    for at in range(begin, begin + size, PIECE):
        into = bytearray(min(PIECE, begin + size - at))
        read_into(file, path, at, memoryview(into))
        yield into


def read_into(file: BinaryIO, path: Path, begin: int, into: memoryview) -> None:
    """Fill `into` with the bytes from `begin` on. Raises OSError if the file ends before."""
    while into:
        count = os.preadv(file.fileno(), [into[: 1 << 30]], begin)
        if not count:
            raise OSError(errno.EIO, f"cut off: it ends before byte {begin + len(into)}", str(path))
        begin, into = begin + count, into[count:]


def scatter(file: BinaryIO, path: Path, begin: int, places: Sequence[memoryview]) -> None:
    """Fill places in order with the bytes from `begin` on. Raises OSError if the file ends before."""
    for first in range(0, len(places), MOST_PLACES):
        group = places[first : first + MOST_PLACES]
        count = os.preadv(file.fileno(), group, begin)
        for place in group:
            if count < len(place):  # it ends before, or the kernel has read a part
                read_into(file, path, begin + count, place[count:])
            begin, count = begin + len(place), max(0, count - len(place))
