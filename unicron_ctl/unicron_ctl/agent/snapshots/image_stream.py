"""Sends images between the agents of a job, over plain TCP because they are large (docs/design/memory.md).

A connection begins with a proof: the server sends a nonce, and the client answers with an HMAC under the server's
token, which only the controller and the job's other agents know. Everything after that is as open as the collectives'
own traffic. The receiver computes an image's checksums on arrival and reports a mismatch, and then the sender checks
its own image and removes it if it is damaged. Each wait has a limit, and so has the whole transfer. A receiver gets
extra time to make room for a large image.

    server                       client
    16 bytes                 ->
                             <-  HMAC-SHA256 (32 bytes), length and MessagePack of the request
    put: "go", or "no", length and reason, or "so" if the server is busy ->
                             <-  the image's bytes, then "whole" or nothing
    "kept", or "harm"        ->
    get: length (8 bytes), or 0 if the server is busy ->
    the image's bytes, "whole"
                             <-  "kept", or "harm"
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from unicron_transition.snapshot.cuts import COPY_PREFIX
from unicron_transition.snapshot.image_format import (
    COPY_KINDS,
    PAGE,
    STATE,
    SUFFIX,
    USER,
    BadImage,
    DataDigest,
    ImagePage,
    Key,
    inventory,
    read_page,
)
from unicron_transition.snapshot.shared_memory import allocate

SILENT_SECONDS = 30.0  # without a byte, after which a connection is abandoned
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}  # the same time for a kernel
LEAST_RATE = 1e5  # bytes a second of the whole transfer; a slower one is abandoned
ROOM_RATE = 2.5e8  # bytes a second that a receiver can allocate at least
PIECE = 1 << 22  # bytes between two looks at the clock
MOST_REQUEST = 4096  # bytes
NONCE, PROOF = 16, hashlib.sha256().digest_size
GO, NO, SO, WHOLE, KEPT, HARM = b"go", b"no", b"so", b"whole", b"kept", b"harm"
MOST_REASON = 400  # bytes
LENGTH = struct.Struct("<Q")
Check = Callable[[], bool]


class TransferError(OSError):
    """An image did not get through; one line says why."""


class NoRoom(TransferError):
    """This side has no room for the image."""


class Busy(TransferError):
    """The other side is serving others."""


class NoLongerWanted(Exception):
    """A transfer was stopped because its image is not wanted any more."""

    def __init__(self, sent: int, seconds: float, length: int):
        super().__init__(f"{sent} of {length} bytes went in {seconds:.0f} s, and then it was not wanted any more")
        self.rate = sent / max(1e-6, seconds) if sent >= PIECE else 0.0
        """Bytes a second; 0 for too few to tell."""


class ChecksumError(TransferError):
    """An image arrived damaged."""


class Request(msgspec.Struct, frozen=True):
    """A client's request to get or to put an image."""

    key: Key | None = None
    """The image to get."""
    bytes: int = 0
    """The size of the image to put."""


class Meter:
    """Counts the bytes of images that all threads have sent and received."""

    def __init__(self) -> None:
        self.moved = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.moved += count


def copy_name(key: Key) -> str:
    """Return the file name of a copy. It includes the world of a script without a session, since worlds of two sizes
    can have states of the same iteration."""
    kind = "" if key.kind == STATE else f"{key.kind}-"
    world = f"{int(key.size)}-{int(key.base)}-" if key.kind == USER else ""
    return f"{COPY_PREFIX}{kind}{world}{int(key.slot)}-{int(key.shard)}-{int(key.iteration)}{SUFFIX}"


class Draft:
    """A file that is being received, and removed unless it is kept. Raises OSError, OverflowError if there is no room,
    BadImage."""

    def __init__(self, folder: Path, length: int):
        if not PAGE <= length:
            raise BadImage(f"{length} bytes are no image")
        self._folder, self._length, self._digest = folder, length, DataDigest()
        self._path = folder / f"{COPY_PREFIX}{os.getpid()}.{threading.get_native_id()}.new"
        self._file = self._path.open("wb")
        try:
            allocate(self._path, self._file.fileno(), self._length)
        except (OSError, OverflowError):
            self.__exit__()
            raise

    def __enter__(self) -> Draft:
        return self

    def receive(self, connection: socket.socket, meter: Meter) -> None:
        """Receive all of it, up to the final WHOLE."""
        at, offset, buffer, until = 0, 0, memoryview(bytearray(PIECE)), _latest(self._length)
        while at < self._length:
            piece = buffer[: min(self._length - at, PIECE)]
            _fill(connection, piece, meter)
            self._file.write(piece)
            if not at:
                self._file.flush()
                page = read_page(self._path)
                offset, self._digest = page.offset, DataDigest(page.number)
            self._digest.update(piece[min(len(piece), max(0, offset - at)) :])
            at += len(piece)
            if time.monotonic() > until:
                raise TransferError(f"it came too slowly: {at} of {self._length} bytes")
        if receive(connection, len(WHOLE)) != WHOLE:
            raise TransferError("it was overwritten while it was sent")

    def keep_image(self) -> ImagePage:
        """Give the file its name. Raises BadImage if its first page is damaged, ChecksumError if the rest is."""
        self._file.flush()
        found = read_page(self._path)
        if found.key.kind not in COPY_KINDS:
            raise BadImage(f"an image of the kind {found.key.kind!r} is no copy")
        if found.used != self._length:
            raise BadImage(f"an image of {found.used} bytes came as {self._length}")
        if self._digest.digest() != found.digest or not _head_is_sound(found):
            raise ChecksumError("what came does not match its checksum")
        path = self._folder / copy_name(found.key)
        self._path.replace(path)
        return read_page(path)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _head_is_sound(found: ImagePage) -> bool:
    try:
        found.head()
    except BadImage:
        return False
    return True


def no_room(folder: Path, length: int, error: Exception) -> tuple[str, str]:
    """Describe a lack of room for people, and its cause, with figures that differ each time."""
    return f"there is no room for {length / 1e6:.1f} MB in {folder}", f": {getattr(error, 'strerror', '') or error}"


def find(folder: Path, key: Key) -> ImagePage | None:
    """Find a whole image in the folder."""
    return next((found for found in inventory(folder) if found.key == key), None)


def examine(found: ImagePage) -> str:
    """Check an image that arrived damaged elsewhere. If it is damaged here, remove it and return a line; "" if not."""
    try:
        found.check_file()
        return ""
    except BadImage:
        pass
    found.path.unlink(missing_ok=True)
    return f"{found.path}: its data do not match their checksum; removed"


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel probe the connection: a side that makes room for a large image is silent for long, but its kernel
    answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def proof(token: str, nonce: bytes, request: bytes) -> bytes:
    return hmac.digest(token.encode(), nonce + request, "sha256")


def _latest(length: int) -> float:
    """Return the deadline of the whole transfer."""
    return time.monotonic() + SILENT_SECONDS + length / LEAST_RATE


def room_seconds(length: int) -> float:
    """Return the time for the other side to make room, before it answers or reads the first byte."""
    return SILENT_SECONDS + length / ROOM_RATE


def _fill(connection: socket.socket, piece: memoryview, meter: Meter) -> None:
    while len(piece):
        count = connection.recv_into(piece)
        if not count:
            raise TransferError("the connection ended in the middle")
        meter.add(count)
        piece = piece[count:]


def send_image(
    connection: socket.socket,
    found: ImagePage,
    rate: float,
    meter: Meter,
    room: float = 0.0,
    wanted: Check = lambda: True,
) -> None:
    """Send an image, and WHOLE unless it was overwritten meanwhile. room: seconds in which the other side can still be
    making room, so that the first bytes stay in the sockets."""
    try:
        _send_bytes(connection, found, rate, meter, room, wanted)
    except ConnectionError:
        _compare(found)  # the other side disconnects if the image is torn
        raise
    _compare(found)
    connection.sendall(WHOLE)


def _compare(found: ImagePage) -> None:
    if read_page(found.path) != found:
        raise BadImage(f"{found.path}: overwritten while it was sent")


def _send_bytes(
    connection: socket.socket, found: ImagePage, rate: float, meter: Meter, room: float, wanted: Check
) -> None:
    began, sent, until = time.monotonic(), 0, _latest(found.used)
    with found.path.open("rb") as file:
        while sent < found.used:
            count = min(PIECE, found.used - sent)
            connection.settimeout(max(SILENT_SECONDS, began + room - time.monotonic()))
            if connection.sendfile(file, sent, count) != count:
                raise TransferError(f"{found.path}: cut off")
            sent += count
            meter.add(count)
            if time.monotonic() > until:
                raise TransferError(f"it went too slowly: {sent} of {found.used} bytes")
            if sent < found.used and not wanted():
                raise NoLongerWanted(sent, time.monotonic() - began, found.used)
            ahead = sent / rate - (time.monotonic() - began) if rate else 0.0
            if ahead > 0:
                time.sleep(min(ahead, SILENT_SECONDS / 2))


def receive(connection: socket.socket, count: int, until: float = math.inf) -> bytes:
    """Receive `count` bytes. until: a deadline for all of them; by default each wait has the connection's limit."""
    data = bytearray()
    while len(data) < count:
        if until < math.inf:
            if (left := until - time.monotonic()) <= 0:
                raise TransferError("the other side is too slow")
            connection.settimeout(left)
        piece = connection.recv(count - len(data))
        if not piece:
            raise TransferError("the other side ended the connection")
        data += piece
    return bytes(data)
