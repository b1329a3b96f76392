"""An image: the training state of one rank as raw bytes, in a file of shared memory that outlives the rank.

A file is a page that says what is in it, a head (MessagePack, for whoever reads the data), and the data, flat. It is
marked torn before the first byte changes and whole after the last one, so a writer that is killed leaves nothing that
looks sound; the checksums show what memory or a network did to it later. Room is allocated before it is written
(`room.py`): a full /dev/shm is an OSError here, and no SIGBUS in the middle of a copy.

Only the standard library and MessagePack: the agent, which owns the files, has no torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgpack

from unicron.transition.snapshot.shared_memory import allocate

PAGE = 4096
VERSION = 2  # 1 had another checksum
SUFFIX = ".image"
STATE = "state"  # the kind of images that hold a rank's part of the state
USER = "user"  # ... of what a script without a session saved
SHARD = "shard"  # ... of a distributed optimizer's shard, of one rank's place
UNTRAINED = "untrained"  # ... of what of the model its optimizer does not change
COPIED = (STATE, USER, SHARD, UNTRAINED)  # kinds of which other nodes get copies
SAME = "replicated"  # the mark of what all ranks have saved alike
FOLDER = "UNICRON_MEMORY"  # the folder, as the agent tells its ranks
SUMS = 16  # bytes: two words of 64 bits (unicron.transition.snapshot.migrate.checksum)
_MAGIC = b"unicron\x00"
_TORN, _WHOLE = 0, 1
# magic, version, state, length and CRC of the key, of the head, where the data begin, their length, their checksums
_FIXED = struct.Struct(f"<8sIIIIQIQQ{SUMS}s")
_CRC = struct.Struct("<I")  # of all that, with the state of a whole one
_FIRST = _FIXED.size + _CRC.size  # bytes; the key follows
_STATE = 12  # where the state is in it


class BadImage(ValueError):
    """A file is no image, or not as it was written; one line says why."""


@dataclass(frozen=True)
class Key:
    """What an image holds. kind: "state", a rank's part of a checkpoint; "shard", of a distributed optimizer's; "user",
    what a script saved. place of `size` ranks of a replica, shard of `count`. iteration: the one that comes next. base:
    the generation that made the state. mark: the same in all images that belong together."""

    kind: str
    slot: int
    iteration: int
    place: int = 0
    size: int = 1
    shard: int = 0
    count: int = 1
    base: int = 0
    mark: str = ""


class Image:
    """A file of shared memory with room for an image, mapped. The data begin at a page.

    Raises OSError where there is no room. The mapping is let go of with the last reference to :attr:`data`.
    """

    def __init__(self, path: Path, head_bytes: int, data_bytes: int):
        """Make a new file; one of that name is replaced. head_bytes, data_bytes: the most that it can hold."""
        self.path = path
        self.repeated: object = None  # what its writer needs to fill it again
        self._offset = _data_offset(head_bytes)
        descriptor, new = -1, path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            allocate(new, descriptor, self._offset + max(1, data_bytes))
            self._map = mmap.mmap(descriptor, self._offset + max(1, data_bytes))
            os.replace(new, path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def fits(self, head_bytes: int, data_bytes: int) -> bool:
        """It can hold so much."""
        return PAGE + head_bytes <= self._offset and self._offset + data_bytes <= len(self._map)

    @property
    def data(self) -> memoryview:
        """All the room for data."""
        return memoryview(self._map)[self._offset :]

    def begin(self) -> None:
        """What is in it is of no use from here on."""
        self._map[_STATE : _STATE + 4] = struct.pack("<I", _TORN)

    def finish(self, key: Key, head: bytes, data_bytes: int, sums: bytes) -> None:
        """The data are there: it is whole. sums: SUMS bytes, the checksum of the data."""
        if not self.fits(len(head), data_bytes):
            raise ValueError("the image has no room for this")
        page = _page(key, head, self._offset, data_bytes, sums)
        self._map[: len(page)] = _torn(page)
        self._map[PAGE : PAGE + len(head)] = head
        self._map[_STATE : _STATE + 4] = struct.pack("<I", _WHOLE)


def leave(note: Path, data: bytes) -> None:
    """A note beside the images: whoever reads it meanwhile finds the one before. Raises OSError."""
    new = note.with_name(f"{note.name}.{os.getpid()}.new")
    new.write_bytes(data)
    new.replace(note)


def front(key: Key, head: bytes, data_bytes: int, sums: bytes) -> bytes:
    """What stands in front of the data of a whole image: for a file that is written from its beginning to its end."""
    offset = _data_offset(len(head))
    return _page(key, head, offset, data_bytes, sums).ljust(PAGE, b"\0") + head.ljust(offset - PAGE, b"\0")


def _data_offset(head_bytes: int) -> int:
    return PAGE + -(-head_bytes // PAGE) * PAGE


def _page(key: Key, head: bytes, offset: int, data_bytes: int, sums: bytes) -> bytes:
    about = msgpack.packb(asdict(key))
    if _FIRST + len(about) > PAGE:
        raise ValueError("the image's key is too long")
    fixed = _FIXED.pack(
        _MAGIC,
        VERSION,
        _WHOLE,
        len(about),
        zlib.crc32(about),
        len(head),
        zlib.crc32(head),
        offset,
        data_bytes,
        sums,
    )
    return bytes(fixed + _CRC.pack(zlib.crc32(fixed)) + about)


def _torn(page: bytes) -> bytes:
    return page[:_STATE] + struct.pack("<I", _TORN) + page[_STATE + 4 :]


@dataclass(frozen=True)
class Found:
    """A whole image as its first page tells of it. The head and the data are checked by whoever reads them."""

    path: Path
    key: Key
    head_bytes: int
    head_crc: int
    offset: int
    data_bytes: int
    sums: bytes

    @property
    def used(self) -> int:
        """Of the file, as far as it is used."""
        return self.offset + self.data_bytes

    def read(self) -> tuple[bytes, memoryview]:
        """(head, data); the data are a private mapping of the file: what is written into them changes no image. Compare
        their checksum with :attr:`sums` before they are believed. Raises BadImage, OSError."""
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self.used:
                raise BadImage(f"{self.path}: cut off")
            mapped = memoryview(mmap.mmap(file.fileno(), self.used, access=mmap.ACCESS_COPY))
        head = bytes(mapped[PAGE : PAGE + self.head_bytes])
        if zlib.crc32(head) != self.head_crc:
            raise BadImage(f"{self.path}: its head does not match its checksum")
        return head, mapped[self.offset : self.offset + self.data_bytes]


def look(path: Path) -> Found:
    """What is in a file. Raises BadImage for a torn one, and for what is none; OSError."""
    with path.open("rb") as file:
        page = file.read(PAGE)
    if len(page) < _FIRST:
        raise BadImage(f"{path}: too short")
    magic, version, state, key_bytes, key_crc, head_bytes, head_crc, offset, data_bytes, sums = _FIXED.unpack_from(page)
    if magic != _MAGIC or version != VERSION:
        raise BadImage(f"{path}: not an image of this release")
    if state != _WHOLE:
        raise BadImage(f"{path}: torn, its writer ended in the middle")
    about = page[_FIRST : _FIRST + key_bytes]
    sound = _CRC.unpack_from(page, _FIXED.size)[0] == zlib.crc32(page[: _FIXED.size])
    if not sound or len(about) != key_bytes or zlib.crc32(about) != key_crc:
        raise BadImage(f"{path}: its first page does not match its checksum")
    try:
        key = Key(**msgpack.unpackb(about))
    except (TypeError, ValueError) as error:
        raise BadImage(f"{path}: not an image of this release ({error})") from None
    return Found(path, key, head_bytes, head_crc, offset, data_bytes, sums)


def folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where the agent wants a rank's images; None where there is no memory that outlives this process."""
    name = environment.get(FOLDER)
    return Path(name) if name else None


def inventory(folder: Path, tell: Callable[[BadImage], None] = lambda error: None) -> Iterator[Found]:
    """All whole images in a folder; what is torn or none is passed over, with a word to `tell`."""
    with contextlib.suppress(OSError):  # there is no such folder, or not any more
        for path in sorted(folder.iterdir()):
            if path.name.endswith(SUFFIX):
                try:
                    yield look(path)
                except BadImage as error:
                    tell(error)
                except OSError:
                    pass  # it is gone
