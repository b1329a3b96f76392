"""What an agent sends to the controller, as long as there is one that will have it."""

from __future__ import annotations

import zmq

from unicron_ctl.agent.connections.controller_connection import Line
from unicron_ctl.agent.connections.job_log import JobLog
from unicron_ctl.shared.protocol import wire


class Outbox:
    """Sends messages to the controller.

    muted: the network is lost, by an injected fault. closed: the controller will not have this agent.
    """

    def __init__(self, line: Line, log: JobLog) -> None:
        self._line, self._log = line, log
        self.muted = self.closed = False
        self._lost_steps = False  # some, and it was said

    def send(self, message: wire.Message) -> None:
        """Send one message; it is lost where nobody takes it."""
        if self.muted or self.closed or self._line.key is None:
            return
        try:
            self._line.socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:  # the queue to a controller that is away is full; a status will tell again, a proof will not
            proof = isinstance(message, wire.Steps) or (isinstance(message, wire.Status) and message.steps)
            if proof and not self._lost_steps:
                self._lost_steps = True
                self._log.warn("the controller has been away for too long: reports of steps are lost until it is back")
