"""Images on their way between the agents of a job: plain TCP, for the data are large (docs/design/memory.md).

A connection begins with a proof: the server sends a number that it uses once, the client answers with its HMAC under
the server's token, which only the controller and the job's other agents know. What follows is as open as the
collectives' own traffic. Every image carries its checksums: the receiver works them out as it comes, and says so when
they do not match; then the sender looks at what it has, and removes what is damaged. Each wait has a limit, and so has
the whole.

    server                       client
    16 bytes                 ->
                             <-  HMAC-SHA256 (32 bytes), length and MessagePack of the request
    put: "go", or "no", length and why not ->
                             <-  the image's bytes, then "whole" or nothing
    "kept", or "harm"        ->
    get: length (8 bytes)    ->
    the image's bytes, "whole"
                             <-  "kept", or "harm"
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack

from transition.memory.cuts import COPY_PREFIX as PREFIX
from transition.memory.images import COPIED, PAGE, STATE, SUFFIX, BadImage, Found, Key, inventory, look
from unicron_ctl.agent.sums import Sums, sound

SILENT_SECONDS = 30.0  # without a byte; then a connection is given up
LEAST_RATE = 1e5  # bytes a second in all; what is slower is given up, too
PROOF_SECONDS = 2.0  # for each part of the proof
AT_ONCE = 8  # connections that are served
PIECE = 1 << 22  # bytes between two looks at the clock
MOST_REQUEST = 4096  # bytes
NONCE, PROOF = 16, hashlib.sha256().digest_size
GO, NO, WHOLE, KEPT, HARM = b"go", b"no", b"whole", b"kept", b"harm"
MOST_REASON = 400  # bytes
_LENGTH = struct.Struct("<Q")


class TransferError(OSError):
    """An image did not get through; one line says why."""


class Damaged(TransferError):
    """What has come does not match its checksum."""


class Meter:
    """moved: bytes of images that were sent and received, in whatever threads."""

    def __init__(self) -> None:
        self.moved = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.moved += count


def copy_name(key: Key) -> str:
    """Of the file that holds a copy."""
    kind = "" if key.kind == STATE else f"{key.kind}-"
    return f"{PREFIX}{kind}{int(key.slot)}-{int(key.shard)}-{int(key.iteration)}{SUFFIX}"


# ------------------------------------------------------------ the server
class Server:
    """Takes images into a folder and gives those that are there, to whoever has the token. In threads of its own.

    folder(): None while there is none. news(problem): one has come, or there is one less, or could not be taken, and
    why. address: host:port, empty where nothing could be bound.
    """

    def __init__(self, folder: Callable[[], Path | None], host: str, news: Callable[[str], None], meter: Meter):
        self._where, self._news, self._meter = folder, news, meter
        self.token = secrets.token_hex(16)
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._closing = False
        self._socket, self.address = _listen(host)
        if self._socket is not None:
            threading.Thread(target=self._run, name="unicron-images", daemon=True).start()

    def close(self) -> None:
        """Nobody is served any more."""
        self._closing = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _run(self) -> None:
        assert self._socket is not None
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="unicron-image", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(PROOF_SECONDS)
                nonce = secrets.token_bytes(NONCE)
                connection.sendall(nonce)
                proof = _receive(connection, PROOF)
                length = _LENGTH.unpack(_receive(connection, _LENGTH.size))[0]
                if length > MOST_REQUEST:
                    return
                request = _receive(connection, length)
                if not hmac.compare_digest(proof, _proof(self.token, nonce, request)):
                    return
                connection.settimeout(SILENT_SECONDS)
                self._answer(connection, msgpack.unpackb(request))
        except (OSError, ValueError, TypeError, KeyError, OverflowError, BadImage, msgpack.UnpackException):
            pass  # the other side sees that nothing came, and says so
        finally:
            self._slots.release()

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        folder = self._where()
        if folder is None:
            return
        if request["what"] == "get":
            found = find(folder, Key(**request["key"]))
            if found is not None:
                connection.sendall(_LENGTH.pack(found.used))
                _send_image(connection, found, 0.0, self._meter)
                if _receive(connection, len(KEPT)) == HARM and (problem := examine(found)):
                    self._news(problem)
        elif request["what"] == "put":
            self._take(connection, folder, int(request["bytes"]))

    def _take(self, connection: socket.socket, folder: Path, length: int) -> None:
        try:
            draft = _Draft(folder, length)
        except (OSError, OverflowError) as error:
            why = f"there is no room for {length / 1e6:.1f} MB in {folder}: {getattr(error, 'strerror', '') or error}"
            self._news(f"a copy of another node's training state is not kept: {why}")
            said = why.encode()[:MOST_REASON]
            connection.sendall(NO + _LENGTH.pack(len(said)) + said)
            return
        try:
            with draft:
                connection.sendall(GO)
                draft.receive(connection, self._meter)
                draft.keep()
        except Damaged:
            connection.sendall(HARM)
            raise
        self._news("")
        connection.sendall(KEPT)


def examine(found: Found) -> str:
    """Somebody got it damaged. Where it is so here it is removed, and the text says so; empty where it is not."""
    try:
        if sound(found):
            return ""
    except BadImage:
        pass  # its head is
    found.path.unlink(missing_ok=True)
    return f"{found.path}: its data do not match their checksum; removed"


def _listen(host: str) -> tuple[socket.socket | None, str]:
    for interface in (host, ""):  # the name of a node need not be one of its interfaces'
        with contextlib.suppress(OSError):
            listening = socket.create_server((interface, 0), backlog=AT_ONCE)
            return listening, f"{host}:{listening.getsockname()[1]}"
    return None, ""


class _Draft:
    """A file that is being received; it is gone where it was not kept. Raises OSError, OverflowError where there is no
    room for it, BadImage."""

    def __init__(self, folder: Path, length: int):
        if not PAGE <= length:
            raise BadImage(f"{length} bytes are no image")
        self._folder, self._length, self._sums = folder, length, Sums()
        self._path = folder / f"{PREFIX}{os.getpid()}.{threading.get_native_id()}.new"
        self._file = self._path.open("wb")
        try:
            os.posix_fallocate(self._file.fileno(), 0, self._length)  # a full memory is an error now, not half way
        except (OSError, OverflowError):
            self.__exit__()
            raise

    def __enter__(self) -> _Draft:
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
                offset = look(self._path).offset
            self._sums.add(piece[min(len(piece), max(0, offset - at)) :])
            at += len(piece)
            if time.monotonic() > until:
                raise TransferError(f"it came too slowly: {at} of {self._length} bytes")
        if _receive(connection, len(WHOLE)) != WHOLE:
            raise TransferError("it was overwritten while it was sent")

    def keep(self) -> Found:
        """It gets its name. Raises BadImage where its first page is not sound, Damaged where the rest is not."""
        self._file.flush()
        found = look(self._path)
        if found.key.kind not in COPIED:
            raise BadImage(f"an image of the kind {found.key.kind!r} is no copy")
        if found.used != self._length:
            raise BadImage(f"an image of {found.used} bytes came as {self._length}")
        if self._sums.digest() != found.sums or not _head_is_sound(found):
            raise Damaged("what came does not match its checksum")
        path = self._folder / copy_name(found.key)
        self._path.replace(path)
        return look(path)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _head_is_sound(found: Found) -> bool:
    try:
        found.read()
    except BadImage:
        return False
    return True


# ------------------------------------------------------------ the client
def put(found: Found, address: str, token: str, meter: Meter, rate: float = 0.0) -> None:
    """Give an image to the agent at `address`. rate: bytes a second at most, 0 for no limit.

    Raises OSError, BadImage where the image was overwritten meanwhile, or is damaged: then it is gone.
    """
    with _connected(address, token, {"what": "put", "bytes": found.used}) as connection:
        if _receive(connection, len(GO)) != GO:
            length = min(MOST_REASON, _LENGTH.unpack(_receive(connection, _LENGTH.size))[0])
            raise TransferError(_receive(connection, length).decode(errors="replace"))
        _send_image(connection, found, rate, meter)
        answer = _receive(connection, len(KEPT))
        if answer == HARM and (problem := examine(found)):
            raise BadImage(problem)
        if answer != KEPT:
            raise Damaged(f"{address} has not kept it: it came damaged")


def get(key: Key, folder: Path, address: str, token: str, meter: Meter) -> Found:
    """Get an image from the agent at `address` into `folder`. Raises OSError, BadImage."""
    with _connected(address, token, {"what": "get", "key": asdict(key)}) as connection:
        try:
            with _Draft(folder, _LENGTH.unpack(_receive(connection, _LENGTH.size))[0]) as draft:
                draft.receive(connection, meter)
                found = draft.keep()
        except Damaged:
            connection.sendall(HARM)
            raise
        connection.sendall(KEPT)
    if found.key != key:
        found.path.unlink()
        raise BadImage(f"{address} has sent another image than was asked for")
    return found


def find(folder: Path, key: Key) -> Found | None:
    """The image in the folder, if it is there and whole."""
    return next((found for found in inventory(folder) if found.key == key), None)


@contextlib.contextmanager
def _connected(address: str, token: str, request: dict[str, Any]):
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), SILENT_SECONDS) as connection:
        connection.settimeout(SILENT_SECONDS)
        nonce, data = _receive(connection, NONCE), msgpack.packb(request)
        connection.sendall(_proof(token, nonce, data) + _LENGTH.pack(len(data)) + data)
        yield connection


# ------------------------------------------------------------ both
def _proof(token: str, nonce: bytes, request: bytes) -> bytes:
    return hmac.digest(token.encode(), nonce + request, "sha256")


def _latest(length: int) -> float:
    """When it is to be over, however slow."""
    return time.monotonic() + SILENT_SECONDS + length / LEAST_RATE


def _fill(connection: socket.socket, piece: memoryview, meter: Meter) -> None:
    while len(piece):
        count = connection.recv_into(piece)
        if not count:
            raise TransferError("the connection ended in the middle")
        meter.add(count)
        piece = piece[count:]


def _send_image(connection: socket.socket, found: Found, rate: float, meter: Meter) -> None:
    """Its bytes, and at the end that they were those of one image."""
    try:
        _send_bytes(connection, found, rate, meter)
    except ConnectionError:
        _compare(found)  # whoever sees it torn takes no more of it
        raise
    _compare(found)
    connection.sendall(WHOLE)


def _compare(found: Found) -> None:
    if look(found.path) != found:
        raise BadImage(f"{found.path}: overwritten while it was sent")


def _send_bytes(connection: socket.socket, found: Found, rate: float, meter: Meter) -> None:
    began, sent, until = time.monotonic(), 0, _latest(found.used)
    with found.path.open("rb") as file:
        while sent < found.used:
            count = min(PIECE, found.used - sent)
            if connection.sendfile(file, sent, count) != count:
                raise TransferError(f"{found.path}: cut off")
            sent += count
            meter.add(count)
            if time.monotonic() > until:
                raise TransferError(f"it went too slowly: {sent} of {found.used} bytes")
            ahead = sent / rate - (time.monotonic() - began) if rate else 0.0
            if ahead > 0:
                time.sleep(min(ahead, SILENT_SECONDS / 2))


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise TransferError("the other side ended the connection")
        data += piece
    return bytes(data)
