"""Registers an agent with the controller until the controller welcomes it or refuses it for good."""

from __future__ import annotations

import time

from unicron_ctl.agent.connections.connections import Connections
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.snapshots.peer_copies import Copies
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.reach import Door
from unicron_ctl.shared.system.addresses import join

REGISTER_SECONDS = 0.5


class Registration:
    """Registers the agent with the controller."""

    def __init__(self, place: Place, identity: str, net: Connections, door: Door, peer: str, copies: Copies) -> None:
        self._place, self._identity, self._line = place, identity, net.line
        self._outbox, self._polling = net.outbox, net.polling
        self._door, self._copies = door, copies
        self._peer = peer  # the address for other agents' messages
        self._tried = float("-inf")
        self.welcomed = self.was_welcomed = False
        self.refusal = ""
        """Why the controller last did not take this agent."""
        self.alone = False
        """Whether the job already trains without this step, so the step runs unprotected."""
        self.apart = False
        """Whether it is alone for good, because the command is none of this job's."""

    def on_timer(self) -> None:
        """Find the controller, and register until it welcomes this agent."""
        self._line.find_controller()
        if self._line.answers >= 0 and self._line.answers not in self._polling:
            self._polling.watch(self._line.answers, lambda: self._line.learn(self.register))
        wanted = not self.welcomed and not self._outbox.closed and self._line.key is not None
        if wanted and time.monotonic() - self._tried >= REGISTER_SECONDS:
            self.register()

    def register(self) -> None:
        """Send the agent's first message."""
        self._tried = time.monotonic()
        place = self._place
        message = wire.Register(
            job=place.job,
            element=place.element,
            agent=self._identity,
            node=place.node,
            address=place.address,
            slots=place.slots,
            settings=place.settings,
            step=place.step,
            requeues=place.requeues,
            trains=place.trains,
            door=join(place.address, self._door.port),
            peer=self._peer,
            images=self._copies.address,
            token=self._copies.token,
        )
        self._line.register(message, self._outbox.send)

    def on_welcome(self) -> bool:
        """Note that the controller knows this agent; True if it already did before."""
        again, self.welcomed, self.was_welcomed = self.was_welcomed, True, True
        return again

    def on_refused(self, message: wire.Refusal) -> None:
        """Note why the controller does not take this agent."""
        self.refusal, self.alone = message.reason, self.alone or message.alone
        self.apart = message.alone and message.final

    def register_again(self) -> None:
        """Register with a controller that was restarted and has forgotten this agent."""
        if self.welcomed:
            self.welcomed = False
            self.register()

    def why_not(self, address: str) -> str:
        """Return why this agent is not protected, in one line."""
        if self._outbox.closed or self.refusal:
            return self.refusal
        problem = self._line.problem
        return f"no controller answers at {address}" + (f" ({problem})" if problem else "")
