"""The image: the format of a rank's training state in shared memory and in checkpoint files
(docs/design/memory.md, "An image"). Agents read and write it too, so this module needs no torch.

A file has a page that describes it, a head (MessagePack, for the reader of the data), and the data, flat. The page is
marked torn before the first byte changes and whole after the last, so a killed writer leaves nothing that looks sound.
Digests (xxh3-128) of page, head and data show later damage by memory or a network. The digest of the data is that of
the digests of their leaves, each a MiB, so that several threads can check them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgpack
import xxhash

from unicron_detector.formats import IMAGE
from unicron_transition.snapshot.reading import allowance, open_plain, pieces, scatter
from unicron_transition.snapshot.shared_memory import allocate, is_in_memory

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
NEWEST = "UNICRON_IMAGE_FORMAT"  # and that with the newest format that it reads; release 0.2 sets none
DIGEST = 16  # bytes
LEAF = 1 << 20  # bytes
PIECE = 1 << 18  # bytes that are copied before their digest is taken: they are still in a core's cache then
MOST_THREADS = 8  # that read one image: more would only wait for the memory
LEAVES = 4  # the first format whose data have a digest of leaves; before, it is that of all bytes in order
_MAGIC = b"unicron\x00"
_TORN, _WHOLE = struct.pack("<I", 0), struct.pack("<I", 1)
# magic, version, state, length of the key, of the head, offset of the data, their length, digests of head and data
_FRONT = struct.Struct(f"<8sI4sIIQQ{DIGEST}s{DIGEST}s")
_STATE = slice(12, 16)  # the place of the state in it
_KEY = _FRONT.size + DIGEST  # the place of the key, after the digest of front and key
_MARK = slice(PAGE - DIGEST, PAGE)  # the place of the mark of a verified state, which release 0.2 does not read
# torch's name of a type -> the numpy type that moves it
RAW = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "float4_e2m1fn_x2": "|u1",  # two elements in a byte, which torch counts as one
    "complex32": "<u4",
}
Data = bytes | bytearray | memoryview
Want = tuple[int, memoryview]  # the first byte of the data, and the place for the bytes from there on


class BadImage(ValueError):
    """A file is not an image, or is damaged; one line says why."""


def digest(data: Data) -> bytes:
    """Return the checksum of bytes in the host's memory. Other threads can run meanwhile."""
    return xxhash.xxh3_128_digest(data)


def item_bytes(kind: str) -> int:
    """Return the size of an element. Raises KeyError for an unknown type."""
    return int(RAW[kind][2:])


class DataDigest:
    """The checksum of an image's data, which come in order. number: that of the image's format."""

    def __init__(self, number: int = IMAGE.number):
        self._leaf, self._all = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._left = LEAF  # bytes that the leaf lacks
        self._flat = number < LEAVES

    def update(self, data: Data) -> None:
        """Add the next bytes. Other threads can run meanwhile."""
        if self._flat:
            self._all.update(data)
            return
        rest = memoryview(data)
        while len(rest) >= self._left:
            self._leaf.update(rest[: self._left])
            rest = rest[self._left :]
            self._all.update(self._leaf.digest())
            self._leaf, self._left = xxhash.xxh3_128(), LEAF
        self._leaf.update(rest)
        self._left -= len(rest)

    def digest(self) -> bytes:
        """Return the checksum of the bytes so far."""
        whole = self._all.copy()
        if self._left < LEAF:
            whole.update(self._leaf.digest())
        return whole.digest()


def data_digest(data: Data) -> bytes:
    """Return the checksum of all data of an image."""
    found = DataDigest()
    found.update(data)
    return found.digest()


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
        found = found or data_digest(self.data[:data_bytes])
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
    if _KEY + len(about) > _MARK.start:
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
    number: int = IMAGE.number
    """The number of its format."""
    verified: bool = field(default=False, compare=False)
    """Whether an audit has found the state sound. It is still the same image afterwards."""

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
            return head, self._map(file)

    def _map(self, file: BinaryIO) -> memoryview:
        """Map the data, privately. Raises OSError, BadImage."""
        if os.fstat(file.fileno()).st_size < self.used:
            raise BadImage(f"{self.path}: cut off")
        mapped = memoryview(mmap.mmap(file.fileno(), self.used, access=mmap.ACCESS_COPY))
        return mapped[self.offset : self.offset + self.data_bytes]

    def check(self, data: memoryview, threads: int = 1) -> None:
        """Raises BadImage if these data do not match their checksum."""
        self._check(lambda begin, end, spare: [data[begin:end]], threads)

    def check_file(self, threads: int = 1, on_leaf: Callable[[], None] = lambda: None) -> list[bytes]:
        """Read the data from the file and check them likewise. Returns the digests of the leaves. Raises BadImage,
        OSError."""
        return self.fill((), threads, on_leaf)

    def fill(self, wants: Iterable[Want], threads: int = 1, on_leaf: Callable[[], None] = lambda: None) -> list[bytes]:
        """Read bytes of the data from the file to their places, which are apart, and check all data. Returns the
        digests of the leaves. on_leaf: called after each leaf, in any of the threads; it can raise an error to stop.

        The checksum is computed from the bytes at their places, so a later change of the file cannot harm them. Raises
        BadImage, OSError, and then the places can have any content.
        """
        wanted = sorted(wants, key=lambda want: want[0])
        begins = [begin for begin, _ in wanted]

        def split(begin: int, end: int, spare: memoryview) -> Iterator[tuple[int, memoryview, bool]]:
            """Yield the first byte of each piece of a range, its place, and whether it is wanted."""
            at, number = begin, max(0, bisect_right(begins, begin) - 1)
            while at < end:
                where, place = wanted[number] if number < len(wanted) else (end, spare)
                if where + len(place) <= at:  # the one before ends here
                    number += 1
                elif where <= at:
                    yield at, (piece := place[at - where : end - where]), True
                    at += len(piece)
                else:
                    yield at, (piece := spare[at - begin : min(where, end) - begin]), False
                    at += len(piece)

        def read(begin: int, end: int, spare: memoryview) -> list[memoryview]:
            places = [place for _, place, _ in split(begin, end, spare)]
            scatter(file, self.path, self.offset + begin, places)
            return places

        def copy(begin: int, end: int, spare: memoryview) -> Iterator[memoryview]:
            for at, place, needed in split(begin, end, spare):
                if not needed:
                    yield mapped[at : at + len(place)]
                    continue
                target = _address(place)
                for cut in range(0, len(place), PIECE):
                    piece = place[cut : cut + PIECE]
                    ctypes.memmove(target + cut, address + at + cut, len(piece))
                    yield piece

        with open_plain(self.path) as file:
            if not is_in_memory(file.fileno()):  # else a file that is cut off would kill the process
                return self._check(read, threads, on_leaf)
            try:
                mapped = self._map(file)
            except OSError:  # a process can have too little address space for it, and enough for a leaf
                return self._check(read, threads, on_leaf)
            address = _address(mapped) if self.data_bytes else 0
            return self._check(copy, threads, on_leaf)

    def _check(
        self,
        read: Callable[[int, int, memoryview], Iterable[memoryview]],
        threads: int,
        on_leaf: Callable[[], None] = lambda: None,
    ) -> list[bytes]:
        """Compare the checksum of the data with the image's, and return the leaves' digests. read(begin, end, spare):
        returns the views of a range of them, in order; it can use `spare`, the memory of one thread."""
        ranges = [(at, min(at + LEAF, self.data_bytes)) for at in range(0, self.data_bytes, LEAF)]
        total, leaves = DataDigest(self.number), [b""] * len(ranges)
        numbers, errors = iter(range(len(ranges))), []
        flat = self.number < LEAVES

        def work() -> None:
            spare = memoryview(bytearray(min(LEAF, self.data_bytes)))
            try:
                for number in numbers:
                    leaf = total if flat else xxhash.xxh3_128()
                    for view in read(*ranges[number], spare):
                        leaf.update(view)
                    leaves[number] = leaf.digest()
                    on_leaf()
            except Exception as error:
                errors.append(error)

        _run_in(1 if flat else min(threads, len(ranges)), work)
        if errors:
            raise errors[0]
        if (total.digest() if flat else digest(b"".join(leaves))) != self.digest:
            raise BadImage(f"{self.path}: its data do not match their checksum")
        return leaves


def _address(view: memoryview) -> int:
    """Return the address of writable memory. Copies between addresses let other threads run."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _run_in(threads: int, work: Callable[[], None]) -> None:
    """Do the work in several threads at once, of which this one is the first. Fewer will do."""
    others = [threading.Thread(target=work, name="unicron-read", daemon=True) for _ in range(threads - 1)]
    started = []
    with contextlib.suppress(RuntimeError):  # no thread can be started
        for thread in others:
            thread.start()
            started.append(thread)
    work()
    for thread in started:
        thread.join()


def reading_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many threads of this process read an image: a rank's share of the node's cores, in an agent all."""
    ranks = environment.get("LOCAL_WORLD_SIZE") or "1"
    share = len(os.sched_getaffinity(0)) // max(1, int(ranks)) if ranks.isdecimal() else 1
    return min(MOST_THREADS, max(1, share))


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
    verified = page[_MARK] == _verified_mark(page)
    return ImagePage(path, key, head_bytes, head_digest, offset, data_bytes, data_digest, version, verified)


def _verified_mark(page: bytes) -> bytes:
    """Return the mark of a verified image. It follows from the page's own digest, so a mark that an earlier image has
    left in the file counts for nothing."""
    return digest(b"verified" + page[_FRONT.size : _KEY])


def mark_verified(found: ImagePage) -> None:
    """Mark an image as verified, unless another one has taken its file. Raises OSError."""
    descriptor = os.open(found.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        page = os.pread(descriptor, _KEY, 0)
        with contextlib.suppress(BadImage):
            if read_page(found.path) == found:
                os.pwrite(descriptor, _verified_mark(page), _MARK.start)
    finally:
        os.close(descriptor)


def memory_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for a rank's images, None if no memory outlives this process."""
    name = environment.get(FOLDER)
    return Path(name) if name else None


def agent_reads_images(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank's agent, which an upgrade leaves in place until the step's end, reads the rank's images."""
    number = environment.get(NEWEST) or ""
    return number.isdecimal() and int(number) >= IMAGE.number


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
