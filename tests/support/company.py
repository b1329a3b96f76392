"""Agents of one job and their controller, each in the state that matters for agreement, over a network that loses,
delays and doubles: a simulation with a clock of its own. One rank an agent.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tests.support.clock import START
from unicron_ctl.shared.consensus import survivors_plan
from unicron_ctl.shared.consensus.participant import Participant
from unicron_ctl.shared.consensus.proposals import has_stopped, proposers_of
from unicron_ctl.shared.protocol import peer_messages, shared_plans, structs, wire

MICRO_BATCHES = 8
TURN, HEARTBEAT, LEASE = 0.05, 1.0, 3.0
CONTROLLER = -1


class Member:
    """A rank with its `Watch` and its `Session`, as far as generations go."""

    def __init__(self, company: Company, slot: int) -> None:
        self.company, self.slot = company, slot
        self.status = structs.RankStatus(state="waiting", micro_batches=MICRO_BATCHES, train_iterations=1000)
        self.active = self.broken = 0
        self.plan: wire.Plan | None = None  # that it is in, or enters
        self.next: wire.Plan | None = None  # that it has been sent and waits for

    @property
    def dead(self) -> bool:
        return self.status.state == "exited"

    def order(self, order: wire.Break | wire.Plan) -> None:
        if self.dead:
            return
        if isinstance(order, wire.Break):
            if order.generation > self.broken:
                self.broken = order.generation
                if self.next is not None and self.next.generation <= self.broken:
                    self.next = None
                self.company.later(self.company.random.uniform(0.0, 0.08), self.stop)
        elif order.generation > max(self.active, self.broken):
            if self.next is None or order.generation > self.next.generation:
                self.next = order
            self._go_on()

    def stop(self) -> None:
        """It has noticed that its generation is over."""
        if not self.dead and self.active <= self.broken and self.status.state in ("running", "entering", "stopped"):
            inside = self.status.state != "stopped"
            self._set(state="stopped", broken=self.broken, entering=0)
            if inside:
                self._hang_up()
            self._go_on()

    def give_up(self, prefix: str) -> None:
        """Its connections broke."""
        here = self.plan is not None and self.plan.prefix == prefix
        if here and not self.dead and self.status.state in ("running", "entering"):
            self.broken = max(self.broken, self.active)
            self.stop()

    def _go_on(self) -> None:
        plan = self.next
        if plan is None or self.status.state not in ("stopped", "waiting"):
            return
        self.next = None
        if self.slot not in plan.members:
            self._set(state="left", generation=plan.generation)
            return
        assert self.slot in plan.assignment or plan.source is not None, "a member has to know what to compute"
        self.active, self.plan = plan.generation, plan
        self._set(state="entering", entering=plan.generation)
        self.company.later(self.company.random.uniform(0.01, 0.1), lambda: self.company.let_in(plan.prefix))

    def run(self) -> None:
        assert self.plan is not None
        self._set(state="running", generation=self.plan.generation, entering=0)

    def die(self) -> None:
        if self.dead:
            return
        self._set(state="exited", exit=structs.Exit(code=-9, at=0.0, lived=1.0))
        self._hang_up()

    def _hang_up(self) -> None:
        """Its neighbours' connections break; all others hang."""
        if self.plan is not None:
            members, place = self.plan.members, self.plan.members.index(self.slot)
            for near in {members[place - 1], members[(place + 1) % len(members)]} - {self.slot}:
                self._break_with(self.company.members[near], self.plan.prefix)

    def _break_with(self, other: Member, prefix: str) -> None:
        if frozenset((self.slot, other.slot)) in self.company.cuts:
            self.company.later(0.5, lambda: self._break_with(other, prefix))
        elif other.plan is not None and other.plan.prefix == prefix:
            self.company.later(0.02, lambda: other.give_up(prefix))

    def _set(self, **changes: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)
        self.company.agents[self.slot].changed()
        self.company.check()


class Agent:
    """What `agent.py` does around an `Participant`."""

    def __init__(self, company: Company, element: int) -> None:
        self.company, self.element, self.alive = company, element, True
        self.peer = structs.Peer(element, f"agent{element}", f"n{element}:1", "key")
        self.participant = Participant(self.peer, 1)
        self.died_at = float("inf")
        self.pinged = 0
        self.last_status = 0.0

    @property
    def member(self) -> Member:
        return self.company.members[self.element]

    def changed(self) -> None:
        if self.alive:
            ranks = {self.element: self.member.status}
            self.participant.on_ranks(ranks, f"n{self.element}:4000", self.company.now)
            self.status()
            self._carry_out()

    def status(self) -> None:
        now = self.company.now
        self.last_status, self.participant.status_due = now, False
        answer = self.participant.on_status(now)
        told = wire.Status(
            job="7",
            element=self.element,
            agent=self.peer.agent,
            sent=now,
            store=f"n{self.element}:4000",
            pinged=self.pinged,
            answer=answer,
            agreed=self.participant.agreed,
            ranks={self.element: self.member.status},
        )
        self.company.send(self.element, CONTROLLER, told)

    def turn(self) -> None:
        if not self.alive:
            return
        now = self.company.now
        self.participant.tick(now)
        self._carry_out()
        if self.participant.status_due or self.participant.should_ask(now) or now - self.last_status >= HEARTBEAT:
            self.status()
        self.company.later(TURN, self.turn)

    def receive(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, peer_messages.PeerMessage):
            self.participant.on_message(message, self.company.now)
        else:
            self.participant.on_controller(self.company.now)
            match message:
                case wire.Ping():
                    self.pinged = max(self.pinged, message.number)
                    self.status()
                case wire.Break():
                    self.participant.on_break(message)
                    self.member.order(message)
                case wire.PlanShare():
                    plan = self.participant.on_plan(message)
                    if plan is not None:
                        self.member.order(plan)
        self._carry_out()
        if self.participant.status_due:
            self.status()

    def _carry_out(self) -> None:
        outbox, self.participant.outbox = self.participant.outbox, []
        orders, self.participant.orders = self.participant.orders, []
        for peer, message in outbox:
            assert peer.element != self.element
            self.company.send(self.element, peer.element, peer_messages.decode(wire.encode(message)))
        for order in orders:
            if isinstance(order, wire.Plan):
                assert self.participant.agreed is not None and self.participant.agreed.plan == order
                self.company.agreed.append(self.participant.agreed)
            self.company.halts += isinstance(order, wire.Break)
            self.member.order(order)


class Head:
    """A controller that never takes the living for dead, and decides on nothing that was said before it asked."""

    def __init__(self, company: Company) -> None:
        self.company, self.away, self.queue = company, "", []
        self.plan: wire.Plan | None = None
        self.breaking, self.broken, self.number = False, 0, 0
        self.statuses: dict[int, wire.Status] = {}
        self.plans = 0

    def receive(self, message: wire.Status) -> None:
        if self.away:
            self.queue.append(message)
            return
        self.statuses[message.element] = message
        if message.answer:
            self.company.send(CONTROLLER, message.element, wire.Pong())
        self.think()

    def leave(self, how: str) -> None:
        self.away = self.away or how

    def come_back(self) -> None:
        if self.away:
            queue, self.queue, how, self.away = self.queue, [], self.away, ""
            self.number += 1
            for element in self.company.agents:
                self.company.send(CONTROLLER, element, wire.Ping(number=self.number))
            for message in queue if how == "stopped" else ():
                self.receive(message)

    def turn(self) -> None:
        if not self.away:
            self._repeat()
        self.company.later(0.3, self.turn)

    def _adopt(self, told: list[wire.Status]) -> bool:
        """The plan that the agents agreed on; a number that one of them may have agreed to is used up."""
        assert self.plan is not None
        known = max(self.plan.generation, self.broken)
        found = [s.agreed for s in told if s.agreed is not None and s.agreed.generation > known]
        last = max(found, key=lambda agreed: (agreed.generation, agreed.chosen), default=None)
        if last is None:
            return False
        if last.chosen:
            shares = [agreed.plan for agreed in found if agreed.plan.prefix == last.plan.prefix]
            dealt = {slot: indices for share in shares for slot, indices in share.assignment.items()}
            self.plan = msgspec.structs.replace(last.plan, assignment=dealt)
            self.breaking = False
            self._repeat()
        else:
            self._break(last.generation)
        return True

    def _break(self, number: int) -> None:
        self.breaking, self.broken = True, max(self.broken, number)
        self.number += 1
        self._repeat()

    def think(self) -> None:
        if self.plan is None:
            return
        living = [e for e, agent in self.company.agents.items() if agent.alive]
        told = [s for e in living if (s := self.statuses.get(e)) is not None and s.pinged >= self.number]
        if len(told) == len(living) and self._adopt(told):
            return
        if not self.breaking:
            fresh = [s for s in self.statuses.values() if s.element in self.plan.members and s.pinged >= self.number]
            for status in fresh:
                rank = status.ranks[status.element]
                stopped = rank.state == "stopped" and rank.broken >= self.plan.generation
                if rank.end is not None or stopped or rank.state == "left":
                    self._break(max(self.plan.generation, self.broken))
                    return
            # One that died before it entered breaks nobody's connection: only its lease shows it.
            lost = [e for e in self.plan.members if self.company.now - self.company.agents[e].died_at > LEASE]
            if lost and len(told) == len(living):
                self._break(max(self.plan.generation, self.broken))
                return
        if not self.breaking or len(told) < len(living):
            return
        if any(not has_stopped(s.ranks[s.element], self.broken) for s in told):
            return
        ranks = {s.element: s.ranks[s.element] for s in told if s.element in self.plan.members}
        reports = {slot: status for slot, status in ranks.items() if status.state == "stopped"}
        decision = survivors_plan.decide(reports, MICRO_BATCHES) if reports else None
        if decision is not None:
            self.breaking = False
            self._publish(decision.members, decision.assignment, self.broken + 1)

    def form(self, members: list[int]) -> None:
        self._publish(members, survivors_plan.deal(range(MICRO_BATCHES), members), 1)

    def _publish(self, members: list[int], assignment: dict[int, list[int]], number: int) -> None:
        prefix = f"7.g{number}" + (f".c{self.plans}" if self.plans else "")
        self.plans += 1
        self.plan = wire.Plan(
            generation=number, members=members, store="n0:4000", prefix=prefix, assignment=assignment, iteration=0
        )
        self._repeat()

    def _repeat(self) -> None:
        plan = self.plan
        if plan is None:
            return
        everybody = {element: agent.peer for element, agent in self.company.agents.items()}
        proposers = proposers_of(plan, everybody.get, 1)
        for element, agent in self.company.agents.items():
            status = self.statuses.get(element)
            if status is None or status.pinged < self.number:
                self.company.send(CONTROLLER, element, wire.Ping(number=self.number))
            if self.breaking:
                self.company.send(CONTROLLER, element, wire.Break(generation=self.broken, lost=[], reason=""))
                continue
            rank = status.ranks[element] if status else None
            if rank is None or max(rank.generation, rank.entering) < plan.generation or status.agreed is not None:
                known = [everybody[e] for e in plan.members] if agent.peer in proposers else []
                share = shared_plans.share(plan, shared_plans.common(plan, proposers), [element], known)
                self.company.send(CONTROLLER, element, wire.decode(wire.encode(share), wire.ToAgent))


class Company:
    """`count` agents with a rank each, and their controller; the job trains when it is made."""

    def __init__(self, count: int, seed: random.Random | None = None, loss: float = 0.0, twice: float = 0.0) -> None:
        self.random, self.loss, self.twice = seed or random.Random(0), 0.0, 0.0
        self.now, self.delay = START, (0.001, 0.02)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.cuts: set[frozenset[int]] = set()
        self.lost: Callable[[int, int, Any], bool] = lambda source, target, message: False
        self.agreed: list[wire.Agreement] = []
        self.halts = 0
        self.complete: dict[int, set[str]] = {}  # generation -> prefixes whose members were all in it at once
        self.head = Head(self)
        self.agents: dict[int, Agent] = {}
        self.members = {slot: Member(self, slot) for slot in range(count)}
        self.agents = {element: Agent(self, element) for element in range(count)}
        self.head.form(list(range(count)))
        for agent in self.agents.values():
            agent.changed()
            agent.turn()
        self.head.turn()
        self.run(2.0)
        assert self.going() == [set(range(count))]
        self.loss, self.twice = loss, twice

    # ------------------------------------------------------------ time and the network
    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._count), what))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until

    def until(self, look: Callable[[], object], limit: float = 30.0) -> float:
        """How long it takes until `look` is true."""
        began = self.now
        while not look():
            assert self.now - began < limit, f"not within {limit:g} s: {self.states()}"
            self.run(0.01)
        return self.now - began

    def send(self, source: int, target: int, message: Any) -> None:
        if self.lost(source, target, message):
            return
        for _ in range(1 + (self.random.random() < self.twice)):
            if self.random.random() >= self.loss and frozenset((source, target)) not in self.cuts:
                self.later(self.random.uniform(*self.delay), lambda: self._arrive(target, message))

    def _arrive(self, target: int, message: Any) -> None:
        (self.head if target == CONTROLLER else self.agents[target]).receive(message)

    def cut(self, one: Iterable[int], other: Iterable[int]) -> None:
        self.cuts |= {frozenset(pair) for pair in itertools.product(one, other)}

    # ------------------------------------------------------------ faults
    def kill_agent(self, element: int) -> None:
        """It dies with its rank."""
        agent = self.agents[element]
        agent.alive, agent.died_at = False, min(agent.died_at, self.now)
        self.members[element].die()

    # ------------------------------------------------------------ what must hold
    def let_in(self, prefix: str) -> None:
        """Groups are there when all members enter the same ones."""
        inside = [m for m in self.members.values() if m.plan is not None and m.plan.prefix == prefix]
        wanted = {slot for member in inside for slot in member.plan.members}
        entering = {m.slot for m in inside if m.status.state == "entering" and m.active > m.broken}
        if wanted and wanted == entering:
            for member in inside:
                if member.slot in wanted:
                    member.run()

    def going(self) -> list[set[int]]:
        """Groups all of whose members run in them: they train."""
        found: dict[str, set[int]] = {}
        wanted: dict[str, set[int]] = {}
        for member in self.members.values():
            if member.plan is not None and member.status.state == "running":
                found.setdefault(member.plan.prefix, set()).add(member.slot)
                wanted[member.plan.prefix] = set(member.plan.members)
                self.complete.setdefault(member.plan.generation, set()).add(member.plan.prefix)
        return [slots for prefix, slots in found.items() if slots == wanted[prefix]]

    def check(self) -> None:
        """At every change: never two halves that both go on, never two plans of one number."""
        going = self.going()
        assert len(going) <= 1, f"two halves go on: {going}"
        for number, prefixes in self.complete.items():
            assert len(prefixes) == 1, f"two plans of generation {number}: {prefixes}"
        chosen: dict[int, set[str]] = {}
        follows: dict[int, set[str]] = {}
        for agreed in self.agreed:
            chosen.setdefault(agreed.generation, set()).add(agreed.plan.prefix)
            follows.setdefault(agreed.since, set()).add(agreed.plan.prefix)
        for what, found in (("for", chosen), ("after", follows)):
            for number, prefixes in found.items():
                assert len(prefixes) == 1, f"two plans were chosen {what} generation {number}: {prefixes}"

    def states(self) -> dict[int, str]:
        return {m.slot: f"{m.status.state} g{m.status.generation} b{m.status.broken}" for m in self.members.values()}
