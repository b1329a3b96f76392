"""Gets the controller's public key for agents and commands without an admin's work.

They ask by datagram, on the port where the controller listens. The answer is a munge credential with the key. It is
trusted if its maker could have replaced the controller anyway: root, SlurmUser, a user that the configuration names, or
the asking user. So the sender need not be trusted, and a forged or repeated answer has no effect
(docs/design/trust.md).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unicron_ctl.shared.protocol import claims, datagrams, wire
from unicron_ctl.shared.protocol.encryption import PLAIN, is_key
from unicron_ctl.shared.protocol.munge import MungeError, unmunge
from unicron_ctl.shared.system.addresses import Target, canonical, endpoints, is_loopback, reason_of, resolve_all
from unicron_detector.health.program_output import TooMuchOutput, run_program

HELLO_BYTES = 1024  # of a question at least, so that it is no shorter than its answer
HELLO_SECONDS = 0.3  # between two questions
SLURM_SECONDS = 5.0  # for scontrol to show SlurmUser
ASK_SLURM_AGAIN = 60.0  # seconds after it gave no answer
READ_BYTES = 8192
READS = 8  # answers in one turn: anybody can send some
_SLURM_USER = re.compile(r"^SlurmUser\s*=\s*\S*\((\d+)\)", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """A message, and the address that sent it; None if that was not asked."""

    introduction: datagrams.Introduction
    reached: Target | None


@dataclass(frozen=True)
class ControllerKey:
    """The controller's key, :data:`PLAIN` without encryption, and the address that has sent it."""

    key: str
    reached: Target | None


class Hello:
    """Asks all of the controller's addresses at once.

    Parameters
    ----------
    address
        May name several hosts. One has the controller, and the others have standbys, which do not answer.
    believed
        Names of users whose controllers are trusted, besides root, SlurmUser and our own user.

    Raises
    ------
    UserError
        For an address that makes no sense.
    """

    def __init__(self, address: str, believed: Sequence[str] = ()) -> None:
        self._hosts = endpoints(address)
        self._believed = believed
        self.targets: list[Target] = []  # the controller's addresses, once it is open
        self.reached: Target | None = None  # where `wait_for_key` has found the key
        self._socket: socket.socket | None = None
        self._question = wire.encode(datagrams.Hello(padding=" " * HELLO_BYTES))
        self._problem = ""
        self._asked = self._answered = False

    @property
    def problem(self) -> str:
        """Why the last answer was not trusted, or did not come; empty before the first question."""
        if self._problem or self._answered or not self._asked:
            return self._problem
        hosts: dict[int, list[str]] = {}
        for target in self.targets:
            hosts.setdefault(target.port, []).append(target.host)
        silent = ", or ".join(f"{port} of {', '.join(names)}" for port, names in hosts.items())
        return f"no answer from UDP port {silent}"

    @property
    def several(self) -> bool:
        """Whether there is a standby: the controller may be at another host by now."""
        return len(self._hosts) > 1

    def open(self) -> bool:
        """Look up the controller's addresses, which may take long. Returns False, and sets the problem, while the name
        service does not know them."""
        if self._socket is not None:
            return True
        try:
            targets = resolve_all(self._hosts)
            self._socket, self.targets = _open_socket(targets)
        except OSError as error:
            self._problem = f"{', '.join(host for host, _ in self._hosts)}: {reason_of(error)}"
            return False
        self._problem = ""
        return True

    def resolve_again(self) -> bool:
        """Look the name up again, because the controller may have moved. The known addresses stay while the name
        service is away."""
        if self.open():
            with contextlib.suppress(OSError):
                self.targets = resolve_all(self._hosts)
        return bool(self.targets)

    def fileno(self) -> int:
        """The descriptor to poll; -1 before it is open."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def local(self) -> bool:
        """Whether the controller's addresses are this machine's own."""
        return bool(self.targets) and all(is_loopback(target.host) for target in self.targets)

    def candidates(self, key: str, reached: Target | None = None) -> list[Target]:
        """Return the addresses to connect to with this key, first the one that sent it, `reached`."""
        targets = self.targets if reached is None else list(dict.fromkeys([reached, *self.targets]))
        return [target for target in targets if key != PLAIN or is_loopback(target.host)]

    def send_questions(self) -> None:
        """Send the question to all addresses; `read` gets the answers."""
        if not self.open():
            return
        assert self._socket is not None
        sent, problems = False, []
        for target in self.targets:
            if self._socket.family == socket.AF_INET != target.family:
                continue
            try:
                self._socket.sendto(self._question, _address_for(self._socket, target))
                sent = True
            except OSError as error:
                problems.append(f"{target.host}: {reason_of(error)}")
        self._asked = True
        if not sent:
            self._problem = "; ".join(problems)

    def read(self) -> list[Answer]:
        """Return the answers that have come, without waiting."""
        answers: list[Answer] = []
        for _ in range(READS if self._socket is not None else 0):
            assert self._socket is not None
            try:
                data, where = self._socket.recvfrom(READ_BYTES)
                host = canonical(str(where[0]))
                port = int(where[1])
                reached = next((target for target in self.targets if (target.host, target.port) == (host, port)), None)
                answers.append(Answer(wire.decode(data, datagrams.Introduction), reached))
            except OSError:
                break
            except wire.BadMessage as error:
                self._problem = str(error)
        self._answered = self._answered or bool(answers)
        return answers

    def first_believed(self, answers: Sequence[Answer]) -> ControllerKey | None:
        """Return the first trusted answer, or None. This asks munge, the name service and Slurm, so it may take
        `munge.TIME_LIMIT` and SLURM_SECONDS."""
        for answer in answers:
            key = self._understand(answer.introduction, answer.reached)
            if key is not None:
                return ControllerKey(key, answer.reached)
        return None

    def _understand(self, message: datagrams.Introduction, reached: Target | None = None) -> str | None:
        if message.plain:
            if reached is not None and is_loopback(reached.host):
                return PLAIN
            self._problem = (
                'the controller encrypts nothing (auth = "none"), which is believed at a loopback address only'
            )
            return None
        if not message.credential:
            self._problem = message.error[:200] or "the controller cannot prove who it is"
            return None
        try:
            credential = unmunge(message.credential)
        except MungeError as error:
            self._problem = f"the controller's credential: {error}"
            return None
        key = claims.controller_key(credential.payload)
        if not is_key(key):
            self._problem = "the controller's credential holds no key"
        elif not trusted(credential.uid, self._believed):
            self._problem = (
                f"the controller there belongs to {_name(credential.uid)}, who is neither root, SlurmUser nor you: "
                "[agent] controller_users can name him"
            )
        else:
            self._problem = ""
            return key
        return None

    def wait_for_key(self, seconds: float) -> str | None:
        """Ask until the key is known or so many seconds have passed."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.send_questions()
            until = time.monotonic() + min(HELLO_SECONDS, left)
            while (rest := until - time.monotonic()) > 0:
                if self._socket is None:
                    time.sleep(rest)
                elif _readable(self._socket, rest) and (answer := self.first_believed(self.read())) is not None:
                    self.reached = answer.reached
                    return answer.key
        return None


def _open_socket(targets: list[Target]) -> tuple[socket.socket, list[Target]]:
    """Open one socket that sends to all targets, or to those of IPv4 if this machine has no other family. Raises
    OSError."""
    problem: OSError | None = None
    for family in dict.fromkeys((max(target.family for target in targets), socket.AF_INET)):
        kept = [target for target in targets if family == socket.AF_INET6 or target.family == family]
        try:
            opened = socket.socket(family, socket.SOCK_DGRAM)
        except OSError as error:
            problem = error
            continue
        if not kept:
            opened.close()
            continue
        opened.setblocking(False)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return opened, kept
    raise problem or OSError("no address of a family that this machine has")


def _address_for(source: socket.socket, target: Target) -> tuple[Any, ...]:
    """Return the target's address for this socket, which may be of both families."""
    mapped = source.family == socket.AF_INET6 and target.family == socket.AF_INET
    return (f"::ffff:{target.host}", target.port) if mapped else target.address


def trusted(uid: int, believed: Sequence[str] = ()) -> bool:
    """Whether this user may run the controller."""
    return uid in (0, os.geteuid()) or uid in _uids(believed) or uid == _slurm_user.uid()


def _readable(source: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _uids(names: Sequence[str]) -> set[int]:
    uids = set()
    for name in names:
        with contextlib.suppress(KeyError):
            uids.add(pwd.getpwnam(name).pw_uid)
    return uids


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


class _SlurmUser:
    """Asks `scontrol` for SlurmUser's number, at most once a minute until it answers."""

    def __init__(self) -> None:
        self._uid: int | None = None
        self._again = 0.0

    def uid(self) -> int | None:
        if self._uid is None and time.monotonic() >= self._again:
            self._again = time.monotonic() + ASK_SLURM_AGAIN
            try:
                done = run_program(["scontrol", "show", "config"], SLURM_SECONDS)
            except (OSError, subprocess.TimeoutExpired, TooMuchOutput):
                return None
            match = _SLURM_USER.search(done.stdout.decode(errors="replace"))
            self._uid = int(match.group(1)) if match and done.returncode == 0 else None
        return self._uid


_slurm_user = _SlurmUser()
