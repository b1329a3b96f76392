"""The agent's line to the other agents of its job: everybody listens on a socket of its own and dials those it has
something to say to, both known to each other by their public keys (CURVE), which the controller's plans tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from unicron_ctl.addresses import in_brackets, join
from unicron_ctl.descriptors import open_files, raise_limit
from unicron_ctl.protocol import peers, wire
from unicron_ctl.protocol.doorkeeper import LET_IN, Answer, Doorkeeper

MANY = 100  # connections, for which the open files of an ordinary process suffice
SHARE = 0.25  # of the open files, for connections that others make: the ranks need theirs
HANDSHAKE_MS = 1000  # who is not let in yet is told nothing, and tries again after this; usually 30 s
TRY_AGAIN: Answer = (b"300", b"no agent of this generation")  # the plan may be on its way; after a 400 none tries again
_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.RECONNECT_IVL, 50),
    (zmq.RECONNECT_IVL_MAX, 1000),
    (zmq.CONNECT_TIMEOUT, 2000),
    (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
    (zmq.HEARTBEAT_IVL, 1000),
    (zmq.HEARTBEAT_TIMEOUT, 5000),
    (zmq.MAXMSGSIZE, wire.MAX_BYTES),
    (zmq.IPV6, 1),
)


class Peers:
    """host: where others reach this node. keys: this agent's, public and secret. say: one line for people.

    :attr:`address` is host:port, empty when it cannot be reached.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        keys: tuple[str, str],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._known: dict[bytes, wire.Peer] = {}  # replaced as a whole: the doorkeeper's thread reads it
        self._dialed: dict[bytes, str] = {}  # key -> endpoint
        self._keys = keys
        self._in: Any = context.socket(zmq.ROUTER)
        self._out: Any = context.socket(zmq.ROUTER)
        for socket in (self._in, self._out):
            for option, value in _OPTIONS:
                socket.setsockopt(option, value)
            socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in keys)
        self._in.curve_server = True
        self._doorkeeper = Doorkeeper(
            context, self._in, _most(), self._admits, HANDSHAKE_MS, lambda text: say(f"agents' port: {text}")
        )
        self.address = self._listen(host)
        if self.address:
            self._doorkeeper.port = int(self.address.rpartition(":")[2])

    @property
    def sockets(self) -> tuple[Any, ...]:
        """To be polled."""
        return self._in, self._out

    def _listen(self, host: str) -> str:
        for interface in (host, "*"):  # the name of a node need not be one of its interfaces'
            try:
                return join(host, self._in.bind_to_random_port(f"tcp://{in_brackets(interface)}"))
            except zmq.ZMQError:
                continue
        return ""

    def know(self, known: Iterable[wire.Peer]) -> None:
        """Only these are listened to and spoken to from now on."""
        self._known = {peer.key.encode(): peer for peer in known if peer.key}
        if len(self._known) > self._doorkeeper.most // 2:
            raise_limit()
            self._doorkeeper.most = _most()
        for key, endpoint in list(self._dialed.items()):
            if key not in self._known:
                del self._dialed[key]
                with contextlib.suppress(zmq.ZMQError):
                    self._out.disconnect(endpoint)

    def send(self, peer: wire.Peer, message: peers.AnyPeer) -> None:
        """Nothing waits, and what cannot be sent is lost."""
        key = peer.key.encode()
        if key not in self._known or not peer.address:
            return
        try:
            if key not in self._dialed:
                self._dial(peer, key)
            self._out.send_multipart([key, wire.encode(message)], zmq.DONTWAIT)
        except (zmq.ZMQError, ValueError):
            return

    def _dial(self, peer: wire.Peer, key: bytes) -> None:
        if len(self._dialed) == MANY:
            raise_limit()
        self._out.curve_serverkey = key
        self._out.setsockopt(zmq.CONNECT_ROUTING_ID, key)
        endpoint = f"tcp://{peer.address}"
        self._out.connect(endpoint)
        self._dialed[key] = endpoint

    def receive(self, take: Callable[[peers.AnyPeer], None], drop: Callable[[str, str], None]) -> None:
        """Hands on what has come. drop(who, why): of a message that makes no sense."""
        while self._out.poll(0):
            self._out.recv_multipart()  # nobody answers here
        while self._in.poll(0):
            route, *_, frame = self._in.recv_multipart(copy=False)
            key = str(frame.get("User-Id"))
            peer = self._known.get(key.encode())
            if peer is None:
                continue  # known once, of an agent that is gone
            self._doorkeeper.spoke(key, route.bytes, frame)
            try:
                message = peers.decode(frame.bytes)
                if message.element != peer.element:
                    raise wire.BadMessage(f"speaks for element {message.element}")
                take(message)
            except wire.BadMessage as error:
                drop(f"the agent of element {peer.element}", str(error))

    def _admits(self, key: str) -> Answer:
        return LET_IN if key.encode() in self._known else TRY_AGAIN

    def close(self) -> None:
        """Leave nothing behind."""
        self._doorkeeper.close()
        for socket in self.sockets:
            socket.close(0)


def _most() -> int:
    """Connections that others may have to this agent."""
    return max(1, int(open_files() * SHARE))
