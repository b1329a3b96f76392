"""The real controller and agents with their real `Participant`, over a network that loses, delays and is cut: what the
controller leaves out and what the agents agree on meet here. One rank an agent, and a simulated Slurm.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.support.world import FakeAgent, FakeSlurm, World
from unicron_ctl.shared.consensus.participant import Participant
from unicron_ctl.shared.protocol import peer_messages, shared_plans, structs, wire

TURN, HEARTBEAT = 0.05, 0.5
BREAKS = 0.3  # that a collective whose peers are gone breaks in one turn


class VotingAgent(FakeAgent):
    """An agent that decides with others when it does not hear the controller."""

    def __init__(self, group: PartitionedJob, element: int) -> None:
        self.group = group
        self.participant = Participant(
            structs.Peer(element, f"agent{element}", f"n{element + 1}:1", f"{element:040}"), 1
        )
        self.plan: wire.Plan | None = None  # that its rank is in
        self.told_at = 0.0
        super().__init__(group.world, "1", element, f"n{element + 1}", nodes=group.count, name=f"agent{element}")
        self.cut = True  # its door answers as long as it lives

    def register(self) -> None:
        if self.hears:
            more = {"peer": f"{self.node}:1", "key": f"{self.element:040}"}
            self.world.to_core(self, self.registration(**more))

    @property
    def hears(self) -> bool:
        return not self.killed and frozenset((self.node, "")) not in self.world.cuts

    @property
    def inside(self) -> bool:
        rank = self.ranks[self.element]
        return self.plan is not None and rank.state == "running" and rank.generation == self.plan.generation

    def status(self, leaving: str = "") -> None:
        now, store = self.world.now, f"127.0.0.1:{9000 + self.element}"
        self.participant.on_ranks(dict(self.ranks), store, now)
        self.participant.status_due, self.told_at = False, now
        self.number += 1
        told = wire.Status(
            job="1",
            element=self.element,
            agent=self.agent,
            sent=now,
            number=self.number,
            store=store,
            pinged=self.pinged,
            over=self.participant.over,
            answer=self.participant.on_status(now),
            agreed=self.participant.agreed,
            ranks=dict(self.ranks),
        )
        if self.hears:
            self.world.to_core(self, told)

    def get(self, message: wire.Message) -> None:
        if not self.hears or self.group.lost():
            return
        self.participant.on_controller(self.world.now)
        match message:
            case wire.Ping():
                self.participant.cede_votes(message.over)
            case wire.Break():
                self.participant.on_break(message)
            case wire.PlanShare():
                share = wire.decode(wire.encode(message), wire.ToAgent)
                assert isinstance(share, wire.PlanShare)
                if self.participant.on_plan(share) is None:
                    return
                self.follow(shared_plans.whole(share))
                return
        super().get(message)

    def follow(self, plan: wire.Plan) -> None:
        """Its rank enters the plan, if it may."""
        before = self.ranks[self.element].generation
        super().get(plan)
        if self.ranks[self.element].generation == plan.generation != before:
            self.plan = plan

    def turn(self) -> None:
        now = self.world.now
        if self.killed:
            return
        self.participant.tick(now)
        self.carry_out()
        if self.participant.status_due or self.participant.should_ask(now) or now - self.told_at >= HEARTBEAT:
            self.status()
            self.carry_out()

    def carry_out(self) -> None:
        outbox, self.participant.outbox = self.participant.outbox, []
        orders, self.participant.orders = self.participant.orders, []
        for peer, message in outbox:
            self.group.send(self, peer.element, peer_messages.decode(wire.encode(message)))
        for order in orders:
            if isinstance(order, wire.Plan):
                self.follow(order)
            else:
                super().get(order)

    def kill(self) -> None:
        """The agent ends with its rank; its node lives."""
        self.killed = self.silent = True
        self.cut, self.plan = False, None


class PartitionedJob:
    """`count` agents of one job that trains."""

    def __init__(self, count: int, random: Random, loss: float) -> None:
        self.count, self.random, self.loss = count, random, 0.0
        self.world = World(FakeSlurm(count))
        self.world.slurm.submit("1", count)
        self.queue: list[tuple[float, int, Any, int]] = []
        self.begun: set[str] = set()  # prefixes of the plans that all of their members were in at once
        self.agents = [VotingAgent(self, element) for element in range(count)]
        for agent in self.agents:
            agent.register()
            agent.ready()
        self.run(4.0)
        assert self.going() == [set(range(count))]
        self.loss = loss

    def lost(self) -> bool:
        return self.random.random() < self.loss

    def send(self, source: VotingAgent, target: int, message: Any) -> None:
        if not self.lost():
            self.queue.append((self.world.now + self.random.uniform(0.0, 0.2), source.element, message, target))

    def reach(self, one: VotingAgent, other: VotingAgent) -> bool:
        return not other.killed and frozenset((one.node, other.node)) not in self.world.cuts

    def cut(self, one: set[int], other: set[int]) -> None:
        """Element numbers; -1 is the controller."""
        self.world.cuts |= {self._link(a, b) for a in one for b in other if a != b}

    def mend(self, one: int, other: int) -> None:
        self.world.cuts.discard(self._link(one, other))

    def _link(self, one: int, other: int) -> frozenset[str]:
        return frozenset("" if element < 0 else self.agents[element].node for element in (one, other))

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TURN)):
            self.world.now += TURN
            self._slurm()
            due = [entry for entry in self.queue if entry[0] <= self.world.now]
            self.queue = [entry for entry in self.queue if entry[0] > self.world.now]
            for _, source, message, target in due:
                if self.reach(self.agents[source], self.agents[target]):
                    self.agents[target].participant.on_message(message, self.world.now)
                    self.agents[target].carry_out()
            for agent in self.agents:
                agent.turn()
            self._collectives()
            self.world.core.tick(self.world.now)
            self.world.deliver()
            self.check()

    def _slurm(self) -> None:
        """It hears the nodes that the controller hears; what it has ended there ends."""
        for agent in self.agents:
            states = self.world.slurm.node_states[agent.node]
            if frozenset((agent.node, "")) in self.world.cuts:
                states.add("NOT_RESPONDING")
                continue
            states.discard("NOT_RESPONDING")
            entry = self.world.slurm.queue.get(("1", agent.element), {})
            if not agent.killed and (entry.get("state") != "RUNNING" or entry.get("node") != agent.node):
                agent.kill()

    def _collectives(self) -> None:
        """A rank stops by itself when another one of its generation is gone that it reaches."""
        for agent in self.agents:
            if agent.killed or not agent.inside or agent.plan.prefix not in self.begun:
                continue
            others = (self.agents[slot] for slot in agent.plan.members if slot != agent.element)
            gone = (
                not other.inside or other.plan.prefix != agent.plan.prefix or not self.reach(agent, other)
                for other in others
            )
            if any(gone) and self.random.random() < BREAKS:
                agent.set(agent.element, state="stopped", broken=agent.plan.generation)

    def going(self) -> list[set[int]]:
        """Groups all of whose members run in them."""
        found: dict[str, set[int]] = {}
        wanted: dict[str, set[int]] = {}
        for agent in self.agents:
            if not agent.killed and agent.inside:
                found.setdefault(agent.plan.prefix, set()).add(agent.element)
                wanted[agent.plan.prefix] = set(agent.plan.members)
        whole = [prefix for prefix, slots in found.items() if slots == wanted[prefix]]
        self.begun.update(whole)
        return [found[prefix] for prefix in whole]

    def check(self) -> None:
        going = self.going()
        assert len(going) <= 1, f"two halves go on: {going}"
