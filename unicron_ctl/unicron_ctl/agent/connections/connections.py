"""All through which an agent speaks and listens, and the log into which it writes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import zmq

from unicron_ctl.agent.connections.containment import Containment
from unicron_ctl.agent.connections.controller_connection import Line
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.connections.job_log import JobLog
from unicron_ctl.agent.connections.outbox import Outbox
from unicron_ctl.agent.connections.polling import Polling
from unicron_ctl.agent.connections.rank_socket import RankLine, socket_folder


@dataclass
class Connections:
    """An agent's sockets, and what reads and writes them.

    line: to the controller; outbox: what goes there. ranks: the line to the ranks. polling: what the agent's loop
    waits for.
    """

    context: zmq.Context[zmq.Socket[bytes]]
    line: Line
    outbox: Outbox
    ranks: RankLine
    polling: Polling
    containment: Containment
    log: JobLog

    def abandon(self) -> None:
        """Leaves no socket behind where the agent could not begin."""
        _abandon(self.context, self.ranks.folder)
        self.ranks.remove()


def connect(place: Place, address: str, environment: Mapping[str, str]) -> Connections:
    """The connections of an agent at this place, to the controller at `address`.

    Raises zmq.ZMQError for an address that is none, OSError where there is no room for a socket.
    """
    context, folder = zmq.Context(), ""
    try:
        log, line = JobLog(place), Line(context, address)
        folder, containment = socket_folder(place.job, environment), Containment(log.warn)
        ranks = RankLine(context, folder)
        return Connections(context, line, Outbox(line, log), ranks, Polling(containment), containment, log)
    except BaseException:
        _abandon(context, folder)
        raise


def _abandon(context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
    context.destroy(linger=0)
    shutil.rmtree(folder, ignore_errors=True)
