"""One-way connections between the members of a generation, for the few numbers that all of them exchange.

Over gloo one message takes three, because its receiver must ask first, and the wait needs a thread of its own, because
only the end of a connection ends it (:mod:`unicron_transition.seams.gloo`). Here a rank sends at once and its main
thread waits.

The connections are opened together with the generation's groups, from the address that gloo has chosen. So a Break ends
them like gloo's, and with them the waits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from unicron_detector.tcp_sockets import tcp_sockets, view_of

COUNT, PLACE = "links", "links.{}"  # keys in the store
WITHOUT_LINKS = 1 << 32  # more than a world has members
LAZY = "TORCH_GLOO_LAZY_INIT"  # torch's setting
IPV4_PREFIX = "::ffff:"  # before an IPv4 address of an IPv6 socket
TOKEN_BYTES = 16
HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")  # the receiver's token, and how many places before it the sender is
HEAD = struct.Struct("<QI")  # number of the exchange, bytes of the message
MOST_BYTES = 1 << 14  # of a message: all send before they receive
POLL_SECONDS = 0.1
LINK_SECONDS = 20.0  # for all connections of a rank


class MemberLinks:
    """The connections of one rank: to the ranks 1, 2, 4, ... places further, and from those as many places before.

    limit: seconds that a rank waits for a peer.
    """

    def __init__(self, onward: dict[int, socket.socket], coming: dict[int, socket.socket], limit: float):
        self._steps = [(onward[step], coming[step]) for step in sorted(onward)]
        self._count = 0  # exchanges
        for each in (*onward.values(), *coming.values()):
            each.settimeout(limit)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum of each number over all members, after all of them have come here. Raises RuntimeError if
        a peer is gone, and ValueError for more numbers than the kernel takes before the peer reads them."""
        if tensor.nbytes > MOST_BYTES:
            raise ValueError(f"an exchange of {tensor.nbytes} bytes: all would wait for each other")
        self._count += 1
        largest = tensor
        try:
            for onward, coming in self._steps:
                data = largest.numpy().tobytes()
                onward.sendall(HEAD.pack(self._count, len(data)) + data)
                received = torch.frombuffer(self._receive(coming, len(data)), dtype=tensor.dtype)
                largest = torch.maximum(largest, received.view(tensor.shape))
        except OSError as error:
            raise RuntimeError(f"a member is gone from an exchange: {error}") from error
        return largest

    def _receive(self, coming: socket.socket, size: int) -> bytearray:
        if HEAD.unpack(_read(coming, HEAD.size)) != (self._count, size):
            raise RuntimeError("a member is in another exchange than this rank")
        return _read(coming, size)

    def close(self) -> None:
        """End the connections. What was sent still arrives."""
        for pair in self._steps:
            for each in pair:
                each.close()
        self._steps = []


# ------------------------------------------------------------ connecting
def announce(store: Any, backend: str, environment: Mapping[str, str] = os.environ) -> None:
    """Tell the other members, before the generation's groups are connected, that this rank's release knows links, and
    that it can refuse a commit. If gloo connects only later, nobody would know in time whether all want links."""
    links = backend == "gloo" and not environment.get(LAZY)
    store.add(COUNT, 1 if links else 1 + WITHOUT_LINKS)


def all_tell(store: Any, size: int) -> bool:
    """Whether all members have announced themselves: to be asked after a first collective of all of them."""
    return bool(store.add(COUNT, 0) % WITHOUT_LINKS == size)


def connect(
    store: Any, rank: int, size: int, lost: Callable[[], bool], before: Collection[int], limit: float
) -> MemberLinks | None:
    """Connect this rank with its peers, after gloo has connected the world. None, in all ranks alike, if a member's
    release does not know links.

    before: the TCP sockets that were open before gloo's. limit: as for :class:`MemberLinks`. Raises ConnectionError
    once `lost()`, or after LINK_SECONDS.
    """
    if size < 2 or store.add(COUNT, 0) != size:  # each has announced itself before it connected with gloo
        return None
    steps = [1 << power for power in range((size - 1).bit_length())]
    token, deadline = secrets.token_bytes(TOKEN_BYTES), time.monotonic() + LINK_SECONDS
    onward, coming = dict[int, socket.socket](), dict[int, socket.socket]()

    def check() -> None:
        if lost() or time.monotonic() > deadline:
            raise ConnectionError("a member did not connect for the exchanges")

    try:
        host = _own_address(before)
        with socket.create_server((host, 0), family=_family(host), backlog=128) as listener:
            store.set(PLACE.format(rank), f"{token.hex()} {listener.getsockname()[1]} {host}")
            for step in steps:  # the peer's system accepts before the peer does, so no two wait for each other
                place = store.get(PLACE.format((rank + step) % size)).decode()
                onward[step] = _dial(place, step, check)
            _accept(listener, token, steps, coming, check)
    except BaseException as error:
        for each in (*onward.values(), *coming.values()):
            each.close()
        if isinstance(error, OSError):
            raise ConnectionError(f"no connection for the exchanges: {error}") from error
        raise
    return MemberLinks(onward, coming, limit)


def _own_address(before: Collection[int]) -> str:
    """Return the address at which gloo listens for this rank. Raises ConnectionError if it does not listen any more."""
    for inode, descriptor in tcp_sockets().items():
        if inode not in before:
            with contextlib.suppress(OSError), view_of(descriptor) as view:
                if view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host = str(view.getsockname()[0])
                    return host.removeprefix(IPV4_PREFIX) if "." in host else host
    raise ConnectionError("the world's connections have ended")


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _dial(place: str, step: int, check: Callable[[], None]) -> socket.socket:
    token, port, host = place.split(" ", 2)
    onward = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        onward.setblocking(False)
        onward.connect_ex((host, int(port)))
        waiting = select.poll()
        waiting.register(onward, select.POLLOUT)
        while not waiting.poll(int(1000 * POLL_SECONDS)):
            check()
        if number := onward.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, f"{host}:{port} does not answer")
        onward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        onward.sendall(HELLO.pack(bytes.fromhex(token), step))
    except BaseException:
        onward.close()
        raise
    return onward


def _accept(
    listener: socket.socket,
    token: bytes,
    steps: Sequence[int],
    coming: dict[int, socket.socket],
    check: Callable[[], None],
) -> None:
    """Accept one connection for each step. Whoever does not know the token is a stranger."""
    came = dict[int, tuple[socket.socket, bytearray]]()  # by descriptor, with what they have said so far
    listener.setblocking(False)
    with selectors.PollSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(coming) < len(steps):
                check()
                for key, _ in selector.select(POLL_SECONDS):
                    if key.fd == listener.fileno():
                        with contextlib.suppress(OSError):
                            peer, _address = listener.accept()
                            peer.setblocking(False)
                            came[peer.fileno()] = peer, bytearray()
                            selector.register(peer, selectors.EVENT_READ)
                        continue
                    peer, said = came[key.fd]
                    if _says_more(peer, said):
                        continue
                    selector.unregister(key.fd)
                    del came[key.fd]
                    step = _greeting(bytes(said), token)
                    if step in steps and step not in coming:
                        coming[step] = peer
                    else:
                        peer.close()
        finally:
            for peer, _ in came.values():
                peer.close()


def _says_more(peer: socket.socket, said: bytearray) -> bool:
    """Read what a peer has sent of its hello; return whether the rest is still to come. It never waits, so that no
    stranger holds this rank up."""
    try:
        data = peer.recv(HELLO.size - len(said))
    except BlockingIOError:
        return True
    except OSError:
        return False
    said += data
    return bool(data) and len(said) < HELLO.size


def _greeting(said: bytes, token: bytes) -> int:
    """Return the step that a peer names; 0 for a stranger."""
    if len(said) != HELLO.size:
        return 0
    found, step = HELLO.unpack(said)
    return int(step) if secrets.compare_digest(found, token) else 0


def _read(coming: socket.socket, size: int) -> bytearray:
    data = bytearray(coming.recv(size))
    while len(data) < size:
        more = coming.recv(size - len(data)) if data else b""
        if not more:
            raise ConnectionError("its connection has ended")
        data += more
    return data
