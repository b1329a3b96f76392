"""How agents and commands learn the controller's public key without an admin's work.

They ask by datagram, on the port where the controller listens. The answer is a munge credential that holds the key; it
is believed when its maker is somebody who could have replaced the controller anyway: root, SlurmUser, a user that the
configuration names, or the asking user himself. So nobody needs to be believed for what he sends, and a forged or a
repeated answer changes nothing (docs/design/trust.md).
"""

from __future__ import annotations

import os
import pwd
import re
import select
import socket
import subprocess
import time
from collections.abc import Sequence

from unicron_ctl.config import is_loopback
from unicron_ctl.errors import WRONG_USE, UserError
from unicron_ctl.protocol import claims, datagrams, wire
from unicron_ctl.protocol.encryption import PLAIN, is_key
from unicron_ctl.protocol.munge import MungeError, unmunge

HELLO_BYTES = 1024  # of a question at least: no shorter than its answer
HELLO_SECONDS = 0.3  # between two questions
SLURM_SECONDS = 5.0  # for scontrol to say who SlurmUser is
ASK_SLURM_AGAIN = 60.0  # seconds after it gave no answer
READ_BYTES = 8192
READS = 8  # answers in one turn: others can send some, too
_SLURM_USER = re.compile(r"^SlurmUser\s*=\s*\S*\((\d+)\)", re.MULTILINE)


def endpoint(address: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT. Raises UserError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"{address} is no address of a controller: write tcp://HOST:PORT", WRONG_USE)
    return host.strip("[]"), int(port)


class Hello:
    """One asker. believed: names of users whose controllers are believed, beside root, SlurmUser and our own user.

    problem: why the last answer was not believed, or could not be had. Raises UserError for an address that is none.
    """

    def __init__(self, address: str, believed: Sequence[str] = ()) -> None:
        self._host, self._port = endpoint(address)
        self._believed = believed
        self._where: tuple[str, int] | None = None
        self._socket: socket.socket | None = None
        self._question = wire.encode(datagrams.Hello(padding=" " * HELLO_BYTES))
        self.problem = ""

    def open(self) -> bool:
        """Finds the controller's address; False, with the problem, while the name service does not know it."""
        if self._socket is not None:
            return True
        try:
            family, _, _, _, where = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        except (OSError, UnicodeError) as error:
            self.problem = f"{self._host}: {getattr(error, 'strerror', None) or error}"
            return False
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._where = str(where[0]), int(where[1])
        return True

    def fileno(self) -> int:
        """For a poller; -1 before it is open."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def local(self) -> bool:
        """The controller's address is this machine's own."""
        return self._where is not None and is_loopback(self._where[0])

    def ask(self) -> None:
        """Sends the question; what becomes of it is the answer's matter."""
        if not self.open():
            return
        assert self._socket is not None and self._where is not None
        try:
            self._socket.sendto(self._question, self._where)
        except OSError as error:
            self.problem = f"{self._host}: {error.strerror}"

    def read(self) -> list[datagrams.Introduction]:
        """The answers that have come; does not wait."""
        found: list[datagrams.Introduction] = []
        for _ in range(READS if self._socket is not None else 0):
            assert self._socket is not None
            try:
                found.append(wire.decode(self._socket.recv(READ_BYTES), datagrams.Introduction))
            except OSError:
                break
            except wire.BadMessage as error:
                self.problem = str(error)
        return found

    def believed(self, answers: Sequence[datagrams.Introduction]) -> str | None:
        """The key, :data:`PLAIN` from a controller that encrypts nothing, or None when nothing was said that is
        believed. Asks munge, the name service and Slurm, so it may take `munge.TIME_LIMIT` and SLURM_SECONDS."""
        return next((key for answer in answers if (key := self._understand(answer)) is not None), None)

    def _understand(self, message: datagrams.Introduction) -> str | None:
        if message.plain:
            if self.local:
                return PLAIN
            self.problem = (
                'the controller encrypts nothing (auth = "none"), which is believed at a loopback address only'
            )
            return None
        if not message.credential:
            self.problem = message.error[:200] or "the controller cannot prove who it is"
            return None
        try:
            found = unmunge(message.credential)
        except MungeError as error:
            self.problem = f"the controller's credential: {error}"
            return None
        key = claims.controller_key(found.payload)
        if not is_key(key):
            self.problem = "the controller's credential holds no key"
        elif not trusted(found.uid, self._believed):
            self.problem = (
                f"the controller there belongs to {_name(found.uid)}, who is neither root, SlurmUser nor you: "
                "[agent] controller_users can name him"
            )
        else:
            return key
        return None

    def wait(self, seconds: float) -> str | None:
        """Asks until the key is known or so many seconds have passed."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.ask()
            until = time.monotonic() + min(HELLO_SECONDS, left)
            while (rest := until - time.monotonic()) > 0:
                if self._socket is None:
                    time.sleep(rest)
                elif _readable(self._socket, rest) and (key := self.believed(self.read())) is not None:
                    return key
        return None


def trusted(uid: int, believed: Sequence[str] = ()) -> bool:
    """Whether this user may be the controller's."""
    return uid in (0, os.geteuid()) or uid in _uids(believed) or uid == _slurm_user.uid()


def _readable(source: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _uids(names: Sequence[str]) -> set[int]:
    found = set()
    for name in names:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            continue
    return found


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


class _SlurmUser:
    """SlurmUser's number, as `scontrol` says it; asked for at most once a minute until it answers."""

    def __init__(self) -> None:
        self._uid: int | None = None
        self._again = 0.0

    def uid(self) -> int | None:
        if self._uid is None and time.monotonic() >= self._again:
            self._again = time.monotonic() + ASK_SLURM_AGAIN
            try:
                done = subprocess.run(
                    ["scontrol", "show", "config"],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=SLURM_SECONDS,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired):
                return None
            found = _SLURM_USER.search(done.stdout)
            self._uid = int(found.group(1)) if found and done.returncode == 0 else None
        return self._uid


_slurm_user = _SlurmUser()
