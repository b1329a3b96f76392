"""Connections of simulated agents to a controller, over TCP and without libzmq.

To the controller each is a DEALER like any other. A simulator of thousands of agents needs less than half of the time
that libzmq would take: no thread has to be woken for a message, and a connection has one descriptor. The kernel stamps
what comes in, so reading every few milliseconds blurs no latency.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator

from benchmarks.scale.agents import address_of
from unicron_ctl.shared.protocol.zmtp import ProtocolError, Session

SO_TIMESTAMPNS = 35  # socket(7); missing in Python's socket module
ANCILLARY_BYTES = socket.CMSG_SPACE(16)
READ_BYTES, MESSAGE_BYTES = 1 << 18, 1 << 28
CONNECTED_AT_ONCE, HANDSHAKE_SECONDS = 256, 30.0
_stamp = struct.Struct("qq")


class Failed(Exception):
    """The controller did not do its part; the text names the part."""


class Connection:
    """One connection to the ROUTER at `host`:`port`, from this machine's address `source`. Raises OSError."""

    __slots__ = ("_held", "_session", "_socket", "_unsent", "arrived")

    def __init__(self, host: str, port: int, identity: bytes, source: str, timeout: float = 30.0) -> None:
        self._session = Session(None, MESSAGE_BYTES)
        greeting = bytes(self._session.reply)
        self._socket = socket.create_connection((host, port), timeout, (source, 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.sendall(greeting + self._session.pack(_ready(identity), command=True))
        self._socket.setblocking(False)
        self._unsent = b""
        self._held = b""  # messages until the handshake is over
        self.arrived = 0.0
        """When the last byte came in: seconds since the epoch, by the kernel's clock."""

    def fileno(self) -> int:
        """Return the descriptor, for a poller."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it at once."""
        self._socket.close()

    @property
    def accepted(self) -> bool:
        """The handshake is over."""
        return self._session.ready

    def send(self, message: bytes) -> None:
        """Send a message. What does not fit into the socket now goes out with the next call."""
        data = self._session.pack(message)
        if self.accepted:
            self._write(data)
        else:
            self._held += data

    def flush(self) -> bool:
        """Send what is left. Return whether all is sent."""
        if self._unsent:
            self._write(b"")
        return not self._unsent

    def receive(self) -> list[bytes]:
        """Return the messages that have come in. Raises Failed if the connection is lost."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(READ_BYTES, ANCILLARY_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Failed(f"a connection was lost: {error.strerror}") from None
        if not data:
            raise Failed("the controller has closed a connection")
        self.arrived = time.time()  # the kernel begins to stamp a little after it was asked to
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = _stamp.unpack(value)
                self.arrived = seconds + nanoseconds * 1e-9
        accepted, found = self.accepted, []
        self._session.feed(data)
        try:
            while (message := self._session.read()) is not None:
                if isinstance(message, bytes):
                    found.append(message)
        except ProtocolError as error:
            raise Failed(f"the controller breaks the protocol: {error}") from None
        if self.accepted and not accepted:
            self._session.reply.clear()  # a listener's part of the handshake
            self._write(self._held)
        elif self.accepted and self._session.reply:
            self._write(bytes(self._session.reply))
            self._session.reply.clear()
        return found

    def _write(self, data: bytes) -> None:
        data = self._unsent + data
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise Failed(f"a connection was lost: {error.strerror}") from None
        self._unsent = data[sent:]


def _ready(identity: bytes) -> bytes:
    """Return the handshake's command READY with a DEALER's metadata."""
    body = b"\5READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes((len(name),)) + name + len(value).to_bytes(4) + value
    return body


class Sockets:
    """A connection to the controller at `endpoint` (host, port) for each of `names`, in real time. Raises OSError.

    Each comes from an address of its own, as a node's does: one address may have half of a controller's connections.
    """

    def __init__(self, endpoint: tuple[str, int], names: list[str]) -> None:
        self._endpoint = endpoint
        self._connections: dict[int, Connection] = {}
        self._by_descriptor: dict[int, int] = {}
        self._poller = select.epoll()
        self._unsent: set[int] = set()
        for index, name in enumerate(names, 1):
            self.connect(index - 1, name)
            if index % CONNECTED_AT_ONCE == 0 or index == len(names):
                self._await_accepted()

    def _await_accepted(self) -> None:
        """Wait until all handshakes are over: the kernel keeps only so many connections for a busy controller."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        while waiting := [one for one in self._connections.values() if not one.accepted]:
            if time.monotonic() > deadline:
                raise Failed(f"{len(waiting)} connections were not accepted within {HANDSHAKE_SECONDS:g} s")
            time.sleep(0.001)
            for connection in waiting:
                connection.receive()

    def connect(self, index: int, name: str) -> None:
        """Open a connection in place of the line's old one."""
        self.drop(index)
        connection = self._connections[index] = Connection(*self._endpoint, name.encode(), address_of(index))
        self._by_descriptor[connection.fileno()] = index
        self._poller.register(connection.fileno(), select.EPOLLIN)

    def drop(self, index: int) -> None:
        """Close one line."""
        connection = self._connections.pop(index, None)
        if connection is None:
            return
        with contextlib.suppress(OSError, KeyError):
            self._poller.unregister(connection.fileno())
        connection.close()
        self._unsent.discard(index)

    def now(self) -> float:
        return time.time()

    def send(self, index: int, data: bytes) -> None:
        self._connections[index].send(data)
        if not self._connections[index].flush():
            self._unsent.add(index)

    def flush(self) -> None:
        self._unsent = {index for index in self._unsent if not self._connections[index].flush()}

    def receive(self) -> Iterator[tuple[int, list[bytes], float]]:
        """Yield (line, messages, when the last of them came)."""
        for descriptor, _ in self._poller.poll(0, max(1, len(self._connections))):
            index = self._by_descriptor[descriptor]
            if connection := self._connections.get(index):  # else it was dropped meanwhile
                messages = connection.receive()
                yield index, messages, connection.arrived

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._poller.close()
