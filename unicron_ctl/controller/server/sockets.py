"""The controller's sockets: TCP for messages, and UDP at the same port for the plugin's hints and for questions about
the public key."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from unicron.ctl.protocol.listener import listening
from unicron.ctl.system.addresses import canonical, join, reason_of
from unicron.ctl.system.errors import UserError

TRIES = 5  # to find a port that is free for TCP and for UDP


def bind(listen: str) -> tuple[list[socket.socket], list[socket.socket], str]:
    """Sockets for connections, sockets for datagrams at the same port, and the address at which they can be reached.
    Raises UserError."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    tries = TRIES if port == "0" else 1
    while True:
        try:
            sockets = listening(host, int(port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {listen}: {reason_of(error)}; "
                "choose another address with --listen or [controller] listen"
            ) from None
        place, tries = sockets[0].getsockname(), tries - 1
        try:
            hints = _datagrams(sockets)
        except OSError as error:
            for one in sockets:
                one.close()
            if tries:
                continue
            raise UserError(
                f"UDP port {place[1]}: {reason_of(error)}: agents ask for the public key there; free it, or choose "
                "another with [controller] listen"
            ) from None
        name = socket.gethostname() if canonical(place[0]) in ("0.0.0.0", "::") else canonical(place[0])
        return sockets, hints, f"tcp://{join(name, place[1])}"


def _datagrams(sockets: Sequence[socket.socket]) -> list[socket.socket]:
    """Sockets for datagrams at the addresses of these. Raises OSError."""
    opened: list[socket.socket] = []
    try:
        for one in sockets:
            hints = socket.socket(one.family, socket.SOCK_DGRAM)
            opened.append(hints)
            hints.setblocking(False)
            if one.family == socket.AF_INET6:
                only = one.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                hints.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            hints.bind(one.getsockname())
    except OSError:
        for hints in opened:
            hints.close()
        raise
    return opened
