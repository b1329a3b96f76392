"""An agent's connections, and its lines in the job's log."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from unicron_ctl.agent.connections.containment import Containment
from unicron_ctl.agent.connections.controller_connection import Line
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.connections.rank_socket import RankLine, socket_folder
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.system.errors import one_line
from unicron_detector.processes.job_output import standard_error
from unicron_detector.processes.log_format import log_line

COMPLAINTS = 5  # lines about bad messages of one peer, so that a broken one does not fill the job's log


class JobLog:
    """Lines on the agent's standard error, which Slurm writes into the job's log. No method waits for the log."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._complaints: Counter[str] = Counter()
        self._once: set[str] = set()

    def inform(self, text: str) -> None:
        """Write news."""
        self._write("info", text)

    def warn(self, text: str) -> None:
        """Write that something is not as it should be."""
        self._write("warning", text)

    def warn_once(self, text: str) -> None:
        """Write a warning, unless the same line has been written before."""
        if text not in self._once:
            self._once.add(text)
            self.warn(text)

    def drop(self, peer: str, why: str) -> None:
        """Note that a bad message was dropped; the first ones of each peer get a line."""
        self._complaints[peer] += 1
        if self._complaints[peer] <= COMPLAINTS:
            self.warn(f"dropped a bad message of {peer}: {why[:300]}")

    def _write(self, level: str, text: str) -> None:
        line = log_line(level, "unicron", one_line(text), job=self._place.label, node=self._place.node)
        standard_error.write(f"{line}\n".encode())


class Outbox:
    """Sends messages to the controller."""

    def __init__(self, line: Line, log: JobLog) -> None:
        self._line, self._log = line, log
        self.muted = False  # an injected fault has cut the network
        self.closed = False  # the controller does not take this agent
        self._lost_steps = False  # some were lost, and the log says so

    def send(self, message: wire.Message) -> None:
        """Send one message; it is lost if nobody takes it."""
        if self.muted or self.closed or self._line.key is None:
            return
        try:
            self._line.socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:  # the queue to a controller that is away is full. A status is repeated, a proof is not
            steps = getattr(message, "tables", None) or getattr(message, "steps", None)
            proof = isinstance(message, wire.Steps) or bool(steps)
            if proof and not self._lost_steps:
                self._lost_steps = True
                self._log.warn("the controller has been away for too long: reports of steps are lost until it is back")


class Polling:
    """Sockets and descriptors, each with a call for when it can be read. A call that fails stops no other."""

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
        """Stop watching the source, if it is watched."""
        if self._calls.pop(source, None) is not None:
            self._poller.unregister(source)

    def serve(self, seconds: float) -> list[Any]:
        """Wait up to `seconds` for something to read, and serve it; return the sources that were ready."""
        ready = [source for source, _ in self._poller.poll(max(0, math.ceil(seconds * 1000)))]
        for source in ready:
            if source in self._calls:  # an earlier call may have removed it
                self._containment.attempt("take in what has come", self._calls[source])
        return ready


@dataclass
class Connections:
    """An agent's sockets, and the objects that read and write them."""

    context: zmq.Context[zmq.Socket[bytes]]
    line: Line
    """The line to the controller."""
    outbox: Outbox
    """Messages to the controller."""
    ranks: RankLine
    """The line to the ranks."""
    polling: Polling
    """The sockets and descriptors for which the agent's loop waits."""
    containment: Containment
    log: JobLog

    def abandon(self) -> None:
        """Remove the sockets of an agent that cannot begin."""
        self.context.destroy(linger=0)
        self.ranks.remove()


def connect(place: Place, address: str, environment: Mapping[str, str]) -> Connections:
    """Return the connections of an agent at this place to the controller at `address`. Raises zmq.ZMQError for an
    invalid address, OSError if there is no room for a socket."""
    context, folder = zmq.Context(), ""
    try:
        log, line = JobLog(place), Line(context, address)
        folder, containment = socket_folder(place.job, environment), Containment(log.warn)
        ranks = RankLine(context, folder)
        return Connections(context, line, Outbox(line, log), ranks, Polling(containment), containment, log)
    except BaseException:
        context.destroy(linger=0)
        shutil.rmtree(folder, ignore_errors=True)
        raise
