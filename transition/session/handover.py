"""The training state on its way into a generation: from the ranks that have it to those that lack it, the nearest
source first (docs/design/micro-batch-reuse.md)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from unicron.detector.processes.rank_messages import Plan
from unicron.transition.generations.layout import replica_of, replicas
from unicron.transition.iteration.exchange import Exchange
from unicron.transition.session.member import Member
from unicron.transition.sharded.safekeeping import Safekeeping
from unicron.transition.snapshot import migrate
from unicron.transition.snapshot.checkpoint import Checkpoints

TRANSFER_SECONDS = 1.0  # between two messages while the training state is transferred


class Handover:
    """Of one rank. kept: of a distributed optimizer, whose state is not in `state`. checkpoints: from where the job
    goes on if it is beyond iteration `start`, at which the script begins. unread: this rank has not taken up the
    checkpoint of its iteration, because memory holds a state that is as new."""

    def __init__(
        self,
        member: Member,
        state: migrate.TrainingState,
        exchange: Exchange,
        kept: Safekeeping | None,
        checkpoints: Checkpoints | None,
        start: int,
        unread: bool = False,
    ):
        self._member, self._state, self._exchange, self._kept = member, state, exchange, kept
        self._checkpoints, self._start, self._unread = checkpoints, start, unread
        self._trained = False  # this rank has been in a generation
        self._transferred = 0  # bytes of the transfer at hand
        self._told = 0.0

    def take(self, plan: Plan, newcomer: bool, iteration: int) -> int:
        """Collective over the members of `plan`, whose groups are there: returns the iteration that this rank is at
        with what it has now. iteration: with what it had. Raises RuntimeError when a peer is lost."""
        kept, size = self._kept, self._member.layout.size
        before = kept.newest if kept is not None else (0, -1)
        if kept is not None:
            kept.enter(plan.generation, plan.members, self._member.slot, size)
        if kept is not None and plan.boundary:  # first of all: a gather that is overlapped is not over at a boundary
            kept.adopt(*self._exchange.furthest(before))
        if self._unread and plan.state is None and self._member.slot not in plan.joiners:
            assert self._checkpoints is not None
            self._checkpoints.load(self._state, iteration)  # memory came to nothing, and others get it from here
        if plan.source is not None and plan.state is None:
            if not plan.boundary:
                self._tie_embeddings()
            if plan.joiners:
                iteration = self._migrate(plan, plan.source, newcomer, iteration)
        if kept is not None and not plan.boundary:
            iteration = self._take_shards(kept, plan, iteration, before[1])
        self._unread, self._trained = False, True
        return iteration

    def _take_shards(self, kept: Safekeeping, plan: Plan, iteration: int, before: int) -> int:
        """The optimizer's state in the new layout: what a plan names, or, where nobody has trained, what goes with the
        parameters. before: the version that this rank had."""
        if plan.state is not None:
            kept.adopt(*plan.state, lacking=not self._trained or plan.state[1] < before)
            return plan.state[1]
        if self._checkpoints is not None and iteration > self._start:
            self._checkpoints.load(self._state, iteration)  # this rank's shard is another one by now
        else:
            self._state.optimizer.reload_model_params()
        kept.keep(iteration)
        return iteration

    def _tie_embeddings(self) -> None:
        """The last stage's copy of the embedding is the first one's, which was not there when it was built."""
        if self._exchange.tie_embeddings(self._state.model):
            self._state.optimizer.reload_model_params()

    def _gathered(self, plan: Plan) -> Callable[[torch.Tensor], bool]:
        """What a newcomer has made of the optimizer's shards by now: the model, but for what is not trained."""
        if self._kept is None or not plan.boundary:
            return lambda tensor: False
        trained = {each.data_ptr() for each in self._state.trained()}
        return lambda tensor: tensor.data_ptr() in trained

    def _migrate(self, plan: Plan, sender: int, newcomer: bool, iteration: int) -> int:
        member, size = self._member, self._member.layout.size
        whole = replicas(plan.members, size)
        sends = sender in member.slots
        member.half_received = member.half_received or (newcomer and not sends)

        def note(*what: int) -> None:
            member.note = migrate.note([slots[member.slot % size] for slots in whole], *what)
            member.publish("entering", entering=plan.generation, moved=self._transferred)

        def moved(count: int) -> None:
            self._transferred += count
            if (newcomer or sends) and time.monotonic() - self._told > TRANSFER_SECONDS:
                self._told = time.monotonic()
                member.publish("entering", entering=plan.generation, moved=self._transferred)

        self._transferred = 0
        iteration = migrate.transfer(
            self._state,
            iteration,
            replica_of(plan.members, size, sender),
            newcomer,
            member.process.device,
            [number for number, slots in enumerate(whole) if not set(slots) & set(plan.joiners)],
            self._exchange.data_parallel,
            note,
            moved,
            member.watch.lost,
            self._gathered(plan),
        )
        member.half_received = False
        return iteration
