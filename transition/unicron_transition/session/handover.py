"""Moves the training state into a generation, from the ranks that have it to those that lack it, the nearest source
first (docs/design/micro-batch-reuse.md)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from unicron_detector.processes.rank_messages import Plan
from unicron_transition.generations.layout import replica_of, replicas
from unicron_transition.iteration.exchange import Exchange
from unicron_transition.session.member import Member
from unicron_transition.snapshot import migrate
from unicron_transition.snapshot.local_state import LocalState

TRANSFER_SECONDS = 1.0  # between two messages while the training state is transferred


class Handover:
    """The handover of one rank; `local` is its state in memory."""

    def __init__(self, member: Member, state: migrate.TrainingState, exchange: Exchange, local: LocalState):
        self._member, self._state, self._exchange, self._local = member, state, exchange, local
        self._transferred = 0  # bytes of the present transfer
        self._published_at = 0.0

    def take_up(self, plan: Plan, newcomer: bool, iteration: int, own: int) -> int:
        """Take up the state of `plan`, whose groups are connected; collective over its members. Returns the iteration
        that this rank is at afterwards; it was at `iteration`. own: as for :meth:`LocalState.restore`. Raises
        RuntimeError if a peer is lost."""
        local = self._local
        if (restored := local.restore(plan, own)) is not None:
            iteration = restored
        local.enter_generation(plan, iteration)
        if plan.source is not None and plan.state is None:
            if not plan.boundary:
                self._tie_embeddings()
            if plan.joiners:
                iteration = self._migrate(plan, plan.source, newcomer, iteration)
        iteration = local.complete(plan, iteration)
        local.goes_on(iteration, plan.members[:1] == [self._member.slot])
        return iteration

    def _tie_embeddings(self) -> None:
        """Copy the first stage's embedding to the last stage, which was built alone and could not share it."""
        if self._exchange.tie_embeddings(self._state.model):
            self._state.optimizer.reload_model_params()

    def _skips(self, plan: Plan) -> Callable[[torch.Tensor], bool]:
        """Return a test for tensors that need no transfer: a newcomer makes them from the optimizer's shards."""
        if not (self._local.sharded and plan.boundary):
            return lambda tensor: False
        trained = {each.data_ptr() for each in self._state.trained_tensors()}
        return lambda tensor: tensor.data_ptr() in trained

    def _migrate(self, plan: Plan, sender: int, newcomer: bool, iteration: int) -> int:
        member, size = self._member, self._member.layout.size
        whole = replicas(plan.members, size)
        sends = sender in member.slots
        member.half_received = member.half_received or (newcomer and not sends)

        def note(*what: int) -> None:
            member.note = migrate.corrupt_transfer([slots[member.slot % size] for slots in whole], *what)
            member.publish("entering", entering=plan.generation, moved=self._transferred)

        def note_moved(count: int) -> None:
            self._transferred += count
            if (newcomer or sends) and time.monotonic() - self._published_at > TRANSFER_SECONDS:
                self._published_at = time.monotonic()
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
            note_moved,
            member.watch.lost,
            self._skips(plan),
        )
        member.half_received = False
        return iteration
