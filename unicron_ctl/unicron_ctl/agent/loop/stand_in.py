"""Lets the job's agents go on while the controller is away, by :class:`Participant` and sockets for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unicron_ctl.agent.connections.connections import Connections
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.connections.peer_connections import Peers
from unicron_ctl.shared.consensus.participant import Participant
from unicron_ctl.shared.protocol import peer_messages, structs, wire


class StandIn:
    """Runs this agent's :class:`Participant` over its sockets."""

    def __init__(
        self,
        net: Connections,
        place: Place,
        identity: str,
        reachable: bool,  # False if the job waits for the controller instead
        obey: Callable[[wire.Break | wire.Plan], None],  # passes one to the ranks
    ) -> None:
        self._obey, self._outbox, self._log, pair = obey, net.outbox, net.log, net.line.pair
        self._line = Peers(net.context, place.address, pair, net.log.warn) if reachable else None
        self.address = self._line.address if self._line is not None else ""
        me = structs.Peer(place.element, identity, self.address, pair[0] if self.address else "")
        self.participant = Participant(me, place.settings.ranks_per_node)
        self._known: Mapping[str, structs.Peer] = {}

    @property
    def sockets(self) -> tuple[Any, ...]:
        """The sockets to poll."""
        return self._line.sockets if self._line is not None else ()

    def serve(self, now: float) -> None:
        """Read messages of the other agents."""
        if self._line is not None:
            self._line.receive(lambda message: self._on_message(message, now), self._log.drop)
            self.carry_out()

    def _on_message(self, message: peer_messages.AnyPeer, now: float) -> None:
        if not self._outbox.muted:
            self.participant.on_message(message, now)

    def on_timer(self, now: float) -> bool:
        """Do what is due; True if the controller should get a status at once."""
        self.participant.tick(now)
        self.carry_out()
        return self.participant.status_due or self.participant.should_ask(now)

    def carry_out(self) -> None:
        """Send and obey what the participant has decided."""
        known = self.participant.known
        if self._line is not None and known is not self._known:
            self._known = known
            self._line.allow_only(known.values())
        outbox, self.participant.outbox = self.participant.outbox, []
        for peer, message in outbox:
            if self._line is not None and not self._outbox.muted:
                self._line.send(peer, message)
        orders, self.participant.orders = self.participant.orders, []
        for order in orders:
            if isinstance(order, wire.Plan):
                self._log.inform(f"generation {order.generation}: {order.reason}")
            self._obey(order)

    def close(self) -> None:
        """Close the sockets."""
        if self._line is not None:
            self._line.close()
