"""Opens the controller's sockets: TCP for messages, UDP at the same port for the plugin's hints and for questions about
the public key, and the port for metrics."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unicron_ctl.shared.protocol.listener import QUEUE, listening
from unicron_ctl.shared.system.addresses import canonical, endpoint, join, reason_of, split
from unicron_ctl.shared.system.errors import UserError

if TYPE_CHECKING:
    from unicron_ctl.controller.server.exporter import Exporter

TRIES = 5  # to find a port that is free for TCP and UDP


class CannotListen(UserError):
    """A port of the controller cannot be bound; the text names it and the reason."""


@dataclass
class Ports:
    """The ports of a controller."""

    connections: list[socket.socket]
    hints: list[socket.socket]  # for datagrams, at the same port
    address: str  # for others: tcp://HOST:PORT
    exporter: Exporter | None = None  # of the metrics

    def close(self) -> None:
        """Closes all of them, if no controller has taken them."""
        for one in (*self.connections, *self.hints):
            one.close()
        if self.exporter is not None:
            self.exporter.close()


def bind(listen: str, metrics: str = "", known_as: Sequence[str] = ()) -> Ports:
    """Listen at the configuration's addresses `listen` and `metrics`. known_as: where others reach the controller.
    Raises CannotListen."""
    ports = _bind_sockets(listen, QUEUE)
    try:
        if metrics:
            from unicron_ctl.controller.server.exporter import Exporter  # 10 MiB, which most controllers do not need

            ports.exporter = Exporter(metrics, [endpoint(one)[0] for one in known_as])
    except UserError as error:
        ports.close()
        raise CannotListen(str(error)) from None
    return ports


def why_not(listen: str, metrics: str = "") -> str:
    """Return the reason why nothing can listen there now, or "". Nobody can connect during the test."""
    try:
        _bind_sockets(listen, 0).close()
    except CannotListen as error:
        return str(error)
    if not metrics:
        return ""
    from unicron_ctl.controller.server.exporter import cannot_serve, metrics_place

    try:
        for one in listening(*metrics_place(metrics), 0):
            one.close()
    except OSError as error:
        return str(cannot_serve(metrics, error))
    return ""


def _bind_sockets(listen: str, queue: int) -> Ports:
    host, port = split(listen.removeprefix("tcp://"), listens=True)
    tries = 1 if port else TRIES
    while True:
        try:
            sockets = listening(host, port, queue)
        except OSError as error:
            raise CannotListen(
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
            raise CannotListen(
                f"UDP port {place[1]}: {reason_of(error)}: agents ask for the public key there; free it, or choose "
                "another with [controller] listen"
            ) from None
        name = socket.gethostname() if canonical(place[0]) in ("0.0.0.0", "::") else canonical(place[0])
        return Ports(sockets, hints, f"tcp://{join(name, place[1])}")


def _datagrams(sockets: Sequence[socket.socket]) -> list[socket.socket]:
    """Open sockets for datagrams at the addresses of these sockets. Raises OSError."""
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
