"""Whether something answers at an address: what a witness can say of a silent node.

A lost packet must not look like a dead node, so several connections are tried, one after the other without waiting
for the first: with 30 % loss, seven of them all fail once in a hundred times, and two witnesses are asked at two ports
each. What goes wrong on this side says nothing of the other.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import ipaddress
import selectors
import socket
import time

from detector import blackhole

AGAIN_SECONDS = 0.1  # between two connections that are tried side by side
NO_ANSWER = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN}  # nobody there, or no way there
QUEUE = 256  # connections that wait to be accepted at a door


class Reach(enum.StrEnum):
    """What came of it."""

    REACHED = "reached"
    REFUSED = "refused"  # the host lives, and nobody listens there: it said so itself
    SILENT = "silent"  # no answer at all
    UNKNOWN = "unknown"  # not tried, or something was wrong on this side: a name, descriptors, its own network


def reach(address: str, seconds: float) -> Reach:
    """Tries to connect to "host:port" for at most `seconds` (resolving a name not counted). Raises nothing."""
    host, _, port = address.rpartition(":")
    try:
        number = int(port)
        if not 0 < number < 65536:
            return Reach.UNKNOWN
        found = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM)
    except (OSError, ValueError, OverflowError, UnicodeError):
        return Reach.UNKNOWN
    family, kind, protocol, _, target = found[0]
    opened: list[socket.socket] = []
    try:
        with selectors.DefaultSelector() as waiting:
            return _race(waiting, opened, (family, kind, protocol), target, seconds)
    except OSError:
        return Reach.UNKNOWN
    finally:
        for one in opened:
            with contextlib.suppress(OSError):
                one.close()


def _race(
    waiting: selectors.BaseSelector,
    opened: list[socket.socket],
    kind: tuple[int, int, int],
    target: tuple[object, ...],
    seconds: float,
) -> Reach:
    """The first word of several connections. One that is reset says that something is there, and not what: the next
    one may tell."""
    end, nobody = time.monotonic() + seconds, Reach.SILENT
    while (now := time.monotonic()) < end:
        one = socket.socket(*kind)
        opened.append(one)
        one.setblocking(False)
        code = one.connect_ex(target)
        if code == errno.EINPROGRESS:
            waiting.register(one, selectors.EVENT_WRITE)
        elif code == errno.ECONNRESET:
            nobody = Reach.UNKNOWN
        elif (word := _word(code)) is not Reach.SILENT:
            return word
        for key, _ in waiting.select(min(AGAIN_SECONDS, end - now)):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            waiting.unregister(ready)
            code = ready.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == errno.ECONNRESET:
                nobody = Reach.UNKNOWN
            elif (word := _word(code)) is not Reach.SILENT:
                return word
    return nobody


def _word(code: int) -> Reach:
    if code == 0:
        return Reach.REACHED
    if code == errno.ECONNREFUSED:
        return Reach.REFUSED
    return Reach.SILENT if code in NO_ANSWER else Reach.UNKNOWN


def is_address(host: str) -> bool:
    """It is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def door_at(host: str, door: str) -> str:
    """The door "host:port" at another host; empty when it has none."""
    port = door.rpartition(":")[2]
    return f"{host}:{port}" if port else ""


class Door:
    """A port at which whoever asks can see that this process's node lives and the process, too: the kernel answers
    for a process that is stopped for a while. Raises OSError when there is no port."""

    def __init__(self, host: str = "") -> None:
        self._socket = _listen(host)
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def answer(self) -> None:
        """Lets everybody go who has come. The kernel has answered them already, so now and then is enough."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def shut(self) -> None:
        """From now on nobody gets an answer, as if the node had lost its network (for fault injection)."""
        blackhole.deafen(self._socket)

    def open(self) -> None:
        """Whoever asks gets an answer again."""
        with contextlib.suppress(OSError):  # it was not shut
            blackhole.hear(self._socket)

    def close(self) -> None:
        self._socket.close()


def _listen(host: str) -> socket.socket:
    """At all addresses of both families, if none is named: Slurm may give the node's in either."""
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # no address of that family
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=QUEUE, dualstack_ipv6=True)
    return socket.create_server((host, 0), backlog=QUEUE)
