"""A DEALER's connection without libzmq: a TCP socket that speaks ZMTP 3 (https://rfc.zeromq.org/spec/23/).

To the controller it is a DEALER like any other. To a simulator of thousands of agents it costs less than half: no
second thread that must be woken for every message, one descriptor a connection in place of two. Above all the kernel
stamps what comes in, so that the simulator may read every few milliseconds without blurring a latency, and the
controller's core does not pay for waking it.
"""

from __future__ import annotations

import socket
import struct
import time

SO_TIMESTAMPNS = 35  # socket(7); missing in Python's socket module
ANCILLARY_BYTES = socket.CMSG_SPACE(16)
READ_BYTES = 1 << 18
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MAX_SHORT = 255  # bytes of a frame whose length fits in one byte
_stamp = struct.Struct("qq")


class Lost(Exception):
    """The other side has closed the connection, or broke the protocol."""


class Connection:
    """One connection to the ROUTER at `host`:`port`, under the identity `identity`. Raises OSError."""

    __slots__ = ("_greeted", "_held", "_rest", "_socket", "_unsent", "arrived")

    def __init__(self, host: str, port: int, identity: bytes, timeout: float = 30.0) -> None:
        self._socket = socket.create_connection((host, port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.sendall(GREETING + _ready(identity))
        self._socket.setblocking(False)
        self._greeted, self._rest, self._unsent = False, b"", b""
        self._held: bytes | None = b""  # messages until the other side is ready: before, they break the handshake
        self.arrived = 0.0  # when the last byte read so far came in: seconds since the epoch, by the kernel's clock

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes it at once."""
        self._socket.close()

    @property
    def accepted(self) -> bool:
        """The other side is ready for messages."""
        return self._held is None

    def send(self, message: bytes) -> None:
        """Send a message of one frame; what does not fit into the socket now goes out with the next call."""
        if self._held is None:
            self._write(_frame(0, message))
        else:
            self._held += _frame(0, message)

    def flush(self) -> bool:
        """Send what is left; True when nothing is."""
        if self._unsent:
            self._write(b"")
        return not self._unsent

    def receive(self) -> list[bytes]:
        """The messages that have come in, of one frame each. Raises Lost."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(READ_BYTES, ANCILLARY_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Lost(error.strerror) from None
        if not data:
            raise Lost("the controller has closed the connection")
        self.arrived = time.time()  # the kernel begins to stamp a little after it was asked to
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = _stamp.unpack(value)
                self.arrived = seconds + nanoseconds * 1e-9
        return self._messages(self._rest + data)

    def _messages(self, data: bytes) -> list[bytes]:
        found: list[bytes] = []
        place = 0
        if not self._greeted:
            if len(data) < len(GREETING):
                self._rest = data
                return found
            place, self._greeted = len(GREETING), True
        while len(data) - place >= 2:
            flags = data[place]
            if flags & LONG:
                start = place + 9
                end = start + int.from_bytes(data[place + 1 : start]) if len(data) >= start else len(data) + 1
            else:
                start = place + 2
                end = start + data[place + 1]
            if end > len(data):
                break
            if flags & COMMAND:
                self._on_command(data[start:end])
            else:
                found.append(data[start:end])
            place = end
        self._rest = data[place:]
        return found

    def _on_command(self, body: bytes) -> None:
        if body.startswith(b"\4PING"):
            self._write(_frame(COMMAND, b"\4PONG" + body[7:]))
        elif body.startswith(b"\5READY"):
            held, self._held = self._held or b"", None
            self._write(held)
        elif body.startswith(b"\5ERROR"):
            raise Lost(f"the controller refused the connection: {body[7:].decode(errors='replace')}")

    def _write(self, data: bytes) -> None:
        if self._unsent:
            data = self._unsent + data
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise Lost(error.strerror) from None
        self._unsent = data[sent:] if sent < len(data) else b""


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) <= MAX_SHORT:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8) + body


def _ready(identity: bytes) -> bytes:
    """The handshake's command: who we are."""
    body = b"\5READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes((len(name),)) + name + len(value).to_bytes(4) + value
    return _frame(COMMAND, body)
