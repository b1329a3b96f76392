"""One side of the protocol in the test's own hands: an agent without ranks, a controller without a plan."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq

from tests.support.processes import LIMIT
from unicron_ctl.shared.protocol import claims, datagrams, shared_plans, structs, wire
from unicron_ctl.shared.protocol.encryption import secure_client
from unicron_ctl.shared.protocol.munge import MungeError, make_credential
from unicron_ctl.shared.protocol.reach import Reach

BEAT = 0.2  # seconds between a scripted agent's statuses
M = TypeVar("M", bound=wire.Message)


def by_munge(text: str) -> str:
    """A credential of this process's user, none without munge."""
    try:
        return make_credential(text)
    except MungeError:
        return ""


class ScriptedAgent:
    """An agent of element `element` with one rank, over a real socket; it says what the test has it say.

    key: the controller's public key, empty for none. credential: makes one of its user's that holds a text.
    """

    def __init__(
        self,
        address: str,
        element: int,
        nodes: int = 2,
        job: str = "7",
        node: str = "",
        key: str = "",
        credential: Callable[[str], str] = by_munge,
    ):
        self.job, self.element, self.nodes = job, element, nodes
        self.name, self.node = f"agent{element}", node or f"n{element}"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.key = secure_client(self.socket, key)
        self.credential = credential
        self.socket.connect(address)
        self.rank = structs.RankStatus(state="starting", micro_batches=4, train_iterations=50)
        self.heard: list[wire.Message] = []
        self.reaches = Reach.REACHED  # what it answers when it is asked for others
        self._number, self._steps, self._beat = 0, 0, 0.0

    def close(self) -> None:
        self.context.destroy(linger=0)  # with what a test that failed has left open

    def send(self, message: wire.Message) -> None:
        self.socket.send(wire.encode(message))

    def register(self, user: str = "ann") -> None:
        """Its first message."""
        message = wire.Register(
            job=self.job,
            element=self.element,
            agent=self.name,
            node=self.node,
            address="127.0.0.1",
            slots=[self.element],
            settings=structs.Settings(name="gpt", user=user, max_nodes=self.nodes),
        )
        if self.key:
            message.credential = self.credential(claims.of_agent(message, self.key))
        self.send(message)

    def status(self, **changes: Any) -> None:
        """The rank's status, with what has changed in it."""
        if changes:
            self.rank = msgspec.structs.replace(self.rank, **changes, changed=time.time())
        self._number, self._beat = self._number + 1, time.monotonic()
        self.send(
            wire.Status(
                job=self.job,
                element=self.element,
                agent=self.name,
                sent=time.time(),
                number=self._number,
                store=f"127.0.0.1:{9000 + self.element}",
                ranks={self.element: self.rank},
            )
        )

    def steps(self, generation: int, iteration: int, micro_batches: list[int], total: int = 4) -> None:
        """The rank's optimizer step."""
        self._steps += 1
        step = structs.RankStep(slot=self.element, micro_batches=micro_batches, seconds=0.1, loss=1.0)
        report = structs.StepReport(generation, iteration, total, time.time(), [step], self._steps)
        self.send(wire.Steps(job=self.job, element=self.element, agent=self.name, reports=[report]))

    def expect(self, kind: type[M], *others: ScriptedAgent, after: int = 0, limit: float = LIMIT) -> M:
        """The last message of a kind, as soon as there is one, of a generation after `after`; the heartbeats of this
        and the other agents go on meanwhile. A plan is whole, as its ranks would get it."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            for agent in (self, *others):
                agent.turn()
            for message in reversed(self.heard):
                if isinstance(message, kind) and (not after or getattr(message, "generation", 0) > after):
                    return message
            self.socket.poll(10)
        names = [type(message).__name__ for message in self.heard]
        raise AssertionError(f"no {kind.__name__} within {limit:g} s; heard {names}")

    def turn(self) -> None:
        """Take in what has come, and send a heartbeat when it is due."""
        while self.socket.poll(0):
            message = wire.decode(self.socket.recv(), wire.ToAgent)
            self.heard.append(shared_plans.whole(message) if isinstance(message, wire.PlanShare) else message)
            if isinstance(message, wire.Refusal) and not message.final:
                self.register()
            elif isinstance(message, wire.Reach):
                words, number = [str(self.reaches)] * len(message.targets), message.number
                self.send(
                    wire.ReachAnswer(job=self.job, element=self.element, agent=self.name, number=number, words=words)
                )
        if time.monotonic() - self._beat > BEAT:
            self.status()


def form(agents: list[ScriptedAgent], *others: ScriptedAgent) -> None:
    """The agents' job trains in generation 1; the heartbeats of the others go on meanwhile."""
    for agent in agents:
        agent.register()
        agent.expect(wire.Welcome, *agents, *others)
    for agent in agents:
        agent.status(state="waiting")
    for agent in agents:
        plan = agent.expect(wire.Plan, *agents, *others)
        assert plan.members == [agent.element for agent in agents] and plan.generation == 1
    for agent in agents:
        agent.status(state="running", generation=1)


class FakeController:
    """The controller's side of the protocol; it does nothing that the test does not do, but for telling who asks that
    it encrypts nothing."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an agent that connects again is the same one
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._route = b""
        self._hellos = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._hellos.bind(("127.0.0.1", int(self.address.rpartition(":")[2])))
        threading.Thread(target=self._introduce, daemon=True).start()

    def _introduce(self) -> None:
        while True:
            try:
                _, where = self._hellos.recvfrom(2048)
                if where is None:  # shut down
                    return
                self._hellos.sendto(wire.encode(datagrams.Introduction(plain=True)), where)
            except OSError:
                return

    def hear(self, fits: Callable[[Any], bool], what: str, limit: float = LIMIT) -> Any:
        """The next message that fits; others are dropped."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if self._socket.poll(100):
                self._route, data = self._socket.recv_multipart()
                message = wire.decode(data, wire.ToController)
                if isinstance(message, wire.Status) and message.answer:
                    self.send(wire.Pong(number=message.number))
                if fits(message):
                    return message
        raise AssertionError(f"not within {limit:g} s: {what}")

    def status(
        self, fits: Callable[[wire.Status], bool] = lambda _: True, what: str = "a status", limit: float = LIMIT
    ) -> wire.Status:
        """The next status that fits."""
        return self.hear(lambda message: isinstance(message, wire.Status) and fits(message), what, limit)

    def rank(self, fits: Callable[[structs.RankStatus], bool], what: str, slot: int = 0) -> structs.RankStatus:
        """The next status of a rank that fits."""
        return self.status(lambda status: slot in status.ranks and fits(status.ranks[slot]), what).ranks[slot]

    def registration(self) -> wire.Register:
        """An agent's first message."""
        return self.hear(lambda message: isinstance(message, wire.Register), "the registration")

    def welcome(self, heartbeat_period: float = 0.5, **settings: float) -> wire.Status:
        """Take the agent in; returns its first status."""
        self.registration()
        self.send(wire.Welcome(heartbeat_period=heartbeat_period, controller="test", **settings))
        return self.status()

    def plan(self, plan: wire.Plan, slots: list[int]) -> None:
        """Send the agent with these slots its share."""
        self.send(shared_plans.share(plan, shared_plans.common(plan), slots))

    def send(self, message: wire.Message | bytes) -> None:
        """To the agent that spoke last."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        self._socket.send_multipart([self._route, data])

    def close(self) -> None:
        """Nothing is sent any more."""
        with contextlib.suppress(OSError):
            self._hellos.shutdown(socket.SHUT_RDWR)
        self._hellos.close()
        self.context.destroy(linger=0)
