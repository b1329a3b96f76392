"""The agent's line to the other agents of its job: everybody listens on a socket of its own and dials those it has
something to say to, both known to each other by their public keys (CURVE), which the controller's plans tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import zmq
from zmq.utils import z85

from unicron_ctl.descriptors import raise_limit
from unicron_ctl.protocol import peers, wire

MANY = 100  # connections, for which the open files of an ordinary process suffice
_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.RECONNECT_IVL, 50),
    (zmq.RECONNECT_IVL_MAX, 1000),
    (zmq.CONNECT_TIMEOUT, 2000),
    (zmq.HANDSHAKE_IVL, 1000),  # who is not let in yet is told nothing, and tries again after this; usually 30 s
    (zmq.HEARTBEAT_IVL, 1000),
    (zmq.HEARTBEAT_TIMEOUT, 5000),
    (zmq.MAXMSGSIZE, wire.MAX_BYTES),
)


class Peers:
    """host: where others reach this node. keys: this agent's, public and secret.

    :attr:`address` is host:port, empty when it cannot be reached.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, keys: tuple[str, str]) -> None:
        self._known: dict[bytes, wire.Peer] = {}
        self._dialed: dict[bytes, str] = {}  # key -> endpoint
        self._keys = keys
        self._guard: Any = context.socket(zmq.ROUTER)  # asked by ZeroMQ who may come in (ZeroMQ RFC 27)
        self._guard.bind("inproc://zeromq.zap.01")
        self._in: Any = context.socket(zmq.ROUTER)
        self._out: Any = context.socket(zmq.ROUTER)
        for socket in (self._in, self._out):
            for option, value in _OPTIONS:
                socket.setsockopt(option, value)
            socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in keys)
        self._in.curve_server = True
        self.address = self._listen(host)

    @property
    def sockets(self) -> tuple[Any, ...]:
        """To be polled."""
        return self._guard, self._in, self._out

    def _listen(self, host: str) -> str:
        for interface in (host, "*"):  # the name of a node need not be one of its interfaces'
            try:
                return f"{host}:{self._in.bind_to_random_port(f'tcp://{interface}')}"
            except zmq.ZMQError:
                continue
        return ""

    def know(self, known: Iterable[wire.Peer]) -> None:
        """Only these are listened to and spoken to from now on."""
        self._known = {peer.key.encode(): peer for peer in known if peer.key}
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
        self._let_in()
        while self._out.poll(0):
            self._out.recv_multipart()  # nobody answers here
        while self._in.poll(0):
            *_, frame = self._in.recv_multipart(copy=False)
            peer = self._known.get(str(frame.get("User-Id")).encode())
            if peer is None:
                continue  # known once, of an agent that is gone
            try:
                message = peers.decode(frame.bytes)
                if message.element != peer.element:
                    raise wire.BadMessage(f"speaks for element {message.element}")
                take(message)
            except wire.BadMessage as error:
                drop(f"the agent of element {peer.element}", str(error))

    def _let_in(self) -> None:
        while self._guard.poll(0):
            frames = self._guard.recv_multipart()
            cut = frames.index(b"") + 1
            version, request, *_, key = frames[cut:]
            name = z85.encode(key) if len(key) == 32 else b""
            # 300 is "try again": the plan that names it may be on its way. After a 400 ZeroMQ never would.
            status, text = (b"200", b"OK") if name in self._known else (b"300", b"no agent of this generation")
            self._guard.send_multipart([*frames[:cut], version, request, status, text, name, b""])

    def close(self) -> None:
        """Leave nothing behind."""
        for socket in self.sockets:
            socket.close(0)
