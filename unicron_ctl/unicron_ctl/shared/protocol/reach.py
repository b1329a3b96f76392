"""Tests whether something answers at an address: the evidence of a witness about a silent node.

A lost packet must not look like a dead node, so several connections are tried without waiting for the first. With 30 %
loss, seven of them all fail once in a hundred times, and two witnesses are asked at two ports each. An error on this
side is no evidence about the other.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence

from unicron_ctl.shared.system.addresses import Target, listen_at, resolve, split
from unicron_detector.chaos import blackhole

AGAIN_SECONDS = 0.1  # between two connections that are tried side by side
NO_ANSWER = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN}  # there is no host, or no way to it
QUEUE = 256  # connections that wait to be accepted at a door
PAST_DOORS, DOOR_TRIES = 16, 5  # ports of earlier worlds that nobody else gets; tries to get a port


class Reach(enum.StrEnum):
    """The result of such a test."""

    REACHED = "reached"
    REFUSED = "refused"  # the host lives and answers that nothing listens there
    SILENT = "silent"  # no answer at all
    UNKNOWN = "unknown"  # not tried, or a fault on this side: a name, descriptors, its own network


def reach(address: str, seconds: float) -> Reach:
    """Try to connect to "host:port", at all addresses of the host, for at most `seconds` after resolving the name.
    Raises nothing."""
    try:
        return race(resolve(*split(address)), seconds)[0]
    except (OSError, ValueError):
        return Reach.UNKNOWN


def race(targets: Sequence[Target], seconds: float) -> tuple[Reach, Target | None]:
    """Try to connect to all targets side by side. Returns the result, and the first target that accepts. Raises OSError
    for an error on this side.

    A target that accepts decides, whatever the others do. A refusal counts only once all addresses have had the time to
    accept, because the host's daemon may listen in one family. An address that this side cannot reach counts only if it
    is the only one.
    """
    opened: list[socket.socket] = []
    try:
        with selectors.DefaultSelector() as waiting:
            tried = _Race(waiting, opened, targets)
            return tried.run(seconds), tried.winner
    finally:
        for one in opened:
            with contextlib.suppress(OSError):
                one.close()


def first_open(targets: Sequence[Target], seconds: float) -> Target | None:
    """Return the address to connect to: the first that accepts in time, or the only one. Raises nothing."""
    if len(targets) == 1:
        return targets[0]
    try:
        return race(targets, seconds)[1]
    except OSError:
        return None


class _Race:
    """Connections to several addresses, and further ones to each that has not answered yet. A reset shows that
    something is there, but not what; the next connection may show that."""

    def __init__(self, waiting: selectors.BaseSelector, opened: list[socket.socket], targets: Sequence[Target]) -> None:
        self._waiting, self._opened = waiting, opened
        self._results: dict[Target, Reach | None] = dict.fromkeys(targets)  # None: no answer yet
        self._reset: set[Target] = set()
        self.winner: Target | None = None

    def run(self, seconds: float) -> Reach:
        end = time.monotonic() + seconds
        while None in self._results.values() and (now := time.monotonic()) < end:
            for target in [one for one, result in self._results.items() if result is None]:
                self._connect(target)
            for key, _ in self._waiting.select(min(AGAIN_SECONDS, end - now) if None in self._results.values() else 0):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                self._waiting.unregister(ready)
                self._note_answer(key.data, ready.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        return self._verdict()

    def _connect(self, target: Target) -> None:
        try:
            one = socket.socket(target.family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            self._results[target] = Reach.UNKNOWN
            return
        self._opened.append(one)
        one.setblocking(False)
        code = one.connect_ex(target.address)
        if code == errno.EINPROGRESS:
            self._waiting.register(one, selectors.EVENT_WRITE, target)
        else:
            self._note_answer(target, code)

    def _note_answer(self, target: Target, code: int) -> None:
        result = _result_of(code)
        if code == errno.ECONNRESET:
            self._reset.add(target)
        elif result is Reach.REACHED and self.winner is None:
            self.winner = target
            self._results = dict.fromkeys(self._results, Reach.REACHED)
        elif result is not Reach.SILENT and self._results[target] is None:
            self._results[target] = result

    def _verdict(self) -> Reach:
        if self.winner is not None:
            return Reach.REACHED
        if any(result is None and target in self._reset for target, result in self._results.items()):
            return Reach.UNKNOWN
        results = [result or Reach.SILENT for result in self._results.values()]
        return next((result for result in (Reach.REFUSED, Reach.SILENT) if result in results), Reach.UNKNOWN)


def _result_of(code: int) -> Reach:
    if code == 0:
        return Reach.REACHED
    if code == errno.ECONNREFUSED:
        return Reach.REFUSED
    return Reach.SILENT if code in NO_ANSWER else Reach.UNKNOWN


def door_at(host: str, door: str) -> str:
    """Return the door's port at this host, as "host:port"; empty for no door."""
    port = door.rpartition(":")[2]
    return f"{host}:{port}" if port else ""


class Door:
    """A port that shows that this process and its node live: the kernel accepts connections even while the process is
    stopped for a while. Raises OSError if there is no free port."""

    def __init__(self, host: str = "") -> None:
        self._socket = listen_at(host, QUEUE)
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def answer(self) -> None:
        """Close the connections that have come. It is enough to do so now and then, because the kernel accepts them."""
        with contextlib.suppress(OSError):
            for _ in range(QUEUE):  # no more in one call: a flood must not occupy this process
                self._socket.accept()[0].close()

    def stop_answering(self) -> None:
        """Answer no peer from now on, as if the node had lost its network (for fault injection)."""
        blackhole.deafen(self._socket)

    def open(self) -> None:
        """Answer again."""
        with contextlib.suppress(OSError):  # it did answer
            blackhole.undeafen(self._socket)

    def refuse_all(self) -> socket.socket:
        """Refuse connections from now on; return the socket, which keeps the port from others until it is closed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        return self._socket

    def close(self) -> None:
        self._socket.close()


class WorldDoor(Door):
    """A door for one world of plain programs, with a port of its own. When this node leaves the world, its kernel
    refuses connections there for good, so whoever still has the port knows. Raises OSError if there is no free port."""

    def __init__(self) -> None:
        self._past: deque[socket.socket] = deque()
        self._open()

    def renew(self) -> None:
        """Leave the world, and open the door of the next one. Raises OSError."""
        self._past.append(self.refuse_all())
        if len(self._past) > PAST_DOORS:
            self._past.popleft().close()
        self._open()

    def _open(self) -> None:
        """Open a port that is chosen by number: the kernel frees one that it chose itself as soon as it is shut."""
        for last in range(DOOR_TRIES, -1, -1):
            with listen_at("", 1) as chosen:
                port = int(chosen.getsockname()[1])
            try:
                self._socket = listen_at("", QUEUE, port)
                break
            except OSError:  # another process was quicker
                if not last:
                    raise
        self._socket.setblocking(False)

    def close(self) -> None:
        for one in (*self._past, self._socket):
            one.close()
