"""Ranks that train in a test's hands: what is in whose gradient, who has reduced, who has stepped. Messages of the
controller wait until they are processed, and every moment of an iteration is a step of its own, so that a test can let
anything happen in between.

A training state is the number of steps that it has behind it: as long as every iteration sums each micro-batch exactly
once there is only one state after so many steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.support.world import MICRO_BATCHES, FakeAgent, World
from unicron_ctl.shared.consensus.survivors_plan import deal
from unicron_ctl.shared.protocol import structs, wire
from unicron_transition.generations import layout

LATER = (wire.Break, wire.PlanShare, wire.Withdraw, wire.StartRank, wire.StopRank)


@dataclass
class Body:
    """What one process has. version: steps. gradient: micro-batches in it. reduced: how often each is in the sum of its
    place, once that is reduced. fresh: it has not agreed with its replica yet on what they keep. shards: of a
    distributed optimizer's states, by (version, base, count). sent: its own of the last one has a copy."""

    version: int
    gradient: list[int] = field(default_factory=list)
    reduced: Counter[int] | None = None
    assigned: list[int] = field(default_factory=list)
    plan: wire.Plan | None = None
    entering: wire.Plan | None = None
    offer: wire.Plan | None = None
    agreed: wire.Plan | None = None
    fresh: bool = False
    seen_lost: frozenset[int] = frozenset()
    shards: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)
    sent: bool = False
    begun: int = 0  # rounds of the schedule at hand, whose gradients cannot be taken apart


class Trainer(FakeAgent):
    """An agent whose ranks do one thing at a time."""

    def __init__(self, job: TrainingJob, element: int, node: str = "") -> None:
        self.job_of = job
        self.inbox: list[wire.Message] = []
        node = node or f"n{element + 1}"
        replica = {"replica": job.size, "lanes": job.lanes}
        super().__init__(job.world, "1", element, node, job.per_node, job.nodes, **replica)
        self.bodies = {slot: Body(0) for slot in self.slots}

    def set(self, slot: int, **changes: Any) -> None:
        """A rank at rest says which shards it holds."""
        if "state" in changes:
            rests = changes["state"] in ("stopped", "standby", "waiting")
            held = self.bodies[slot].shards if rests else {}
            changes["shards"] = [structs.Shards(base, v, n, sorted(held[v, base, n])) for v, base, n in sorted(held)]
        super().set(slot, **changes)

    def get(self, message: wire.Message) -> None:
        if isinstance(message, LATER):
            self.inbox.append(message)
        else:
            super().get(message)

    def process(self) -> None:
        """The next message of the controller reaches the ranks."""
        message = self.inbox.pop(0)
        if isinstance(message, wire.Withdraw):
            for body in self.bodies.values():
                if body.offer is not None and body.offer.generation <= message.generation:
                    body.offer = None
        if isinstance(message, wire.StartRank):
            before = self.ranks[message.slot].incarnation
            super().get(message)
            if self.ranks[message.slot].incarnation != before:
                self.bodies[message.slot] = self._body(message.slot, 0)
        else:
            super().get(message)
            for slot in self.slots:
                self.settle(slot)

    def _body(self, slot: int, version: int) -> Body:
        """Of the slot's next process: its node's memory has the shards of the one before, or has none."""
        return Body(version, shards=self.bodies[slot].shards if self.job_of.remembers else {})

    # ------------------------------------------------------------ messages
    def _break(self, slot: int, message: wire.Break) -> None:
        rank, body, broken = self.ranks[slot], self.bodies[slot], message.generation
        body.offer = body.offer if body.offer is not None and body.offer.generation > broken else None
        if rank.state == "running" and rank.generation <= broken:
            body.seen_lost |= frozenset(message.lost)
            self.set(slot, broken=max(rank.broken, broken))
        else:
            super()._break(slot, message)
            body.entering = None if self.ranks[slot].state != "entering" else body.entering

    def _plan(self, slot: int, plan: wire.Plan) -> None:
        rank, body = self.ranks[slot], self.bodies[slot]
        if plan.generation <= max(rank.generation, rank.broken) or rank.state in ("exited", "starting"):
            return
        if plan.boundary and rank.state == "running":
            body.offer = plan
        elif slot not in plan.members:
            if rank.state in ("stopped", "running"):
                self._leave(slot, plan)
        elif rank.state in ("waiting", "standby", "stopped"):
            if plan.boundary or rank.state != "stopped":
                self.rested[slot] = rank.state
            self.enter(slot, plan)

    def enter(self, slot: int, plan: wire.Plan) -> None:
        self.bodies[slot].entering = plan
        self.set(slot, state="entering", entering=plan.generation)

    # ------------------------------------------------------------ one rank's next step
    def settle(self, slot: int) -> None:
        """A rank whose generation is over stops once nothing keeps it."""
        rank, body = self.ranks[slot], self.bodies[slot]
        if rank.state == "running" and rank.broken >= rank.generation:
            mates = self.mates(slot)
            hit = not body.seen_lost.isdisjoint(mates)  # of a mate's end, or stop, nothing but the Break tells
            if hit or rank.phase != "computing" or self.complete(slot):
                if body.begun:
                    body.gradient, body.begun = [], 0
                self.set(slot, state="stopped", done=list(body.gradient))

    def complete(self, slot: int) -> bool:
        body = self.bodies[slot]
        return not body.fresh and set(body.gradient) == set(body.assigned)

    def mates(self, slot: int) -> list[int]:
        plan = self.bodies[slot].plan
        if plan is None or slot not in plan.members:
            return [slot]
        return next(one for one in layout.replicas(plan.members, plan.replica) if slot in one)

    def move(self, slot: int) -> bool:
        """The rank does the next thing that it can; False when there is none."""
        rank = self.ranks[slot]
        if self.silent:
            return False
        match rank.state:
            case "starting":
                self.bodies[slot] = self._body(slot, self.job_of.checkpoint)
                self.set(slot, state="waiting", iteration=self.job_of.checkpoint)
                return True
            case "entering":
                return self._come_in(slot)
            case "running":
                return self._train(slot)
        return False

    def _come_in(self, slot: int) -> bool:
        body, job = self.bodies[slot], self.job_of
        plan = body.entering
        assert plan is not None
        everybody = [job.rank(member) for member in plan.members]
        if any(one is None or plan.generation not in (one.generation, one.entering) for one in everybody):
            return False
        if slot in plan.joiners and plan.source is not None and plan.state is None:
            source = next(one for one in layout.replicas(plan.members, plan.replica) if plan.source in one)
            giver = source[slot % plan.replica]
            assert giver % plan.replica == slot % plan.replica and giver not in plan.joiners
            was = job.body(giver)
            body.version, body.gradient, body.reduced = was.version, [], None
        before, body.plan, body.entering = self.mates(slot), plan, None
        rank = self.ranks[slot]
        if plan.state is not None:
            self._check_state(plan)
            body.version = plan.state[1]
        if plan.step is not None and rank.iteration == plan.step and rank.phase == "synced" and body.reduced:
            self.step(slot)
        kept = rank.iteration == body.version and rank.phase != "stepped" and self.mates(slot) == before
        body.gradient = body.gradient if kept and slot not in plan.joiners else []
        body.reduced, body.fresh, body.seen_lost, body.agreed = None, True, frozenset(), None
        body.begun = 0
        heads = layout.heads(plan.members, plan.replica)
        head = layout.heads_of(plan.members, plan.replica)[slot]
        if job.sharded:
            mine = body.version, plan.generation, len(heads)
            body.shards.setdefault(mine, set()).add(heads.index(head))
            body.sent = False
        wanted = plan.assignment if not plan.boundary else deal(range(MICRO_BATCHES), heads, job.lanes)
        body.assigned = list(wanted[head])
        assert plan.iteration is None or plan.iteration == body.version, (slot, plan, body)
        self.rested.pop(slot, None)
        self.set(
            slot,
            state="running",
            generation=plan.generation,
            entering=0,
            iteration=body.version,
            phase="computing",
            done=list(body.gradient),
        )
        return True

    def _check_state(self, plan: wire.Plan) -> None:
        """All shards of the state are held by members that have not died."""
        assert plan.state is not None
        base, version = plan.state
        for place in range(plan.replica):
            held: dict[int, set[int]] = {}
            for member in plan.members[place :: plan.replica]:
                for (v, b, count), shards in self.job_of.body(member).shards.items():
                    if (v, b) == (version, base):
                        held.setdefault(count, set()).update(shards)
            assert any(found == set(range(count)) for count, found in held.items()), (plan, place, held)

    def step(self, slot: int) -> None:  # type: ignore[override]
        """The parameters change."""
        body = self.bodies[slot]
        assert body.reduced == Counter(range(MICRO_BATCHES)), f"slot {slot} steps with {body.reduced}"
        body.version += 1
        body.gradient, body.reduced = [], None

    def _train(self, slot: int) -> bool:
        rank, body, job = self.ranks[slot], self.bodies[slot], self.job_of
        plan = body.plan
        assert plan is not None and body.version == rank.iteration + (rank.phase == "stepped")
        if rank.broken >= rank.generation:
            self.settle(slot)
            if self.ranks[slot].state == "stopped":
                return True
        if rank.phase == "computing" and not self.complete(slot):
            return self._compute(slot)
        inside = [job.inside(member, plan.generation, rank.iteration) for member in plan.members]
        if rank.phase == "computing":
            self.set(slot, phase="reducing", done=list(body.gradient))
            return True
        if rank.phase == "reducing":
            beside = [m for m in plan.members if m % plan.replica == slot % plan.replica]
            ready = [job.inside(member, plan.generation, rank.iteration) for member in beside]
            if not all(ready) or any(one.phase == "computing" for one in ready if one):
                return False
            body.reduced = sum((Counter(job.body(member).gradient) for member in beside), Counter())
            assert body.reduced == Counter(range(MICRO_BATCHES)), f"slot {slot} has reduced {body.reduced}"
            self.set(slot, phase="synced")
            return True
        if rank.phase == "synced":
            moment = plan.generation, rank.iteration
            if moment not in job.committed:
                if any(one is None or one.phase != "synced" for one in inside):
                    return False
                job.committed.add(moment)  # the commit carries the offer
                held = {job.body(m).offer.generation if job.body(m).offer else 0 for m in plan.members}
                for member in plan.members:
                    job.body(member).agreed = body.offer if held != {0} and len(held) == 1 else None
            self.step(slot)
            if job.sharded:
                count, index = self._own(slot)
                body.shards.setdefault((body.version, plan.generation, count), set()).add(index)
                body.sent = False
            self.set(slot, phase="stepped", done=[])
            job.steps += 1
            return True
        if job.sharded and (plan.generation, rank.iteration) not in job.acknowledged:
            return self._copy(slot, plan, rank, body)
        if body.agreed is not None:
            agreed, body.agreed, body.offer = body.agreed, None, None
            if slot in agreed.members:
                self.enter(slot, agreed)
            else:
                self._leave(slot, agreed)
            return True
        heads = layout.heads(plan.members, plan.replica)
        dealt = deal(range(MICRO_BATCHES), heads, job.lanes)
        body.assigned = dealt[layout.heads_of(plan.members, plan.replica)[slot]]
        self.set(slot, phase="computing", iteration=rank.iteration + 1, done=[])
        return True

    def _own(self, slot: int) -> tuple[int, int]:
        """(how many ways the state is sharded, which shard is the rank's own)."""
        plan = self.bodies[slot].plan
        assert plan is not None
        heads = layout.heads(plan.members, plan.replica)
        return len(heads), heads.index(layout.heads_of(plan.members, plan.replica)[slot])

    def _copy(self, slot: int, plan: wire.Plan, rank: structs.RankStatus, body: Body) -> bool:
        """The rank's shard goes to the next replica's rank of its place; then all acknowledge that."""
        job, (count, index) = self.job_of, self._own(slot)
        inside = [job.inside(member, plan.generation, rank.iteration) for member in plan.members]
        if any(one is None or one.phase != "stepped" for one in inside):
            return False
        if not body.sent:
            partner = plan.members[(index + 1) % count * plan.replica + slot % plan.replica]
            key = body.version, plan.generation, count
            job.body(partner).shards.setdefault(key, set()).add(index)
            body.sent = True
            return True
        if not all(job.body(member).sent for member in plan.members):
            return False
        job.acknowledged.add((plan.generation, rank.iteration))
        for member in plan.members:
            kept = job.body(member).shards
            for old in [key for key in kept if key[0] < body.version - 1]:
                del kept[old]
        return True

    def _compute(self, slot: int) -> bool:
        """The schedule of the replica: nobody gets through it without the others."""
        rank, body, job = self.ranks[slot], self.bodies[slot], self.job_of
        mates = self.mates(slot)
        here = [job.rank(mate) for mate in mates]
        if any(one is None or one.generation != rank.generation or one.iteration < rank.iteration for one in here):
            return False
        if any(one.state not in ("running", "stopped") for one in here if one):
            return False
        if body.fresh:
            found = [job.body(mate) for mate in mates]
            if any(one.state != "running" for one in here if one):
                return False
            if any(sorted(one.gradient) != sorted(body.gradient) for one in found if one.fresh) or not set(
                body.gradient
            ) <= set(body.assigned):
                for one in found:
                    one.gradient = []
            for one in found:
                one.fresh = False
            return True
        if any(not job.passes(mate, slot) for mate in mates):
            return False
        if job.size == job.lanes:
            if any(len(job.body(mate).gradient) < len(body.gradient) for mate in mates):
                return False  # a round ends when all have computed it
            body.gradient += [index for index in body.assigned if index not in body.gradient][: job.lanes]
        else:
            body.begun += 1
            if body.begun * job.lanes < len(set(body.assigned) - set(body.gradient)):
                return True
            body.gradient, body.begun = list(body.assigned), 0
        self.set(slot, done=list(body.gradient))
        self.settle(slot)
        return True


class TrainingJob:
    """A job of `nodes` elements with `per_node` ranks, `size` ranks a replica. remembers: shards outlive ranks. lanes:
    micro-batches that a replica computes at the same time."""

    def __init__(
        self, size: int, per_node: int, nodes: int, started: int, sharded: bool, remembers: bool, lanes: int = 1
    ) -> None:
        self.sharded, self.remembers = sharded, remembers
        self.acknowledged: set[tuple[int, int]] = set()  # (generation, iteration) whose state has copies
        self.size, self.per_node, self.nodes, self.checkpoint, self.lanes = size, per_node, nodes, 0, lanes
        self.world = World(forming_settle_seconds=0.5, offer_delay=0.1, repeat_seconds=0.2, fault_grace=0.2)
        self.trainers: dict[int, Trainer] = {}
        self.killed: set[int] = set()
        self.committed: set[tuple[int, int]] = set()  # (generation, iteration)
        self.steps = self.moved = 0
        for element in range(started):
            self.add(element)

    def add(self, element: int) -> None:
        trainer = self.trainers[element] = Trainer(self, element)
        trainer.register()

    @property
    def slots(self) -> list[int]:
        return [slot for trainer in self.trainers.values() for slot in trainer.slots]

    def trainer(self, slot: int) -> Trainer:
        return self.trainers[slot // self.per_node]

    def rank(self, slot: int) -> structs.RankStatus | None:
        """The rank, while its process lives."""
        trainer = self.trainers.get(slot // self.per_node)
        if trainer is None or trainer.silent:
            return None
        rank = trainer.ranks[slot]
        return rank if rank.state not in ("exited", "starting") else None

    def body(self, slot: int) -> Body:
        return self.trainer(slot).bodies[slot]

    def inside(self, slot: int, generation: int, iteration: int) -> structs.RankStatus | None:
        """The rank, while it is in the collectives of that iteration."""
        rank = self.rank(slot)
        if rank is None or rank.generation != generation or rank.state != "running" or rank.iteration < iteration:
            return None
        if rank.iteration > iteration:
            return structs.RankStatus(state="running", phase="stepped")
        return rank

    def passes(self, mate: int, slot: int) -> bool:
        """The mate takes, or has taken, its part in the schedule."""
        mine, rank = self.rank(slot), self.rank(mate)
        if rank is None or mine is None or rank.generation != mine.generation:
            return rank is not None and mine is not None and rank.entering == mine.generation
        return rank.state == "running" or (rank.state == "stopped" and self.trainer(mate).complete(mate))

    def kill(self, slot: int) -> None:
        self.killed.add(slot)
        self.trainer(slot).die(slot)

    def lose(self, element: int) -> None:
        """The node dies, and with it all that the agent has not said."""
        trainer = self.trainers[element]
        self.killed.update(trainer.slots)
        trainer.silent = True
        self.world.dead_nodes.add(trainer.node)

    def replace(self, element: int) -> None:
        """The element starts on another node."""
        self.moved += 1
        trainer = self.trainers[element] = Trainer(self, element, f"m{self.moved}")
        trainer.register()

    @property
    def lost_elements(self) -> list[int]:
        return [element for element, trainer in self.trainers.items() if trainer.silent]

    def processing(self) -> list[Trainer]:
        return [trainer for trainer in self.trainers.values() if trainer.inbox and not trainer.silent]
