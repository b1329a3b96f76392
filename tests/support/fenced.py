"""Plain worlds in simulated time, with the real controller and the real lease, under random faults.

Each agent has a clock of its own, a lease and a door for its world; its process and its ranks may be paused, messages
and packets are lost. The kernel's part is played as the kernel plays it: it kills when the lease is over, whoever is
paused. All ranks write all the time, and `Worlds.written` notes what an earlier world writes after a later one.
"""

from __future__ import annotations

import random
from typing import Any

from tests.support.plain_agent import PlainAgent
from tests.support.world import FakeAgent, World
from unicron_ctl.shared.consensus.restart_lease import DRIFT, FENCE_SECONDS, Lease
from unicron_ctl.shared.protocol import shared_plans, wire
from unicron_ctl.shared.protocol.reach import Reach

STEP = 0.1
EARLY, KILL = 0.3, 0.5  # an agent ends its ranks before the lease is over; the most that the kernel takes for it


class Worlds(World):
    """A controller, and a job of so many nodes in restart mode."""

    def __init__(self, nodes: int, seed: int, **settings: Any) -> None:
        super().__init__(forming_settle_seconds=0.5, join_after_seconds=0.2, mtbf_node_hours=1e6, **settings)
        self.chance = random.Random(seed)
        self.newest = 0
        self.written: list[str] = []
        """Lines that an earlier world wrote after a later one."""
        self.worlds: set[int] = set()
        self.lost: dict[str, float] = {}  # node ("" is the head) -> the share of its packets that are lost
        self.deaf: set[tuple[str, str]] = set()
        """(from, to): hosts between which nothing gets through in this direction."""
        self.paused = False
        self.hosts = [FencedAgent(self, element) for element in range(nodes)]
        with self.at_once():
            for agent in self.agents:
                agent.register()
                agent.status()

    def passes(self, one: str, other: str) -> bool:
        """Whether a message gets from one host to another now."""
        loss = max(self.lost.get(one, 0.0), self.lost.get(other, 0.0))
        cut = frozenset((one, other)) in self.cuts or (one, other) in self.deaf
        return not cut and self.chance.random() >= loss

    def answer(self, witness: str, target: str) -> Reach:
        """Seven connections are tried, and one is enough."""
        if not target:
            return Reach.UNKNOWN
        node, _, port = target.partition(":")
        if (node, witness) in self.deaf or not any(self.passes(witness, node) for _ in range(7)):
            return Reach.SILENT
        agents = [agent for agent in self.agents if agent.node == node]
        open_ = port == "slurmd" or any(port in (agent.agent, str(agent.opened)) for agent in agents)
        return Reach.REACHED if open_ else Reach.REFUSED

    def begin_again(self) -> None:
        """Another controller starts from the log."""
        self.restart()

    def go_on(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for agent in self.hosts:
                agent.turn()
            if not self.paused:
                self.core.tick(self.now)
                self.deliver()

    def note_write(self, agent: FencedAgent, generation: int) -> None:
        """A rank writes."""
        if generation < self.newest:
            self.written.append(f"{self.now:.1f}: {agent.node} of {generation} after {self.newest}")
        self.newest = max(self.newest, generation)
        self.worlds.add(generation)


class FencedAgent(PlainAgent):
    """An agent in restart mode, with one rank."""

    lease = FENCE_SECONDS
    world: Worlds

    def __init__(self, world: Worlds, element: int) -> None:
        super().__init__(world, "1", element, f"n{element + 1}", nodes=16, min_nodes=1)
        self.rate = world.chance.uniform(1.0 - DRIFT / 2, 1.0 + DRIFT / 2)
        self.held_lease = Lease()
        self.opened = 10_000 + element
        self.doors: list[str] = []
        self.inside = 0  # the world for which its door is open, or will be
        self.coming: tuple[wire.Plan, float] | None = None  # the next world, and when it begins at the latest
        self.process = 0  # the generation of the rank's process; 0 without one
        self.kill_at = self.end_at = float("inf")
        self.stopped = self.frozen = False  # the agent, the rank
        self.inbox: list[wire.Message] = []
        self.due = 0.0
        self.confirmed = 0  # the controller knows that it begins this world
        self.questions: dict[int, tuple[float, int]] = {}
        """Number of a status -> when it was sent, and the world that it said it begins."""
        self.fenced = False

    @property
    def clock(self) -> float:
        return self.world.now * self.rate

    # ------------------------------------------------------------ messages
    def status(self, leaving: str = "") -> None:
        world = self.world
        if self.stopped or world.paused or not world.passes(self.node, ""):
            return
        super().status(leaving)

    def whole(self, leaving: str = "") -> wire.Status:
        """All that it has to say now; it asks for an answer each time."""
        status = super().whole(leaving)
        status.answer = True
        sent = self.clock - self.world.chance.uniform(0.0, 0.4) * self.rate
        self.questions[status.number] = sent, status.begins
        return status

    def _on_answer(self, number: int) -> None:
        sent, begins = self.questions.pop(number, (float("-inf"), 0))
        self.held_lease.on_controller(sent)
        if begins and begins == self.begins:
            self.confirmed = begins

    def get(self, message: wire.Message) -> None:
        """What is on its way for long comes in the end, or never."""
        world = self.world
        if self.inbox or self.stopped or not world.passes("", self.node):
            if world.chance.random() < 0.7:
                self.inbox.append(message)
            return
        self._take(message)

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.PlanShare):
            self.doors = message.doors
            message = shared_plans.whole(message)
        if isinstance(message, wire.Refusal) and "register" in message.reason:
            self.register()
        elif isinstance(message, wire.Plan):
            self._on_plan(message)
        elif isinstance(message, wire.Break):
            self._on_break(message)
        elif isinstance(message, wire.Pong):
            self._on_answer(message.number)
        elif isinstance(message, wire.StopRank):
            self.kill_at = min(self.kill_at, self.world.now + self.world.chance.uniform(0.0, KILL))
        elif isinstance(message, wire.StartRank) and self.process:
            pass  # as agents do while a process lives; the order is repeated
        else:
            FakeAgent.get(self, message) if not isinstance(message, wire.StartRank) else super().get(message)

    def _on_plan(self, plan: wire.Plan) -> None:
        (slot,) = self.slots
        rank = self.ranks[slot]
        if rank.state == "waiting" and slot in plan.members and rank.broken < plan.generation and not self.process:
            if self.coming is None or self.coming[0].generation < plan.generation:
                self.coming, self.inside = (plan, self.world.now + 1.0), plan.generation
                self.held_lease.start_world(len(self.doors))
                self.begins = self.confirmed = 0

    def _on_break(self, order: wire.Break) -> None:
        (slot,) = self.slots
        if self.coming is not None and self.coming[0].generation <= order.generation:
            self.coming, self.begins = None, 0
        if self.process > order.generation:
            return
        if self.left < order.generation and self.inside <= order.generation:
            self.opened, self.inside, self.left = self.opened + 1000, 0, order.generation
        if self.process:
            self.end_at = min(self.end_at, self.world.now + self.world.chance.uniform(0.0, 2.0))
            self.broken = order.generation
        elif self.ranks[slot].broken < order.generation and self.ranks[slot].state != "exited":
            self.set(slot, state="waiting", broken=order.generation, generation=0)

    # ------------------------------------------------------------ time
    def turn(self) -> None:
        """Pass one step of time."""
        world = self.world
        if self.process and not self.frozen:
            world.note_write(self, self.process)
        if self.process and self.clock >= self.held_lease.expires_at:
            self.kill_at = min(self.kill_at, world.now + world.chance.uniform(0.0, KILL))
        if self.process and world.now >= self.kill_at:
            self._ends("exited")
        if self.stopped:
            return
        if self.inbox and world.passes("", self.node):
            messages, self.inbox = self.inbox, []
            for message in messages:
                self._take(message)
        self._try_doors()
        if self.process and world.now >= self.end_at:
            self._ends("waiting")
        elif self.process and self.clock >= self.held_lease.expires_at - EARLY:
            self._ends("exited")
        self._begin()
        if self.coming is None:
            self.fenced = self.held_lease.armed
        if world.now >= self.due:
            self.due = world.now + world.chance.uniform(0.5, 1.0)
            self.status()

    def _try_doors(self) -> None:
        late = self.clock - (self.held_lease.expires_at - FENCE_SECONDS) >= 1.5
        if self.doors and (late or not self.held_lease.armed) and self.world.chance.random() < 0.2:
            found = sum(self.world.answer(self.node, door) is Reach.REACHED for door in self.doors)
            self.held_lease.on_doors(found, self.clock)

    def _begin(self) -> None:
        if self.coming is None or self.clock >= self.held_lease.renewed_until - EARLY:
            return
        plan, latest = self.coming
        if not self.held_lease.armed and self.world.now < latest:
            return
        if self.begins != plan.generation or self.fenced != self.held_lease.armed:
            self.begins, self.fenced = plan.generation, self.held_lease.armed
            self.status()
        if self.confirmed != plan.generation:
            return
        (slot,) = self.slots
        self.coming, self.process, self.begins = None, plan.generation, 0
        self.kill_at = self.end_at = float("inf")
        self.set(slot, state="running", generation=plan.generation)

    def _ends(self, state: str) -> None:
        (slot,) = self.slots
        self.process, self.kill_at, self.end_at = 0, float("inf"), float("inf")
        self.frozen = False
        if state == "waiting":
            self.set(slot, state="waiting", broken=self.broken, generation=0)
        else:
            self.die(slot, code=-9)
