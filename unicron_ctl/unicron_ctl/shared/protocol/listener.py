"""Serves the connections of peers, for a loop that polls one descriptor. Whatever peers send, the total memory and the
time of one call are bounded.

Messages of known connections are delivered first. Strangers get half of the time, or an extra tenth if known ones need
all of it. A connection is read again only after its last data was delivered, so TCP slows down a peer that sends faster
than the program can take.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from unicron_ctl.shared.protocol.connection_limits import ConnectionLimits
from unicron_ctl.shared.protocol.zmtp import NOTHING, Keys, ProtocolError, Session
from unicron_ctl.shared.system.addresses import canonical, origin
from unicron_ctl.shared.system.throttle import Throttle

log = logging.getLogger("unicron.listener")
QUEUE = 20000  # connections that wait to be accepted at once
READ_BYTES, READ_MOST_BYTES = 4096, 65536  # in one turn of a connection; the most for a long message
KERNEL_BYTES = 131072  # of a connection in the kernel, which doubles this; further bytes wait at the peer
MESSAGES_AT_ONCE = 4  # of one connection, before it is another's turn
LEFT_TO_STRANGERS = 0.1  # extra share of the time if known ones have used all: a client with a question is a stranger
ACCEPTED_AT_ONCE = 64
COMMANDS, COMMANDS_AT_ONCE = 20.0, 200.0  # a second from one connection; heartbeats are seconds apart
# Bytes of messages that are incomplete or not sent yet. Without encryption all peers are strangers and share the last.
HELD_OF_STRANGERS, HELD_OF_KNOWN, HELD_OF_ALL = 32 << 20, 128 << 20, 64 << 20
UNSENT = 1000  # messages to one peer that does not read; important ones are sent again later
UNREAD_SECONDS = 30.0  # for a peer to read its messages, or to send the rest of one; then it is disconnected
HANDSHAKE_SECONDS = 10.0
SWEEP_SECONDS = 1.0  # between two searches for peers to disconnect
WARN_AGAIN_SECONDS = 60.0  # between two lines in the log
MARK_AGAIN_SECONDS = 10.0  # between two updates of the limits for an agent's connection
LINGER_SECONDS = 0.2  # for the last messages to go out
_SHORT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Connection:
    """One peer's connection."""

    def __init__(self, opened: socket.socket, address: str, route: bytes, session: Session, now: float) -> None:
        self.socket, self.descriptor = opened, opened.fileno()
        self.address, self.session = address, session
        self.origin = origin(address)  # the name of its quota, a network for IPv6
        self.route = route  # the program's name for the connection, which is never reused
        self.name = route.hex()
        self.out: list[bytes] = []  # nearly always empty, and an empty deque takes 600 bytes
        self.open, self.known, self.queued = True, False, False
        self.counted = 0  # its bytes in the listener's sum
        self.came = now
        self.since = now  # when it began to wait for the rest of a message, or to be read
        self.marked_at = float("-inf")  # as known


class Listener:
    """Serves connections to the listening sockets, which it closes at the end.

    Parameters
    ----------
    keys
        None if nothing is encrypted.
    connections
        The largest number of connections at once.
    most
        The largest number of bytes of a message.
    admits
        Whether a key may connect.
    refused
        Called with the reason when a connection is closed for what it sent.
    warn
        Logs a line.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        keys: Keys | None,
        connections: int,
        most: int,
        admits: Callable[[str], bool] = lambda key: True,
        refused: Callable[[Connection, str], None] = lambda connection, reason: None,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._keys, self._most, self._admits, self._refused, self._warn = keys, most, admits, refused, warn
        self._limits = ConnectionLimits(connections)
        # A command costs the loop as much time as a short message, but no quota of the program counts it.
        self._commands = Throttle(COMMANDS, COMMANDS_AT_ONCE, names=2 * connections)
        self._epoll = select.epoll()
        self._sockets = {one.fileno(): one for one in sockets}
        self._connections: dict[int, Connection] = {}
        self._by_route: dict[bytes, Connection] = {}
        self._shaking: OrderedDict[int, Connection] = OrderedDict()
        self._holding: dict[int, Connection] = {}
        self._held = [0, 0]  # of strangers, of known ones
        self._bounds = HELD_OF_ALL if keys is None else HELD_OF_STRANGERS, HELD_OF_KNOWN
        self._queues: tuple[deque[Connection], deque[Connection]] = deque(), deque()  # of strangers, of known ones
        self._next_route = 0
        self._sweep_at = self._warned = float("-inf")
        self._again = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable while messages wait here
        self._epoll.register(self._again, select.EPOLLIN)
        for one in sockets:
            one.setblocking(False)
            self._epoll.register(one.fileno(), select.EPOLLIN)

    # ------------------------------------------------------------ for the loop
    def fileno(self) -> int:
        """Return the descriptor to poll: it is readable if there is something to do."""
        return self._epoll.fileno()

    @property
    def count(self) -> int:
        return len(self._connections)

    @property
    def most(self) -> int:
        """The largest number of connections at once."""
        return self._limits.most

    @most.setter
    def most(self, most: int) -> None:
        self._limits.most = most

    def receive(self, take: Callable[[Connection, bytes], object], until: float) -> None:
        """Deliver received messages to `take` and do all else that is due, until `until` on the monotonic clock.
        Strangers get a little more time."""
        now = time.monotonic()
        if now >= self._sweep_at:
            self._sweep(now)
        for descriptor, event in self._epoll.poll(0, len(self._connections) + len(self._sockets) + 2):
            connection = self._connections.get(descriptor)
            if connection is None:
                if descriptor == self._again:
                    os.eventfd_read(descriptor)
                else:
                    self._accept(descriptor)
                continue
            if event & select.EPOLLOUT:
                self._flush(connection)
            if event & ~select.EPOLLOUT and not connection.queued:
                connection.queued = True
                if connection.known and descriptor not in self._limits.agents:
                    self._set_known(connection, False)  # its agent speaks on another connection now, or not at all
                self._queues[connection.known].append(connection)
        self._serve(self._queues[True], take, until)
        if self._keys is not None:
            until = max(now + (until - now) / 2, time.monotonic() + (until - now) * LEFT_TO_STRANGERS)
        self._serve(self._queues[False], take, until)
        if self._queues[0] or self._queues[1]:
            os.eventfd_write(self._again, 1)

    @property
    def behind(self) -> bool:
        """Whether some messages could not be delivered yet."""
        return bool(self._queues[0] or self._queues[1])

    def send(self, route: bytes, *messages: bytes) -> bool:
        """Queue messages; return False if the connection is gone or its peer does not read."""
        connection = self._by_route.get(route)
        if connection is None or len(connection.out) >= UNSENT:
            return False
        pack = connection.session.pack
        self._write(connection, pack(messages[0]) if len(messages) == 1 else b"".join(map(pack, messages)))
        return True

    def unread(self, route: bytes) -> bool:
        """Whether this connection has data that was not delivered yet."""
        connection = self._by_route.get(route)
        return connection is not None and connection.queued

    def is_known(self, connection: Connection) -> None:
        """Protect a connection of a registered agent. The program calls this for each of its messages."""
        now = time.monotonic()
        if now - connection.marked_at < MARK_AGAIN_SECONDS:
            return
        connection.marked_at = now
        self._limits.mark_known(connection.descriptor, connection.session.key, now)
        self._set_known(connection, True)

    def close(self) -> None:
        """Close all connections. The last messages have LINGER_SECONDS to go out."""
        until = time.monotonic() + LINGER_SECONDS
        while any(one.out for one in self._connections.values()) and time.monotonic() < until:
            for connection in [one for one in self._connections.values() if one.out]:
                self._flush(connection)
            time.sleep(0.005)
        for connection in list(self._connections.values()):
            self._close(connection)
        for one in self._sockets.values():
            one.close()
        self._epoll.close()
        os.close(self._again)

    # ------------------------------------------------------------ in
    def _serve(self, queue: deque[Connection], take: Callable[[Connection, bytes], object], until: float) -> None:
        """Read the queued connections in turn."""
        for _ in range(len(queue)):
            if time.monotonic() >= until:
                return
            connection = queue.popleft()
            if not connection.open:
                continue
            try:
                more = self._read(connection, take, until)
            except ProtocolError as error:
                self._refused(connection, str(error))
                self._close(connection)
                continue
            if more:
                self._queues[connection.known].append(connection)
            else:
                connection.queued = False

    def _read(self, connection: Connection, take: Callable[[Connection, bytes], object], until: float) -> bool:
        """Read from one connection; return whether undelivered messages are left. Raises ProtocolError."""
        session, fresh, done = connection.session, False, False
        for _ in range(MESSAGES_AT_ONCE):
            message = session.read()
            if message is NOTHING:
                if session.ready and not self._commands.allows(connection.name, time.monotonic()):
                    raise ProtocolError(f"more than {COMMANDS:.0f} commands a second, as heartbeats are")
                self._after_command(connection)
                if not connection.open:
                    return False
            if message is None:
                if fresh:
                    break
                try:
                    data = connection.socket.recv(min(max(READ_BYTES, session.lacks), READ_MOST_BYTES))
                except BlockingIOError:
                    break
                except OSError:
                    data = b""
                if not data:
                    self._close(connection)
                    return False
                session.feed(data)
                fresh = True
                continue
            done = True
            if message is not NOTHING:
                take(connection, message)  # type: ignore[arg-type]
                if not connection.open:
                    return False
                if time.monotonic() >= until:
                    break
        else:
            self._account(connection, done)
            return True
        self._account(connection, done)
        return message is not None

    def _after_command(self, connection: Connection) -> None:
        """Continue after a step of the handshake, or a command. A peer that does not read gets no answer to a PING."""
        session, shaking = connection.session, connection.descriptor in self._shaking
        if session.ready and shaking:
            if not self._admits(session.key):
                self._close(connection)
                return
            del self._shaking[connection.descriptor]
        if session.reply:
            if shaking or not connection.out:
                self._write(connection, bytes(session.reply))
            session.reply.clear()

    # ------------------------------------------------------------ out
    def _write(self, connection: Connection, data: bytes) -> None:
        if connection.out:
            connection.out.append(data)
            self._account(connection, False)
            return
        try:
            sent = connection.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the next read finds it closed
        if sent < len(data):
            connection.out.append(data[sent:])
            self._watch(connection)
            self._account(connection, False)

    def _flush(self, connection: Connection) -> None:
        out, done = connection.out, False
        while out:
            try:
                sent = connection.socket.send(out[0])
            except BlockingIOError:
                break
            except OSError:
                out.clear()
                break
            done = True
            if sent < len(out[0]):
                out[0] = out[0][sent:]
                break
            del out[0]
        if not out:
            self._watch(connection)
        self._account(connection, done)

    def _watch(self, connection: Connection) -> None:
        self._epoll.modify(connection.descriptor, select.EPOLLIN | (select.EPOLLOUT if connection.out else 0))

    # ------------------------------------------------------------ bounds
    def _account(self, connection: Connection, done: bool) -> None:
        """Count the bytes that a connection holds. done: it has made progress."""
        held = connection.session.held
        if connection.out:
            held += sum(map(len, connection.out))
        elif not held and not connection.counted:  # nearly always: a message is read as a whole, and sent at once
            return
        if done or not connection.counted:
            connection.since = time.monotonic()
        if held == connection.counted:
            return
        self._held[connection.known] += held - connection.counted
        connection.counted = held
        if held:
            self._holding[connection.descriptor] = connection
        else:
            self._holding.pop(connection.descriptor, None)
        if self._held[connection.known] > self._bounds[connection.known]:
            self._shed(connection.known)

    def _shed(self, known: bool) -> None:
        """Close the connections that hold the most bytes, until the others hold half of the limit."""
        for connection in sorted(self._holding.values(), key=lambda one: one.counted, reverse=True):
            if self._held[known] <= self._bounds[known] // 2:
                return
            if connection.known is known:
                self._refused(connection, "messages that are too much to be held until they are complete, or are read")
                self._close(connection)

    def _set_known(self, connection: Connection, known: bool) -> None:
        if connection.known is not known:
            self._held[connection.known] -= connection.counted
            connection.known = known
            self._held[known] += connection.counted

    def _sweep(self, now: float) -> None:
        """Close connections that take too long."""
        self._sweep_at = now + SWEEP_SECONDS
        while self._shaking and now - (first := next(iter(self._shaking.values()))).came > HANDSHAKE_SECONDS:
            self._close(first)
        for connection in [one for one in self._holding.values() if now - one.since > UNREAD_SECONDS]:
            if not connection.queued:
                self._close(connection)
        for descriptor in self._sockets:  # `_accept` removes a socket when descriptors run out
            with contextlib.suppress(OSError):
                self._epoll.register(descriptor, select.EPOLLIN)

    # ------------------------------------------------------------ coming and going
    def _accept(self, descriptor: int) -> None:
        listening = self._sockets.get(descriptor)
        for _ in range(ACCEPTED_AT_ONCE if listening is not None else 0):
            assert listening is not None
            try:
                opened, address = listening.accept()
            except OSError as error:
                if error.errno in _SHORT_OF_DESCRIPTORS:
                    self._warn_rarely(f"no descriptor or memory for another connection: {error.strerror}")
                    self._epoll.unregister(descriptor)  # until the next sweep
                return
            self._add(opened, str(address[0]))

    def _add(self, opened: socket.socket, address: str) -> None:
        now = time.monotonic()
        opened.setblocking(False)
        self._next_route += 1
        route = self._next_route.to_bytes(8, "big")
        connection = Connection(
            opened, canonical(address.partition("%")[0]), route, Session(self._keys, self._most), now
        )
        self._connections[connection.descriptor] = self._by_route[route] = connection
        self._shaking[connection.descriptor] = connection
        self._epoll.register(connection.descriptor, select.EPOLLIN)
        evicted = self._limits.add(connection.descriptor, connection.origin, now)
        if evicted is not None:
            self._warn_rarely(
                f"{self.count} connections where {self.most} may be, or one address has too many: some are closed"
            )
            self._close(self._connections[evicted])
        if connection.open:
            self._after_command(connection)

    def _close(self, connection: Connection) -> None:
        descriptor = connection.descriptor
        if self._connections.get(descriptor) is not connection:
            return
        self._held[connection.known] -= connection.counted
        connection.counted = 0
        connection.out.clear()
        for table in (self._connections, self._shaking, self._holding):
            table.pop(descriptor, None)
        del self._by_route[connection.route]
        self._limits.remove(descriptor)
        self._commands.buckets.pop(connection.name, None)
        connection.open = False
        connection.socket.close()

    def _warn_rarely(self, text: str) -> None:
        now = time.monotonic()
        if now - self._warned >= WARN_AGAIN_SECONDS:
            self._warned = now
            self._warn(text)


def listening(host: str, port: int, queue: int = QUEUE) -> list[socket.socket]:
    """Open sockets that listen at all addresses of the host; "" and "*" mean all of this machine, IPv4 and IPv6.

    queue: connections that may wait to be accepted; with 0 the sockets only reserve the port. Raises OSError.
    """
    host = host.strip("[]")
    if host in ("", "*") and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return [_listening(socket.AF_INET6, ("::", port), queue, dual=True)]
    if host in ("", "*"):
        host = "0.0.0.0"
    addresses = {
        (family, where[0]): (family, where)
        for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    }
    opened: list[socket.socket] = []
    try:
        for family, where in addresses.values():
            place = (where[0], opened[0].getsockname()[1], *where[2:]) if opened else where
            opened.append(_listening(family, place, queue, dual=where[0] == "::"))
    except OSError:
        for one in opened:
            one.close()
        raise
    return opened


def _listening(family: int, where: tuple[object, ...], queue: int, dual: bool) -> socket.socket:
    """Open one listening socket, whose options its connections inherit."""
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
            (socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000)),
        ):
            opened.setsockopt(level, option, value)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual)
        opened.bind(where)
        if queue:
            opened.listen(queue)
    except OSError:
        opened.close()
        raise
    return opened
