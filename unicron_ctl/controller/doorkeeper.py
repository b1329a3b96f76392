"""Who may connect: one thread beside libzmq's.

It answers libzmq's question about each CURVE key (ZAP, ZeroMQ RFC 27): every key may come in, and is from then on the
`User-Id` of all that comes by this connection. And it keeps the connections within the open files that the process may
have. libzmq knows no bound: out of descriptors, it tries to accept the next connection again and again, and whoever
comes waits.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter, OrderedDict

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger("unicron.controller")
ZAP = "inproc://zeromq.zap.01"
DOORS, STOP = "inproc://unicron-doors", "inproc://unicron-stop"
HANDSHAKE_MS = 10_000  # for a connection to become one of ZeroMQ's: packets may be lost
TELL_AGAIN = 60.0  # seconds between two lines in the log
SHARE = 0.5  # of all connections, for one address
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Doors:
    """The connections, by their descriptors. Pure: says whom to put out.

    most: connections at once; one address may have `SHARE` of them. When there are too many, those go first that have
    not shown yet that they speak the protocol, the oldest before the others.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.addresses: dict[int, str] = {}
        self.strangers: OrderedDict[int, None] = OrderedDict()
        self.count: Counter[str] = Counter()

    def came(self, descriptor: int, address: str) -> int | None:
        """A connection; returns the descriptor of the one that has to go for it."""
        self.left(descriptor)
        self.addresses[descriptor] = address
        self.strangers[descriptor] = None
        self.count[address] += 1
        if self.count[address] > self.most * SHARE:
            return next((one for one in self.strangers if self.addresses[one] == address), descriptor)
        if len(self.addresses) > self.most:
            return next(iter(self.strangers))
        return None

    def known(self, descriptor: int) -> None:
        """It speaks the protocol."""
        self.strangers.pop(descriptor, None)

    def left(self, descriptor: int) -> None:
        """It is closed."""
        self.strangers.pop(descriptor, None)
        address = self.addresses.pop(descriptor, None)
        if address is not None:
            self.count[address] -= 1
            if not self.count[address]:
                del self.count[address]


class Doorkeeper:
    """For `router`, before it is bound. close() before the router is closed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], most: int) -> None:
        self._doors = Doors(most)
        self._told = float("-inf")
        self.port = 0  # where it listens; nothing is closed before that is known
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
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

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._events, self._stopped):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                break
            if self._events in ready:
                self._notice()
            if self._zap in ready:
                self._admit()
        for source in (self._zap, self._events, self._stopped):
            source.close(0)

    def _admit(self) -> None:
        while self._zap.poll(0):
            *envelope, version, request, _, _, _, mechanism, key = self._zap.recv_multipart()
            fine = version == b"1.0" and mechanism == b"CURVE" and len(key) == 32
            status = (b"200", b"OK", z85.encode(key)) if fine else (b"400", b"a CURVE key is needed", b"")
            self._zap.send_multipart([*envelope, version, request, *status, b""])

    def _notice(self) -> None:
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            kind, descriptor = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._accepted(descriptor)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._doors.left(descriptor)

    def _accepted(self, descriptor: int) -> None:
        goes = self._doors.came(descriptor, _peer(descriptor))
        if goes is None:
            return
        if time.monotonic() - self._told >= TELL_AGAIN:
            self._told = time.monotonic()
            log.warning(
                "%d connections, more than the %d open files allow, or one address has too many: some are closed",
                len(self._doors.addresses),
                self._doors.most,
            )
        self._doors.left(goes)
        _shut(goes, self.port)


def _peer(descriptor: int) -> str:
    """The address at the other end of a socket that libzmq has; empty when it is closed already."""
    try:
        with_socket = socket.socket(fileno=descriptor)
    except OSError:
        return ""
    try:
        return str(with_socket.getpeername()[0])
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
