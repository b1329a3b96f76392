"""What the agent's loop waits for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import zmq

from unicron_ctl.agent.connections.containment import Containment


class Polling:
    """Sockets and descriptors, each with what to do when it can be read. What fails there concerns nobody else."""

    def __init__(self, containment: Containment) -> None:
        self._containment = containment
        self._poller = zmq.Poller()
        self._calls: dict[Any, Callable[[], object]] = {}

    def __contains__(self, source: Any) -> bool:
        return source in self._calls

    def watch(self, source: Any, call: Callable[[], object]) -> None:
        """Call `call` whenever `source` can be read: a ZeroMQ socket or a descriptor."""
        self._calls[source] = call
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: Any) -> None:
        """Stop watching; a source that is not watched does no harm."""
        if self._calls.pop(source, None) is not None:
            self._poller.unregister(source)

    def serve(self, seconds: float) -> list[Any]:
        """Wait up to `seconds` for something to happen, and deal with all that has; returns where."""
        found = [source for source, _ in self._poller.poll(max(0, math.ceil(seconds * 1000)))]
        for source in found:
            if source in self._calls:  # one before it may have ended this one
                self._containment.attempt("take in what has come", self._calls[source])
        return found
