"""A peer that writes what it likes: ZMTP 3 by hand, encrypted or not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from nacl.public import Box, PrivateKey, PublicKey
from zmq.utils import z85

from unicron_ctl.shared.protocol.encryption import new_pair

MORE, COMMAND = 1, 4


class Stranger:
    """Connected to the controller at `address`, which encrypts by `key` unless that is empty.

    metadata: what it says of itself. until: the last step of the handshake that it takes: "", "greeting", "hello",
    "ready".
    """

    def __init__(self, address: str, key: str = "", identity: bytes = b"", until: str = "ready") -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 10.0)
        self._box: Box | None = None
        self._number = 2
        self._metadata = b"\x0bSocket-Type\0\0\0\6DEALER\x08Identity" + len(identity).to_bytes(4, "big") + identity
        if until:
            mechanism = b"CURVE" if key else b"NULL"
            self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32))
            self._read(64)
        if until in ("hello", "ready"):
            self._shake(z85.decode(key), until) if key else self._frame_command(b"\x05READY" + self._metadata)
        if until == "ready":
            self.frame_in()

    def frame(self, body: bytes, flags: int = 0) -> bytes:
        """One of these bytes, as it goes to the other side."""
        if self._box is None:
            return framed(flags, body)
        self._number += 1
        number = self._number.to_bytes(8, "big")
        sealed = self._box.encrypt(bytes((2 if flags == COMMAND else flags,)) + body, b"CurveZMQMESSAGEC" + number)
        return framed(0, b"\x07MESSAGE" + number + sealed.ciphertext)

    def send(self, body: bytes, flags: int = 0) -> None:
        self.socket.sendall(self.frame(body, flags))

    def frame_in(self) -> bytes:
        """The content of the next frame, encrypted or not."""
        flags, size = self._read(2)
        if flags & 2:
            size = int.from_bytes(bytes((size,)) + self._read(7), "big")
        return self._read(size)

    def close(self) -> None:
        self.socket.close()

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            data = self.socket.recv(count - len(found))
            if not data:
                raise ConnectionError("the other side has closed")
            found += data
        return found

    def _frame_command(self, body: bytes) -> None:
        self.socket.sendall(framed(COMMAND, body))

    def _shake(self, server: bytes, until: str) -> None:
        secret = PrivateKey.generate()
        public = bytes(secret.public_key)
        box, number = Box(secret, PublicKey(server)), (1).to_bytes(8, "big")
        proof_of_key = box.encrypt(bytes(64), b"CurveZMQHELLO---" + number).ciphertext
        hello = b"\x05HELLO\x01\0" + bytes(72) + public + number + proof_of_key
        self._frame_command(hello)
        if until == "hello":
            return
        welcome = self.frame_in()
        opened = box.decrypt(welcome[24:], b"WELCOME-" + welcome[8:24])
        theirs, cookie = PublicKey(opened[:32]), opened[32:]
        mine, proof = (z85.decode(one) for one in new_pair())
        nonce, number = os.urandom(16), (2).to_bytes(8, "big")
        self._box = Box(secret, theirs)
        vouch = Box(PrivateKey(proof), theirs).encrypt(public + server, b"VOUCH---" + nonce).ciphertext
        initiate = self._box.encrypt(mine + nonce + vouch + self._metadata, b"CurveZMQINITIATE" + number)
        self._frame_command(b"\x08INITIATE" + cookie + number + initiate.ciphertext)


def framed(flags: int, body: bytes) -> bytes:
    size = len(body)
    return bytes((flags, size)) + body if size < 256 else bytes((flags | 2,)) + size.to_bytes(8, "big") + body


def resident(pid: int) -> int:
    """MiB of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
