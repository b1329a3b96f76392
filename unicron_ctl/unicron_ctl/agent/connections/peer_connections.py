"""The agent's line to the other agents of its job. Each agent listens on a socket of its own and dials those to which
it sends; both sides know each other by the public keys (CURVE) in the controller's plans."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from unicron_ctl.shared.protocol import peer_messages, structs, wire
from unicron_ctl.shared.protocol.listener import Connection, Listener, listening
from unicron_ctl.shared.protocol.zmtp import Keys
from unicron_ctl.shared.system.addresses import join
from unicron_ctl.shared.system.descriptors import open_files, raise_limit

MANY = 100  # connections, for which the open files of an ordinary process suffice
SHARE = 0.25  # of the open files, for connections of others: the ranks need theirs
RECEIVE_SECONDS = 0.02  # of the agent's loop for messages of others at once
_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.RECONNECT_IVL, 50),
    (zmq.RECONNECT_IVL_MAX, 1000),
    (zmq.CONNECT_TIMEOUT, 2000),
    (zmq.HANDSHAKE_IVL, 1000),  # usually 30 s
    (zmq.HEARTBEAT_IVL, 1000),
    (zmq.HEARTBEAT_TIMEOUT, 5000),
    (zmq.MAXMSGSIZE, wire.MAX_BYTES),
    (zmq.IPV6, 1),
)


class Peers:
    """The agent's connections to the other agents of its job."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,  # where others reach this node
        keys: tuple[str, str],  # this agent's, public and secret
        warn: Callable[[str], None] = lambda _: None,  # writes a line of the log
    ) -> None:
        self._known: dict[bytes, structs.Peer] = {}
        self._dialed: dict[bytes, str] = {}  # key -> endpoint
        self._out: Any = context.socket(zmq.ROUTER)
        for option, value in _OPTIONS:
            self._out.setsockopt(option, value)
        self._out.curve_publickey, self._out.curve_secretkey = (key.encode() for key in keys)
        self.address, sockets = _listen(host)  # "" if this agent cannot be reached
        self._in = Listener(
            sockets, Keys(*keys), _most(), wire.MAX_BYTES, self._admits, warn=lambda text: warn(f"agents' port: {text}")
        )

    @property
    def sockets(self) -> tuple[Any, ...]:
        """The sockets to poll."""
        return self._in.fileno(), self._out

    def allow_only(self, known: Iterable[structs.Peer]) -> None:
        """Listen and speak only to these agents from now on."""
        self._known = {peer.key.encode(): peer for peer in known if peer.key}
        if len(self._known) > self._in.most // 2:
            raise_limit()
            self._in.most = _most()
        for key, endpoint in list(self._dialed.items()):
            if key not in self._known:
                del self._dialed[key]
                with contextlib.suppress(zmq.ZMQError):
                    self._out.disconnect(endpoint)

    def send(self, peer: structs.Peer, message: peer_messages.AnyPeer) -> None:
        """Send a message without waiting; what cannot be sent is lost."""
        key = peer.key.encode()
        if key not in self._known or not peer.address:
            return
        try:
            if key not in self._dialed:
                self._dial(peer, key)
            self._out.send_multipart([key, wire.encode(message)], zmq.DONTWAIT)
        except (zmq.ZMQError, ValueError):
            return

    def _dial(self, peer: structs.Peer, key: bytes) -> None:
        if len(self._dialed) == MANY:
            raise_limit()
        self._out.curve_serverkey = key
        self._out.setsockopt(zmq.CONNECT_ROUTING_ID, key)
        endpoint = f"tcp://{peer.address}"
        self._out.connect(endpoint)
        self._dialed[key] = endpoint

    def receive(self, take: Callable[[peer_messages.AnyPeer], None], drop: Callable[[str, str], None]) -> None:
        """Pass on each message that has come. drop(peer, why): called for a message that does not fit."""
        while self._out.poll(0):
            self._out.recv_multipart()  # nobody answers here

        def on_bytes(connection: Connection, data: bytes) -> None:
            peer = self._known.get(connection.session.key.encode())
            if peer is None:
                return  # an agent that has left the job
            self._in.is_known(connection)
            try:
                message = peer_messages.decode(data)
                if message.element != peer.element:
                    raise wire.BadMessage(f"speaks for element {message.element}")
                take(message)
            except wire.BadMessage as error:
                drop(f"the agent of element {peer.element}", str(error))

        self._in.receive(on_bytes, time.monotonic() + RECEIVE_SECONDS)

    def _admits(self, key: str) -> bool:
        """Say whether this key may connect. A stranger tries again: the plan that names it may be on its way."""
        return key.encode() in self._known

    def close(self) -> None:
        """Close all connections."""
        self._in.close()
        self._out.close(0)


def _listen(host: str) -> tuple[str, list[socket.socket]]:
    """Return the address at which others reach this agent, empty if they cannot, and its sockets."""
    for interface in (host, "*"):  # the name of a node may belong to none of its interfaces
        with contextlib.suppress(OSError):
            sockets = listening(interface, 0)
            return join(host, sockets[0].getsockname()[1]), sockets
    return "", []


def _most() -> int:
    """Return the most connections that others may have to this agent."""
    return max(1, int(open_files() * SHARE))
