"""Who may connect to a socket of this process, the controller's or an agent's: one thread beside libzmq's.

It answers libzmq's question about each CURVE key (ZAP, ZeroMQ RFC 27): a key that is let in is from then on the
`User-Id` of all that comes by this connection. And it keeps the connections within the open files that the process may
have. libzmq knows no bound: out of descriptors, it tries to accept the next connection again and again, and whoever
comes waits. Connections of those who are known stay whatever others do.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from unicron_ctl.addresses import canonical

log = logging.getLogger("unicron")
ZAP = "inproc://zeromq.zap.01"
DOORS, STOP = "inproc://unicron-doors", "inproc://unicron-stop"
HANDSHAKE_MS = 10_000  # for a connection to become one of ZeroMQ's: packets may be lost
TELL_AGAIN = 60.0  # seconds between two lines in the log
SHARE = 0.5  # of all connections, for strangers of one address
SAY_AGAIN = 10.0  # seconds; then it is looked at again which connection an agent has
KNOWN_SECONDS = 600.0  # without a word of its agent; then a connection is a stranger's again
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
Answer = tuple[bytes, bytes]  # status and text of ZAP
LET_IN: Answer = (b"200", b"OK")


class Doors:
    """The connections, by their descriptors. Pure: says whom to put out.

    most: connections at once; strangers of one address may have `SHARE` of them. When there are too many, a stranger
    goes, the oldest of the address that has the most of them. Who is known is never put out for others. Known is the
    connection of a registered agent, one for each key. Times in seconds on any clock that does not go backwards.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.addresses: dict[int, str] = {}
        self.strangers: dict[str, OrderedDict[int, None]] = {}
        """address -> connections, the oldest first."""
        self.agents: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """connection -> its agent's key, and when that spoke last. Who spoke last is at the end."""
        self.by_key: dict[str, int] = {}

    def came(self, descriptor: int, address: str, now: float) -> int | None:
        """A connection; returns the descriptor of the one that has to go for it."""
        self.left(descriptor)
        self.addresses[descriptor] = address
        full = len(self.addresses) > self.most
        while full and self.agents and now - (oldest := next(iter(self.agents.items())))[1][1] > KNOWN_SECONDS:
            self._is_stranger(oldest[0])
        self._is_stranger(descriptor)
        if len(self.strangers[address]) > self.most * SHARE:
            return next(iter(self.strangers[address]))
        if not full:
            return None
        most = max(self.strangers.values(), key=len)
        return next(iter(most))

    def known(self, descriptor: int, key: str, now: float) -> None:
        """The agent with this key has spoken by it. Who has a second connection with a key has one known one."""
        if descriptor not in self.addresses:
            return
        before = self.by_key.get(key)
        if before is not None and before != descriptor:
            self._is_stranger(before)
        self._forget(descriptor)
        self.agents[descriptor] = key, now
        self.by_key[key] = descriptor

    def left(self, descriptor: int) -> None:
        """It is closed."""
        if descriptor in self.addresses:
            self._forget(descriptor)
            del self.addresses[descriptor]

    def _is_stranger(self, descriptor: int) -> None:
        self._forget(descriptor)
        self.strangers.setdefault(self.addresses[descriptor], OrderedDict())[descriptor] = None

    def _forget(self, descriptor: int) -> None:
        """Who it is."""
        if (agent := self.agents.pop(descriptor, None)) is not None:
            del self.by_key[agent[0]]
        address = self.addresses[descriptor]
        here = self.strangers.get(address)
        if here is not None:
            here.pop(descriptor, None)
            if not here:
                del self.strangers[address]


class Doorkeeper:
    """For `router`, before it is bound; one for each context. close() before the router is closed.

    most: connections at once. admits(key): what libzmq is answered about a CURVE key, in this thread. handshake: ms
    for a connection to become one of ZeroMQ's. warn: one line for people.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        most: int,
        admits: Callable[[str], Answer] = lambda _: LET_IN,
        handshake: int = HANDSHAKE_MS,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._doors = Doors(most)
        self._admits, self._warn = admits, warn
        self._lock = threading.Lock()  # around the doors: two threads tell them
        self._told = float("-inf")
        self._spoke: dict[str, bytes] = {}
        self._asked_at = float("-inf")
        self.port = 0  # where it listens; nothing is closed before that is known
        router.setsockopt(zmq.HANDSHAKE_IVL, handshake)
        self._zap = context.socket(zmq.ROUTER)
        self._zap.bind(ZAP)
        router.monitor(DOORS, EVENTS)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # libzmq would wait for this thread
        self._events.connect(DOORS)
        self._stopped = context.socket(zmq.PAIR)
        self._stopped.bind(STOP)
        self._stop = context.socket(zmq.PAIR)
        self._stop.connect(STOP)
        self._router = router
        self._thread = threading.Thread(target=self._serve, name="unicron-doors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._router.disable_monitor()
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(0)

    @property
    def most(self) -> int:
        """Connections at once."""
        return self._doors.most

    @most.setter
    def most(self, most: int) -> None:
        with self._lock:
            self._doors.most = most

    def spoke(self, key: str, route: bytes, frame: zmq.Frame) -> None:
        """A registered agent's message, for the main thread to tell at each one. route: what the router calls its
        connection."""
        now = time.monotonic()
        if now - self._asked_at >= SAY_AGAIN:  # an event may overtake a message, and a number be used again
            self._asked_at = now
            self._spoke.clear()
        if self._spoke.get(key) != route:
            self._spoke[key] = route
            with self._lock:
                self._doors.known(int(frame.get(zmq.SRCFD)), key, now)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._events, self._stopped):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                break
            try:
                if self._events in ready:
                    self._notice()
                if self._zap in ready:
                    self._admit()
            except Exception:  # without this thread nobody could connect any more
                log.exception("couldn't look after a connection")
        for source in (self._zap, self._events, self._stopped):
            source.close(0)

    def _admit(self) -> None:
        while self._zap.poll(0):
            *envelope, version, request, _, _, _, mechanism, key = self._zap.recv_multipart()
            fine = version == b"1.0" and mechanism == b"CURVE" and len(key) == 32
            name = z85.encode(key) if fine else b""
            answer = self._admits(name.decode()) if fine else (b"400", b"a CURVE key is needed")
            self._zap.send_multipart([*envelope, version, request, *answer, name, b""])

    def _notice(self) -> None:
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            kind, descriptor = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._accepted(descriptor)
            elif kind == zmq.EVENT_DISCONNECTED:
                with self._lock:
                    self._doors.left(descriptor)

    def _accepted(self, descriptor: int) -> None:
        with self._lock:
            goes = self._doors.came(descriptor, _peer(descriptor), time.monotonic())
            there = len(self._doors.addresses)
            if goes is None:
                return
            self._doors.left(goes)
        if time.monotonic() - self._told >= TELL_AGAIN:
            self._told = time.monotonic()
            most = self._doors.most
            self._warn(f"{there} connections where {most} may be, or one address has too many: some are closed")
        _shut(goes, self.port)


def _peer(descriptor: int) -> str:
    """The address at the other end of a socket that libzmq has; empty when it is closed already."""
    try:
        with_socket = socket.socket(fileno=descriptor)
    except OSError:
        return ""
    try:
        return canonical(str(with_socket.getpeername()[0]))
    except OSError:
        return ""
    finally:
        with_socket.detach()


def _shut(descriptor: int, port: int) -> None:
    """Ends a connection that libzmq has: it finds it closed by the other side. Whatever else has this number by now is
    left alone."""
    try:
        with_socket = socket.socket(fileno=descriptor)
    except OSError:
        return
    try:
        if with_socket.getsockname()[1] == port:
            with_socket.shutdown(socket.SHUT_RDWR)
    except (OSError, IndexError, TypeError):  # a Unix socket has no port
        pass
    finally:
        with_socket.detach()
