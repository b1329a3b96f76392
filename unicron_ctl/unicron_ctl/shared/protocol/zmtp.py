"""Speaks ZeroMQ's wire protocol (ZMTP 3.1, RFC 37; CURVE, RFC 26) as the listener's side of one connection, from bytes
to bytes.

Peers use libzmq, but libzmq must not listen where strangers can connect: it holds a message of endless frames in memory
until the last one has come, and ends its process (assertion of `add_out_pipe`) if a peer takes the name that the next
one would get (docs/design/trust.md). Here a message is one frame, and only the frame that is coming in is kept.
"""

from __future__ import annotations

import os
import struct

from nacl.bindings import (
    crypto_box_beforenm,
    crypto_box_easy_afternm,
    crypto_box_keypair,
    crypto_box_open_easy_afternm,
)
from nacl.exceptions import CryptoError
from zmq.utils import z85

KEY_BYTES, MAC_BYTES = 32, 16
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
_SEALED_COMMAND = 2  # the flag of a command within CURVE's message
_GREETING_BYTES = 64
_HANDSHAKE_BYTES = 1024  # of a frame during the handshake: libzmq's longest has some 600
_HELLO_BYTES, _INITIATE_BYTES, _COOKIE_BYTES, _VOUCH_BYTES = 200, 257, 96, 80
_MESSAGE = b"\x07MESSAGE"
_HEADER_BYTES = len(_MESSAGE) + 8
OVERHEAD_BYTES = _HEADER_BYTES + MAC_BYTES + 1  # of CURVE, in each message
_PART_BYTES = 65536  # joined as they come
_CONTEXT_BYTES = 16  # of a PING, repeated in its PONG
_METADATA = b"\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
_SIZE = struct.Struct(">Q")
NOTHING = object()
"""A command was read, not a message."""


class ProtocolError(Exception):
    """The peer breaks the protocol, or wants a part that is not served: close its connection."""


class Keys:
    """A listener's long-term CURVE keys."""

    def __init__(self, public: str, secret: str) -> None:
        """Raises ValueError for keys that are not Z85."""
        self.public, self.secret = z85.decode(public), z85.decode(secret)
        if len(self.public) != KEY_BYTES or len(self.secret) != KEY_BYTES:
            raise ValueError("no CURVE keys")


class Session:
    """The protocol's state.

    Parameters
    ----------
    keys
        None without encryption.
    most
        The largest number of bytes of a message.
    """

    def __init__(self, keys: Keys | None, most: int) -> None:
        self._keys, self._most = keys, most
        self._data, self._at = b"", 0
        self._parts: list[bytearray] = []  # later bytes, joined once there are enough of them
        self._wanted = 0  # bytes that are missing for the next frame
        self._step = Session._greeting  # of the class: a bound method would make a reference cycle
        self._box: bytes | None = None  # the key that both sides share
        self._theirs, self._nonce = 0, 0  # the last number of each side
        self._pair, self._cookie = (b"", b""), b""
        self.key = ""  # the peer's public key, in Z85, or empty
        self.ready = False  # the handshake is done
        mechanism = b"NULL" if keys is None else b"CURVE"
        self.reply = bytearray(b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32))
        """Bytes for the peer. The sender empties it."""

    @property
    def held(self) -> int:
        """Bytes that have come but were not read."""
        return len(self._data) - self._at + sum(map(len, self._parts))

    @property
    def lacks(self) -> int:
        """Bytes that the incoming message still lacks."""
        return max(0, self._wanted)

    def feed(self, data: bytes) -> None:
        """Take in bytes from the peer."""
        if self._at == len(self._data):
            self._data, self._at = data, 0
            return
        if self._parts and len(self._parts[-1]) + len(data) <= _PART_BYTES:
            self._parts[-1] += data
        else:
            self._parts.append(bytearray(data))
        self._wanted -= len(data)
        if self._wanted <= 0:
            self._data, self._at = b"".join((memoryview(self._data)[self._at :], *self._parts)), 0
            self._parts.clear()

    def read(self) -> bytes | object | None:
        """Return the next message; NOTHING after a command or a step of the handshake; None if bytes are missing.
        Raises ProtocolError."""
        if self._at == len(self._data):
            return None
        if not self.ready:
            return self._step(self)
        frame = self._frame(self._most + OVERHEAD_BYTES)
        if frame is None:
            return None
        flags, body = frame
        if self._box is not None:
            if body[:8] != _MESSAGE or len(body) < OVERHEAD_BYTES:
                raise ProtocolError("a message is not encrypted")
            number = _SIZE.unpack_from(body, 8)[0]
            if number <= self._theirs:
                raise ProtocolError("a message came twice")
            self._theirs = number
            body = self._open(self._box, body[16:], b"CurveZMQMESSAGEC" + body[8:16])
            flags = body[0] & MORE | (COMMAND if body[0] & _SEALED_COMMAND else 0)
            body = body[1:]
        if flags & MORE:
            raise ProtocolError("a message has more than one frame")
        if flags & COMMAND:
            return self._command(body)
        return body

    def pack(self, data: bytes, command: bool = False) -> bytes:
        """Return the bytes of a message, or a command, for the peer."""
        if self._box is None:
            return _frame_bytes(COMMAND if command else 0, data)
        self._nonce += 1
        number = _SIZE.pack(self._nonce)
        flags = bytes((_SEALED_COMMAND,)) if command else b"\0"
        sealed = crypto_box_easy_afternm(flags + data, b"CurveZMQMESSAGES" + number, self._box)
        return _frame_bytes(0, _MESSAGE + number + sealed)

    # ------------------------------------------------------------ frames
    def _frame(self, most: int) -> tuple[int, bytes] | None:
        """Return flags and content of the next frame, if all of it is there. Raises ProtocolError."""
        data, at = self._data, self._at
        left = len(data) - at
        if left < 2 or self._wanted > 0:
            return None
        flags, size, head = data[at], data[at + 1], 2
        if flags & LONG:
            if left < 9:
                return None
            size, head = _SIZE.unpack_from(data, at + 1)[0], 9
        if flags & MORE:
            raise ProtocolError("a message has more than one frame")
        if size > most:
            raise ProtocolError(f"a message of {size} bytes")
        end = head + size
        if left < end:
            self._wanted = end - left
            return None
        self._at = at + end
        return flags, data[at + head : at + end]

    def _command(self, body: bytes) -> object:
        """Answer PING; all other commands are for sockets of other kinds."""
        if body[:5] == b"\x04PING" and len(body) >= 7:
            self.reply += self.pack(b"\x04PONG" + body[7 : 7 + _CONTEXT_BYTES], command=True)
        return NOTHING

    # ------------------------------------------------------------ handshake
    def _greeting(self) -> object | None:
        data = self._data[self._at : self._at + _GREETING_BYTES]
        if data[:1] not in (b"", b"\xff") or data[10:11] not in (b"", b"\x03"):
            raise ProtocolError("it does not speak ZeroMQ 3")
        if len(data) < _GREETING_BYTES:
            return None
        name = b"NULL" if self._keys is None else b"CURVE"
        if data[9] != 0x7F or data[12:32].rstrip(b"\0") != name:
            raise ProtocolError(f"it does not speak {name.decode()}")
        self._at += _GREETING_BYTES
        if self._keys is None:
            self.reply += _frame_bytes(COMMAND, b"\x05READY" + _METADATA)
            self._step = Session._null
        else:
            self._step = Session._hello
        return NOTHING

    def _handshake(self, name: bytes) -> bytes | None:
        """Return the next command, which must be this one. Raises ProtocolError."""
        frame = self._frame(_HANDSHAKE_BYTES)
        if frame is None:
            return None
        flags, body = frame
        if not flags & COMMAND or body[: len(name)] != name:
            raise ProtocolError("another command was due in the handshake")
        return body

    def _null(self) -> object | None:
        if self._handshake(b"\x05READY") is None:
            return None
        self.ready = True
        return NOTHING

    def _hello(self) -> object | None:
        body = self._handshake(b"\x05HELLO")
        if body is None:
            return None
        assert self._keys is not None
        if len(body) != _HELLO_BYTES or body[6:8] != b"\x01\x00":
            raise ProtocolError("a HELLO that is none")
        theirs = body[80:112]
        box = self._box_of(theirs, self._keys.secret)
        self._open(box, body[120:], b"CurveZMQHELLO---" + body[112:120])
        self._pair, self._cookie = crypto_box_keypair(), os.urandom(_COOKIE_BYTES)
        nonce = os.urandom(16)
        sealed = crypto_box_easy_afternm(self._pair[0] + self._cookie, b"WELCOME-" + nonce, box)
        self.reply += _frame_bytes(COMMAND, b"\x07WELCOME" + nonce + sealed)
        self._cookie += theirs
        self._step = Session._initiate
        return NOTHING

    def _initiate(self) -> object | None:
        body = self._handshake(b"\x08INITIATE")
        if body is None:
            return None
        assert self._keys is not None
        cookie, theirs = self._cookie[:_COOKIE_BYTES], self._cookie[_COOKIE_BYTES:]
        if len(body) < _INITIATE_BYTES or body[9:105] != cookie:
            raise ProtocolError("an INITIATE that is none")
        box = self._box_of(theirs, self._pair[1])
        content = self._open(box, body[113:], b"CurveZMQINITIATE" + body[105:113])
        key, vouch = content[:32], content[48 : 48 + _VOUCH_BYTES]
        vouched = self._open(self._box_of(key, self._pair[1]), vouch, b"VOUCH---" + content[32:48])
        if vouched != theirs + self._keys.public:
            raise ProtocolError("its key is not proven")
        self._theirs, self._nonce = _SIZE.unpack_from(body, 105)[0], 1
        number = _SIZE.pack(self._nonce)
        sealed = crypto_box_easy_afternm(_METADATA, b"CurveZMQREADY---" + number, box)
        self.reply += _frame_bytes(COMMAND, b"\x05READY" + number + sealed)
        self._box, self._pair, self._cookie = box, (b"", b""), b""
        self.key, self.ready = z85.encode(key).decode(), True
        return NOTHING

    @staticmethod
    def _box_of(public: bytes, secret: bytes) -> bytes:
        try:
            return crypto_box_beforenm(public, secret)
        except CryptoError:
            raise ProtocolError("no public key") from None

    @staticmethod
    def _open(box: bytes, sealed: bytes, nonce: bytes) -> bytes:
        try:
            return crypto_box_open_easy_afternm(sealed, nonce, box)
        except CryptoError:
            raise ProtocolError("not sealed with this key") from None


def _frame_bytes(flags: int, body: bytes) -> bytes:
    size = len(body)
    return bytes((flags, size)) + body if size < 256 else bytes((flags | LONG,)) + _SIZE.pack(size) + body
