"""Lines from simulated agents to the controller, and their clock."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from typing import Protocol

from benchmarks.scale.zmtp import Connection, Lost


class Failed(Exception):
    """The controller did not do its part; the text says which."""


class Lines(Protocol):
    """A line for each agent, by its index, and one more for questions. Raises :class:`Failed` where one is lost."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def send(self, index: int, data: bytes) -> None:
        """One message on that line; what does not go out now goes out with `flush`."""

    def flush(self) -> None:
        """Sends what was left."""

    def receive(self) -> Iterator[tuple[int, list[bytes], float]]:
        """(index, messages, when the last of them came) of every line on which something came."""

    def rest(self, seconds: float) -> None:
        """Lets so much time pass."""

    def close(self) -> None:
        """Ends all lines."""


class Sockets:
    """Lines `names` to the controller at `endpoint` (host, port), over TCP and in real time. Raises OSError."""

    def __init__(self, endpoint: tuple[str, int], names: list[str]) -> None:
        self._endpoint = endpoint
        self._connections: dict[int, Connection] = {}
        self._by_descriptor: dict[int, int] = {}
        self._poller = select.epoll()
        self._unsent: set[int] = set()
        for index, name in enumerate(names):
            self.connect(index, name)

    def connect(self, index: int, name: str) -> None:
        """A new connection in place of the line's old one."""
        self.drop(index)
        connection = self._connections[index] = Connection(*self._endpoint, name.encode())
        self._by_descriptor[connection.fileno()] = index
        self._poller.register(connection.fileno(), select.EPOLLIN)

    def drop(self, index: int) -> None:
        """Closes one line."""
        connection = self._connections.pop(index, None)
        if connection is None:
            return
        with contextlib.suppress(OSError, KeyError):
            self._poller.unregister(connection.fileno())
        connection.close()
        self._unsent.discard(index)

    def now(self) -> float:
        return time.time()

    def send(self, index: int, data: bytes) -> None:
        try:
            self._connections[index].send(data)
            if not self._connections[index].flush():
                self._unsent.add(index)
        except Lost as error:
            raise Failed(f"the connection of agent {index} was lost: {error}") from None

    def flush(self) -> None:
        self._unsent = {index for index in self._unsent if not self._connections[index].flush()}

    def receive(self) -> Iterator[tuple[int, list[bytes], float]]:
        for descriptor, _ in self._poller.poll(0, max(1, len(self._connections))):
            index = self._by_descriptor[descriptor]
            connection = self._connections.get(index)
            if connection is None:  # dropped since
                continue
            try:
                messages = connection.receive()
            except Lost as error:
                raise Failed(f"the connection of agent {index} was lost: {error}") from None
            yield index, messages, connection.arrived

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._poller.close()
