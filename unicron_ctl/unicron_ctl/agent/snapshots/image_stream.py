"""Images on their way between the agents of a job: plain TCP, for the data are large (docs/design/memory.md).

A connection begins with a proof: the server sends a number that it uses once, the client answers with its HMAC under
the server's token, which only the controller and the job's other agents know. Strangers take no place of those who have
proved themselves, and of too many the one that came first goes. What follows is as open as the collectives' own
traffic. Every image carries its checksums: the receiver works them out as it comes, and says so when they do not match;
then the sender looks at what it has, and removes what is damaged. Each wait has a limit, and so has the whole; while a
receiver makes room for a large image before it takes a byte, it is given the time for that.

    server                       client
    16 bytes                 ->
                             <-  HMAC-SHA256 (32 bytes), length and MessagePack of the request
    put: "go", or "no", length and why not, or "so" when so many others are served ->
                             <-  the image's bytes, then "whole" or nothing
    "kept", or "harm"        ->
    get: length (8 bytes), or 0 when so many others are served ->
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
import xxhash

from unicron_transition.snapshot.cuts import COPY_PREFIX
from unicron_transition.snapshot.image_format import (
    COPY_KINDS,
    PAGE,
    STATE,
    SUFFIX,
    USER,
    BadImage,
    ImagePage,
    Key,
    inventory,
    read_page,
)
from unicron_transition.snapshot.shared_memory import allocate

SILENT_SECONDS = 30.0  # without a byte; then a connection is given up
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}  # the same, of a kernel
LEAST_RATE = 1e5  # bytes a second in all; what is slower is given up, too
ROOM_RATE = 2.5e8  # bytes a second for which a receiver makes room, at least
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
    """The receiver has no room for the image; its holder is not to blame."""


class Busy(TransferError):
    """The other side serves others for now."""


class NoLongerWanted(Exception):
    """An image that nobody wants any more was not sent to its end. rate: bytes a second until then, 0 for too few."""

    def __init__(self, sent: int, seconds: float, length: int):
        super().__init__(f"{sent} of {length} bytes went in {seconds:.0f} s, and then it was not wanted any more")
        self.rate = sent / max(1e-6, seconds) if sent >= PIECE else 0.0


class ChecksumError(TransferError):
    """The bytes that came do not match their checksum."""


class Request(msgspec.Struct, frozen=True):
    """A client's request: the image of this key, or to give one of so many bytes."""

    key: Key | None = None
    bytes: int = 0


class Meter:
    """Counts what was transferred.

    moved: bytes of images that were sent and received, in whatever threads.
    """

    def __init__(self) -> None:
        self.moved = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.moved += count


def copy_name(key: Key) -> str:
    """The name of the file that holds a copy. What scripts keep in worlds of two sizes may be of one iteration."""
    kind = "" if key.kind == STATE else f"{key.kind}-"
    world = f"{int(key.size)}-{int(key.base)}-" if key.kind == USER else ""
    return f"{COPY_PREFIX}{kind}{world}{int(key.slot)}-{int(key.shard)}-{int(key.iteration)}{SUFFIX}"


class Draft:
    """A file that is being received; it is gone where it was not kept. Raises OSError, OverflowError where there is no
    room for it, BadImage."""

    def __init__(self, folder: Path, length: int):
        if not PAGE <= length:
            raise BadImage(f"{length} bytes are no image")
        self._folder, self._length, self._digest = folder, length, xxhash.xxh3_128()
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
        """All of it, and the word that it is whole."""
        at, offset, buffer, until = 0, 0, memoryview(bytearray(PIECE)), _latest(self._length)
        while at < self._length:
            piece = buffer[: min(self._length - at, PIECE)]
            _fill(connection, piece, meter)
            self._file.write(piece)
            if not at:
                self._file.flush()
                offset = read_page(self._path).offset
            self._digest.update(piece[min(len(piece), max(0, offset - at)) :])
            at += len(piece)
            if time.monotonic() > until:
                raise TransferError(f"it came too slowly: {at} of {self._length} bytes")
        if receive(connection, len(WHOLE)) != WHOLE:
            raise TransferError("it was overwritten while it was sent")

    def keep_image(self) -> ImagePage:
        """Give the file its name. Raises BadImage where its first page is not sound, ChecksumError where the rest is
        not."""
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
    """For people: what there is no room for, and why, with figures that change from one time to the next."""
    return f"there is no room for {length / 1e6:.1f} MB in {folder}", f": {getattr(error, 'strerror', '') or error}"


def find(folder: Path, key: Key) -> ImagePage | None:
    """The image in the folder, if it is there and whole."""
    return next((found for found in inventory(folder) if found.key == key), None)


def examine(found: ImagePage) -> str:
    """Somebody got it damaged. Where it is so here it is removed, and the text says so; empty where it is not."""
    try:
        _, data = found.read()
        found.check(data)
        return ""
    except BadImage:
        pass
    found.path.unlink(missing_ok=True)
    return f"{found.path}: its data do not match their checksum; removed"


def keep_alive(connection: socket.socket) -> None:
    """Keep the connection alive: a side that makes room for a large image sends nothing for long, but its kernel
    answers until the side is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def proof(token: str, nonce: bytes, request: bytes) -> bytes:
    return hmac.digest(token.encode(), nonce + request, "sha256")


def _latest(length: int) -> float:
    """The deadline of the whole transfer, however slow it is."""
    return time.monotonic() + SILENT_SECONDS + length / LEAST_RATE


def room_seconds(length: int) -> float:
    """For the other side to make room for so many bytes, before it answers or takes the first."""
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
    """Its bytes, and at the end that they were those of one image. room: seconds in which the other side may still make
    room for them, and takes none: what is sent first lies in the sockets until then."""
    try:
        _send_bytes(connection, found, rate, meter, room, wanted)
    except ConnectionError:
        _compare(found)  # the other side takes no more of a torn image
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
    """So many bytes. until: when all of them are to be there; else each wait has the connection's own limit."""
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
