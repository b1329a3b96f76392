"""Images on their way between the agents of a job: plain TCP, for the data are large (docs/design/memory.md).

A connection begins with a proof: the server sends a number that it uses once, the client answers with its HMAC under
the server's token, which only the controller and the job's other agents know. What follows is as open as the
collectives' own traffic. Every image carries its checksums; who reads it compares them. Each wait has a limit.

    server                       client
    16 bytes                 ->
                             <-  HMAC-SHA256 (32 bytes), length and MessagePack of the request
    put: "go"                ->
                             <-  the image's bytes, then "whole" or nothing
    "kept"                   ->
    get: length (8 bytes)    ->
    the image's bytes, "whole"
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
from unicron_ctl.agent.sums import sound

SILENT_SECONDS = 30.0  # without a byte; then a connection is given up
PROOF_SECONDS = 2.0  # for each part of the proof
AT_ONCE = 8  # connections that are served
PIECE = 1 << 22  # bytes between two looks at the clock
MOST_REQUEST = 4096  # bytes
NONCE, PROOF = 16, hashlib.sha256().digest_size
GO, WHOLE, KEPT = b"go", b"whole", b"kept"
_LENGTH = struct.Struct("<Q")


class TransferError(OSError):
    """An image did not get through; one line says why."""


def copy_name(key: Key) -> str:
    """Of the file that holds a copy."""
    kind = "" if key.kind == STATE else f"{key.kind}-"
    return f"{PREFIX}{kind}{int(key.slot)}-{int(key.shard)}-{int(key.iteration)}{SUFFIX}"


# ------------------------------------------------------------ the server
class Server:
    """Takes images into a folder and gives those that are there, to whoever has the token. In threads of its own.

    folder(): None while there is none. news(problem): one has come, or there is one less, and why. address: host:port,
    empty where nothing could be bound.
    """

    def __init__(self, folder: Callable[[], Path | None], host: str, news: Callable[[str], None]):
        self._where, self._news = folder, news
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
            if found is not None and self._is_sound(found):
                connection.sendall(_LENGTH.pack(found.used))
                _send_image(connection, found, 0.0)
        elif request["what"] == "put":
            self._take(connection, folder, int(request["bytes"]))

    def _is_sound(self, found: Found) -> bool:
        """Whoever asks has no other hope: a damaged image is not handed on, and not spoken of any more."""
        if sound(found):
            return True
        found.path.unlink(missing_ok=True)
        self._news(f"{found.path}: its data do not match their checksum; removed")
        return False

    def _take(self, connection: socket.socket, folder: Path, length: int) -> None:
        with _Draft(folder, length) as draft:
            connection.sendall(GO)
            draft.receive(connection)
            draft.keep()
        self._news("")
        connection.sendall(KEPT)


def _listen(host: str) -> tuple[socket.socket | None, str]:
    for interface in (host, ""):  # the name of a node need not be one of its interfaces'
        with contextlib.suppress(OSError):
            listening = socket.create_server((interface, 0), backlog=AT_ONCE)
            return listening, f"{host}:{listening.getsockname()[1]}"
    return None, ""


class _Draft:
    """A file that is being received; it is gone where it was not kept."""

    def __init__(self, folder: Path, length: int):
        if not PAGE <= length:
            raise BadImage(f"{length} bytes are no image")
        self._folder, self._length = folder, length
        self._path = folder / f"{PREFIX}{os.getpid()}.{threading.get_native_id()}.new"

    def __enter__(self) -> _Draft:
        self._file = self._path.open("wb")
        try:
            os.posix_fallocate(self._file.fileno(), 0, self._length)  # a full memory is an error now, not half way
        except (OSError, OverflowError):
            self.__exit__()
            raise
        return self

    def receive(self, connection: socket.socket) -> None:
        """All of it, and the word that it is whole."""
        left, buffer = self._length, memoryview(bytearray(PIECE))
        while left:
            count = connection.recv_into(buffer[: min(left, PIECE)])
            if not count:
                raise TransferError("the connection ended in the middle")
            self._file.write(buffer[:count])
            left -= count
        if _receive(connection, len(WHOLE)) != WHOLE:
            raise TransferError("it was overwritten while it was sent")

    def keep(self) -> Found:
        """It gets its name. Raises BadImage where its first page is not sound."""
        self._file.flush()
        found = look(self._path)
        if found.key.kind not in COPIED:
            raise BadImage(f"an image of the kind {found.key.kind!r} is no copy")
        if found.used != self._length:
            raise BadImage(f"an image of {found.used} bytes came as {self._length}")
        path = self._folder / copy_name(found.key)
        self._path.replace(path)
        return look(path)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


# ------------------------------------------------------------ the client
def put(found: Found, address: str, token: str, rate: float = 0.0) -> None:
    """Give an image to the agent at `address`. rate: bytes a second at most, 0 for no limit.

    Raises OSError, BadImage where the image was overwritten meanwhile.
    """
    with _connected(address, token, {"what": "put", "bytes": found.used}) as connection:
        if _receive(connection, len(GO)) != GO:
            raise TransferError(f"{address} does not take it")
        _send_image(connection, found, rate)
        if _receive(connection, len(KEPT)) != KEPT:
            raise TransferError(f"{address} has not kept it")


def get(key: Key, folder: Path, address: str, token: str) -> Found:
    """Get an image from the agent at `address` into `folder`. Raises OSError, BadImage."""
    with _connected(address, token, {"what": "get", "key": asdict(key)}) as connection:
        with _Draft(folder, _LENGTH.unpack(_receive(connection, _LENGTH.size))[0]) as draft:
            draft.receive(connection)
            found = draft.keep()
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


def _send_image(connection: socket.socket, found: Found, rate: float) -> None:
    """Its bytes, and at the end that they were those of one image."""
    began, sent = time.monotonic(), 0
    with found.path.open("rb") as file:
        while sent < found.used:
            count = min(PIECE, found.used - sent)
            if connection.sendfile(file, sent, count) != count:
                raise TransferError(f"{found.path}: cut off")
            sent += count
            ahead = sent / rate - (time.monotonic() - began) if rate else 0.0
            if ahead > 0:
                time.sleep(min(ahead, SILENT_SECONDS / 2))
    if look(found.path) != found:
        raise BadImage(f"{found.path}: overwritten while it was sent")
    connection.sendall(WHOLE)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise TransferError("the other side ended the connection")
        data += piece
    return bytes(data)
