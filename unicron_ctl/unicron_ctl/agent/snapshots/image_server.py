"""Gives images of this node to the job's other agents, and receives theirs (:mod:`image_stream` has the protocol)."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicron_ctl.agent.snapshots import image_stream as stream
from unicron_ctl.shared.system.addresses import join, listen_at
from unicron_transition.snapshot.image_format import BadImage

PROOF_SECONDS = 5.0  # for the whole proof
PAUSE_SECONDS = 0.5  # after a connection that could not be accepted
STRANGERS = 32  # connections without a proof
AT_ONCE = 8  # connections that are served at the same time


class News(NamedTuple):
    """An event of the server."""

    problem: str = ""
    """A line that is logged once."""
    more: str = ""
    """The end of that line, which differs each time."""


class _Strangers:
    """Connections without a proof, the oldest first. If there are too many, the oldest is shut: a client with the token
    proves it at once, so idle strangers keep no client out."""

    def __init__(self) -> None:
        self._there: dict[socket.socket, None] = {}
        self._lock = threading.Lock()  # a closed connection is never shut: its descriptor could be another file's

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._there[connection] = None
            if len(self._there) > STRANGERS:
                first = next(iter(self._there))
                del self._there[first]
                with contextlib.suppress(OSError):
                    first.shutdown(socket.SHUT_RDWR)

    def remove_stranger(self, connection: socket.socket) -> bool:
        """Remove a connection that has proved itself, or will be closed; False if it was shut."""
        with self._lock:
            if connection not in self._there:
                return False
            del self._there[connection]
            return True


class Server:
    """Receives images into a folder and gives its images to clients with the token, in threads of its own."""

    def __init__(self, folder: Callable[[], Path | None], host: str, news: Callable[[News], None], meter: stream.Meter):
        self._where, self._meter = folder, meter
        self._news = news  # called when an image came, was removed, or could not be received
        self.token = secrets.token_hex(16)
        self._strangers, self._slots = _Strangers(), threading.BoundedSemaphore(AT_ONCE)
        self._closing = False
        self._socket, self.address = _listen(host)  # host:port; "" if nothing could be bound
        if self._socket is not None:
            threading.Thread(target=self._run, name="unicron-images", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._closing = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _run(self) -> None:
        assert self._socket is not None
        while not self._closing:
            try:
                self._start_serving(self._socket.accept()[0])
            except (OSError, RuntimeError) as error:  # temporary: a lost connection, no descriptor or thread left
                if not self._closing:
                    why = getattr(error, "strerror", "") or str(error)
                    what = "a connection for copies of the training state could not be taken"
                    self._news(News(f"{what}: {why}; it goes on"))
                    time.sleep(PAUSE_SECONDS)

    def _start_serving(self, connection: socket.socket) -> None:
        """Serve a connection in a thread of its own. Raises RuntimeError if none can be started."""
        self._strangers.add(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), name="unicron-image", daemon=True).start()
        except RuntimeError:
            self._strangers.remove_stranger(connection)
            connection.close()
            raise

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                try:
                    request = self._proven(connection)
                finally:
                    stays = self._strangers.remove_stranger(connection)
                if not stays:
                    return
                if not self._slots.acquire(blocking=False):
                    connection.sendall(stream.LENGTH.pack(0) if request.key is not None else stream.SO)
                    return
                try:
                    connection.settimeout(stream.SILENT_SECONDS)
                    stream.keep_alive(connection)
                    self._answer(connection, request)
                finally:
                    self._slots.release()
        except (OSError, OverflowError, BadImage, msgspec.DecodeError):
            pass  # the other side sees that nothing came, and reports it

    def _proven(self, connection: socket.socket) -> stream.Request:
        """Receive a request with a proof of the token. Raises OSError, msgspec.DecodeError."""
        until, nonce = time.monotonic() + PROOF_SECONDS, secrets.token_bytes(stream.NONCE)
        connection.settimeout(PROOF_SECONDS)
        connection.sendall(nonce)
        proof = stream.receive(connection, stream.PROOF, until)
        length = stream.LENGTH.unpack(stream.receive(connection, stream.LENGTH.size, until))[0]
        if length > stream.MOST_REQUEST:
            raise stream.TransferError("no request is as long")
        request = stream.receive(connection, length, until)
        if not hmac.compare_digest(proof, stream.proof(self.token, nonce, request)):
            raise stream.TransferError("the proof is wrong")
        return msgspec.msgpack.decode(request, type=stream.Request)

    def _answer(self, connection: socket.socket, request: stream.Request) -> None:
        folder = self._where()
        if folder is None:
            return
        if request.key is not None:
            found = stream.find(folder, request.key)
            if found is not None:
                connection.sendall(stream.LENGTH.pack(found.used))
                stream.send_image(connection, found, 0.0, self._meter, stream.room_seconds(found.used))
                if stream.receive(connection, len(stream.KEPT)) == stream.HARM and (problem := stream.examine(found)):
                    self._news(News(problem))
        else:
            self._take_image(connection, folder, request.bytes)

    def _take_image(self, connection: socket.socket, folder: Path, length: int) -> None:
        try:
            draft = stream.Draft(folder, length)
        except (OSError, OverflowError) as error:
            what, why = stream.no_room(folder, length, error)
            self._news(News(f"a copy of another node's training state is not kept: {what}", why))
            reason = (what + why).encode()[: stream.MOST_REASON]
            connection.sendall(stream.NO + stream.LENGTH.pack(len(reason)) + reason)
            return
        try:
            with draft:
                connection.sendall(stream.GO)
                draft.receive(connection, self._meter)
                draft.keep_image()
        except stream.ChecksumError:
            connection.sendall(stream.HARM)
            raise
        self._news(News())
        connection.sendall(stream.KEPT)


def _listen(host: str) -> tuple[socket.socket | None, str]:
    for interface in (host, ""):  # the node's name need not be that of an interface
        with contextlib.suppress(OSError):
            listening = listen_at(interface, STRANGERS)
            return listening, join(host, listening.getsockname()[1])
    return None, ""
