"""The image: the format of a rank's training state in shared memory and in checkpoint files
(docs/design/memory.md, "An image"). Agents read and write it too, so this module needs no torch.

A file has a page that describes it, a head (MessagePack, for the reader of the data), and the data, flat. The page is
marked torn before the first byte changes and whole after the last, so a killed writer leaves nothing that looks sound.
Digests (xxh3-128) of page, head and data show later damage by memory or a network.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from unicron_detector.formats import IMAGE
from unicron_transition.snapshot.reading import allowance, open_plain, pieces
from unicron_transition.snapshot.shared_memory import allocate

PAGE = 4096
ALIGN = 64  # bytes: each tensor of a state begins at a multiple
STEP = "step"  # in place of a tensor's offset: the tensor has only the optimizer's step, which is in the head
SUFFIX = ".image"
# Kinds of images: a rank's part of the state, the state of a script without a session, a shard of a distributed
# optimizer, and the tensors of the model that its optimizer does not change.
STATE, USER, SHARD, UNTRAINED_KIND = "state", "user", "shard", "untrained"
COPY_KINDS = (STATE, USER, SHARD, UNTRAINED_KIND)  # kinds of which other nodes get copies
SAME = "replicated"  # the mark of a state that is the same in all ranks
FOLDER = "UNICRON_MEMORY"  # the variable with which the agent gives its ranks the folder
DIGEST = 16  # bytes
_MAGIC = b"unicron\x00"
_TORN, _WHOLE = struct.pack("<I", 0), struct.pack("<I", 1)
# magic, version, state, length of the key, of the head, offset of the data, their length, digests of head and data
_FRONT = struct.Struct(f"<8sI4sIIQQ{DIGEST}s{DIGEST}s")
_STATE = slice(12, 16)  # the place of the state in it
_KEY = _FRONT.size + DIGEST  # the place of the key, after the digest of front and key
Data = bytes | bytearray | memoryview


class BadImage(ValueError):
    """A file is not an image, or is damaged; one line says why."""


def digest(data: Data) -> bytes:
    """Return the checksum of bytes in the host's memory. Other threads can run meanwhile."""
    return xxhash.xxh3_128_digest(data)


def running_digest() -> Any:
    """Return the checksum of no bytes yet, to which `update(data)` adds some; its `digest()` is that of all of them."""
    return xxhash.xxh3_128()


@dataclass(frozen=True)
class Key:
    """Identifies the state in an image."""

    kind: str
    slot: int
    iteration: int
    """The iteration that comes next."""
    place: int = 0
    """The place of the rank among the `size` ranks of a replica."""
    size: int = 1
    shard: int = 0
    """The number of the shard, of `count`."""
    count: int = 1
    base: int = 0
    """The generation that made the state."""
    mark: str = ""
    """A text that is equal in all images that belong together."""


class Image:
    """A new, mapped file of shared memory for an image, in place of any file of that name. It holds up to `head_bytes`
    and `data_bytes`, and the data begin at a page.

    Raises OSError if there is no room. The mapping is released with the last reference to :attr:`data`.
    """

    def __init__(self, path: Path, head_bytes: int, data_bytes: int):
        self.path = path
        self.copier: object = None  # set by its writer, to fill it again
        self._offset = _data_offset(head_bytes)
        new, size = path.with_name(f"{path.name}.{os.getpid()}.new"), self._offset + max(1, data_bytes)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            allocate(new, descriptor, size)
            self._map = mmap.mmap(descriptor, size)
            os.replace(new, path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        finally:
            os.close(descriptor)

    def fits(self, head_bytes: int, data_bytes: int) -> bool:
        """Whether it has room for a head and data of these sizes."""
        return PAGE + head_bytes <= self._offset and self._offset + data_bytes <= len(self._map)

    @property
    def data(self) -> memoryview:
        """The room for data, all of it."""
        return memoryview(self._map)[self._offset :]

    def mark_torn(self) -> None:
        """Mark the content as unusable, before it changes."""
        self._map[_STATE] = _TORN

    def mark_whole(self, key: Key, head: bytes, data_bytes: int, found: bytes | None = None) -> bytes:
        """Add key and head to complete data, and return the data's digest. found: this digest if it is known. Raises
        ValueError if they do not fit."""
        if not self.fits(len(head), data_bytes):
            raise ValueError("the image has no room for this")
        found = found or digest(self.data[:data_bytes])
        page = bytearray(_page(key, head, self._offset, data_bytes, found))
        page[_STATE] = _TORN
        self._map[: len(page)] = bytes(page)
        self._map[PAGE : PAGE + len(head)] = head
        self._map[_STATE] = _WHOLE
        return found


def write_note(path: Path, data: bytes) -> None:
    """Write a small file beside the images atomically. Raises OSError."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_bytes(data)
    new.replace(path)


def file_front(key: Key, head: bytes, data_bytes: int, data_digest: bytes) -> bytes:
    """Return everything in front of the data of a whole image, for a file that is written sequentially."""
    offset = _data_offset(len(head))
    page = _page(key, head, offset, data_bytes, data_digest)
    return page.ljust(PAGE, b"\0") + head.ljust(offset - PAGE, b"\0")


def _data_offset(head_bytes: int) -> int:
    return PAGE + -(-head_bytes // PAGE) * PAGE


def _page(key: Key, head: bytes, offset: int, data_bytes: int, data_digest: bytes) -> bytes:
    about = msgpack.packb(vars(key))
    if _KEY + len(about) > PAGE:
        raise ValueError("the image's key is too long")
    fixed = _FRONT.pack(
        _MAGIC, IMAGE.number, _WHOLE, len(about), len(head), offset, data_bytes, digest(head), data_digest
    )
    return bytes(fixed + digest(fixed + about) + about)


@dataclass(frozen=True)
class ImagePage:
    """The first page of a whole image. Head and data are checked by their readers."""

    path: Path
    key: Key
    head_bytes: int
    head_digest: bytes
    offset: int
    data_bytes: int
    digest: bytes  # of the data

    @property
    def used(self) -> int:
        """The number of bytes in use from the start of the file."""
        return self.offset + self.data_bytes

    def head(self) -> bytes:
        """Read and check the head. Raises BadImage, OSError."""
        with open_plain(self.path) as file:
            if os.fstat(file.fileno()).st_size < self.used or self.head_bytes > allowance(file):
                raise BadImage(f"{self.path}: cut off")
            head = b"".join(pieces(file, self.path, PAGE, self.head_bytes))
        if digest(head) != self.head_digest:
            raise BadImage(f"{self.path}: its head does not match its checksum")
        return head

    def read(self) -> tuple[bytes, memoryview]:
        """Return head and data of an image in memory. The data are a private mapping, and not checked yet
        (:meth:`check`). Raises BadImage, OSError."""
        head = self.head()
        with open_plain(self.path) as file:
            mapped = memoryview(mmap.mmap(file.fileno(), self.used, access=mmap.ACCESS_COPY))
        return head, mapped[self.offset : self.offset + self.data_bytes]

    def check(self, data: Data) -> None:
        """Raises BadImage if these data do not match their checksum."""
        if digest(data) != self.digest:
            raise BadImage(f"{self.path}: its data do not match their checksum")

    def check_file(self) -> None:
        """Read the data from the file and check them likewise. Raises BadImage, OSError."""
        total = running_digest()
        with open_plain(self.path) as file:
            for piece in pieces(file, self.path, self.offset, self.data_bytes):
                total.update(piece)
        if total.digest() != self.digest:
            raise BadImage(f"{self.path}: its data do not match their checksum")


def read_page(path: Path) -> ImagePage:
    """Read the first page of an image file. Raises BadImage for a torn image or another kind of file, OSError."""
    with open_plain(path) as file:
        page = file.read(PAGE)
    if len(page) < _KEY:
        raise BadImage(f"{path}: too short")
    magic, version, state, key_bytes, *rest = _FRONT.unpack_from(page)
    if magic != _MAGIC:
        raise BadImage(f"{path}: not an image of this release")
    if refusal := IMAGE.refusal(version):
        raise BadImage(f"{path}: not an image of this release: {refusal}")
    if state != _WHOLE:
        raise BadImage(f"{path}: torn, its writer ended in the middle")
    about = page[_KEY : _KEY + key_bytes]
    if digest(page[: _FRONT.size] + about) != page[_FRONT.size : _KEY]:
        raise BadImage(f"{path}: its first page does not match its checksum")
    try:
        key = Key(**msgpack.unpackb(about))
    except (TypeError, ValueError) as error:
        raise BadImage(f"{path}: not an image of this release ({error})") from None
    head_bytes, offset, data_bytes, head_digest, data_digest = rest
    return ImagePage(path, key, head_bytes, head_digest, offset, data_bytes, data_digest)


def memory_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for a rank's images, None if no memory outlives this process."""
    name = environment.get(FOLDER)
    return Path(name) if name else None


def inventory(folder: Path, on_bad: Callable[[BadImage], None] = lambda error: None) -> Iterator[ImagePage]:
    """Yield the whole images in a folder. on_bad: called for each bad file, which is passed over."""
    with contextlib.suppress(OSError):  # the folder is not there, or is gone meanwhile
        for path in sorted(folder.iterdir()):
            if path.name.endswith(SUFFIX):
                try:
                    yield read_page(path)
                except BadImage as error:
                    on_bad(error)
                except OSError:
                    pass  # it is gone
