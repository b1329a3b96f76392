"""Injected faults that strike the agent itself, or its ranks from outside (:mod:`chaos.inject`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

import zmq

from unicron_ctl.agent.connections.connections import Connections
from unicron_ctl.agent.ranks.ranks import Rank
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.reach import Door
from unicron_detector.chaos import blackhole, inject
from unicron_detector.chaos.memory_cage import Cage, CageError


class Trials:
    """Carries out injected faults."""

    def __init__(
        self,
        job: str,
        net: Connections,
        door: Door,
        ranks: Mapping[int, Rank],
        send: Callable[[int, wire.Message], None],  # (slot, message to its rank)
    ) -> None:
        self._job, self._line, self._door, self._ranks = job, net.line, door, ranks
        self._outbox, self._send, self._log = net.outbox, send, net.log
        self._until = 0.0  # the network is lost until then
        self._hole: set[int] | None = None
        self._cages: dict[int, Cage] = {}

    def perform(self, order: wire.Inject) -> None:
        """Inject the fault that the controller orders, or report why not."""
        try:
            name, _ = inject.parse(order.fault)
        except inject.InjectError as error:
            self._refuse(order, str(error))
            return
        self._log.inform(f"injected on the controller's order: {order.fault} into slot {order.slot}")
        rank = self._ranks.get(order.slot)
        if name == "corrupt-message":
            for garbage in (b"", b"\xc1" * 100, os.urandom(1000), wire.encode(wire.Ping())):
                self._line.socket.send(garbage, zmq.DONTWAIT)
        elif name in ("lost-network", "black-hole"):
            self._lose_network(name, order)
        elif rank is None or rank.child is None or rank.status.incarnation != order.incarnation:
            self._refuse(order, f"slot {order.slot} has no such process any more")
        elif name in ("rank-kill", "hang-stop"):
            rank.child.signal(signal.SIGKILL if name == "rank-kill" else signal.SIGSTOP)
        elif name == "oom-kill":
            self._cage(rank, order)
        else:
            self._send(order.slot, order)

    def restore_network(self) -> bool:
        """End an injected loss of the network when its time is over; True if it has just ended."""
        if not self._outbox.muted or time.monotonic() < self._until:
            return False
        self._outbox.muted = False
        self._door.open()
        if self._hole is None:
            self._line.call_again()
        else:
            blackhole.fill(self._hole)
            self._hole = None
        return True

    def on_end(self, rank: Rank) -> None:
        """Remove what was put around the rank's process, which has ended."""
        cage = self._cages.pop(rank.slot, None)
        if cage is not None:
            if rank.status.exit is not None and cage.killed():
                rank.status.exit.oom = True
            cage.close()

    def _lose_network(self, name: str, order: wire.Inject) -> None:
        seconds = order.seconds or inject.FAULTS[name][1]
        for slot in self._ranks:
            self._send(slot, order)
        self._outbox.muted, self._until = True, time.monotonic() + seconds
        self._door.stop_answering()
        if name == "lost-network":
            self._line.hang_up()
        else:
            self._hole = blackhole.dig(pace=False)

    def _cage(self, rank: Rank, order: wire.Inject) -> None:
        try:
            self._cages[rank.slot] = Cage(rank.status.pid)
        except CageError as error:
            self._refuse(order, str(error))
            return
        self._send(rank.slot, order)

    def _refuse(self, order: wire.Inject, why: str) -> None:
        self._log.warn(f"cannot inject {order.fault}: {why}")
        self._outbox.send(wire.InjectRefused(job=self._job, slot=order.slot, fault=order.fault, reason=why))
