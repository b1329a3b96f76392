"""The training loop that survives: one object between a Megatron training script and the generation protocol
(docs/design/generations.md).

A rank prepares itself in a world of its own (model, optimizer, data), then enters generations. When a member is lost
every survivor stops between two micro-batches or in its reduce, reports, and goes on with the same iteration under the
controller's plan. Newcomers and leavers change the membership at an iteration boundary, which all members reach in the
same iteration because the commit all-reduce carries the offer that each holds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from transition import groups, migrate, process
from transition.checkpoint import CheckpointError, Checkpoints
from transition.gradients import Gradients, PeerLost
from transition.ledger import Ledger, LedgerError, deal
from transition.watch import Plan, PlanTimeout

# Seconds a stopped rank waits for a plan (UNICRON_PLAN_TIMEOUT); the controller may be down for a while.
PLAN_TIMEOUT = 900.0
PROGRESS_SECONDS = 0.2  # at most one progress message per this time
TRANSFER_SECONDS = 1.0  # the same while the training state is transferred
FATAL = (  # never answered by another try
    migrate.StateMismatch,
    migrate.CorruptTransfer,
    groups.UnsupportedLayout,
    PlanTimeout,
    LedgerError,
    CheckpointError,
)
# How often an iteration may fail in this rank without any Break before the error is taken as the script's own.
SELF_STOPS = 3


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `loss` is the mean over all micro-batches of the iteration, the same number on every rank."""

    iteration: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    seconds: float
    generation: int
    world_size: int


class _Rejoined(Exception):
    """This rank had been left out and came back as a newcomer: the iteration that it was in is not its own any more."""


class Session:
    """Iterate over it: one :class:`StepResult` for each optimizer step.

    model: list of DDP chunks (one, in a data-parallel job). micro_batches: per iteration, over all ranks. forward_step,
    fetch: see :class:`transition.gradients.Gradients`. checkpoints: where to go on from, and where the first member
    saves. Raises :class:`transition.groups.UnsupportedLayout` for a layout that it cannot heal, and
    :class:`transition.checkpoint.CheckpointError` when there are checkpoints and none can be used.
    """

    def __init__(
        self,
        *,
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        micro_batches: int,
        forward_step: Callable[..., Any],
        fetch: Callable[[int, int], Any],
        seq_length: int,
        micro_batch_size: int,
        train_iterations: int,
        start_iteration: int = 0,
        checkpoints: Checkpoints | None = None,
    ):
        self._process = process.current()
        if micro_batches < 1 or train_iterations < start_iteration:
            raise ValueError(
                f"micro_batches {micro_batches} and train_iterations {train_iterations} must be at least 1 and "
                f"{start_iteration}"
            )
        groups.check_layout()
        self._watch, self._channel, self.slot = self._process.watch, self._process.channel, self._process.slot
        self._model, self._optimizer, self._scheduler = list(model), optimizer, scheduler
        self.micro_batches, self.train_iterations, self.iteration = micro_batches, train_iterations, start_iteration
        self._state = migrate.TrainingState(model, optimizer, scheduler)
        self._gradients = Gradients(
            model,
            forward_step,
            fetch,
            micro_batches,
            {"seq_length": seq_length, "micro_batch_size": micro_batch_size},
            self._watch.lost,
            self._progress,
        )
        parameters = sum(parameter.numel() for chunk in model for parameter in chunk.module.parameters())
        self._samples = micro_batches * micro_batch_size
        self._flops = (
            6.0 * parameters * self._samples * seq_length
        )  # 6 N per token: forward 2, backward 4 (Kaplan et al. 2020, section 2.1)
        self._members: list[int] = list(range(dist.get_world_size())) if self._channel is None else []
        self._rank = dist.get_rank() if self._channel is None else 0
        self.generation = 0
        self._entered_first = self._channel is None
        self._phase = "computing"
        self._next_assignment: list[int] | None = None
        self._ledger = Ledger(start_iteration, micro_batches, [])
        self._seconds = 0.0
        self._loss: float | None = None
        self._reduce_seconds = self._outside_seconds = 0.0
        self._last_progress = 0.0
        self._transferred = 0  # bytes of the transfer at hand
        self._self_stops = 0
        self._moments: dict[str, float] = {}  # of the recovery at hand, on the monotonic clock
        self._half_received = self._came_new = False
        self._resting: tuple[str, dict[str, Any] | None] = ("waiting", None)
        self._roles: dict[str, Any] | None = None
        self._agreed_offer: Plan | None = None
        self._stop_wanted = self._stopping = False
        self._note: dict[str, Any] | None = None
        self._checkpoints = checkpoints
        if checkpoints is not None and (saved := checkpoints.load(self._state)) is not None:
            self.iteration = saved

    # ------------------------------------------------------------ the loop
    def __iter__(self) -> Iterator[StepResult]:
        if self._channel is not None:
            self._rest("waiting")
            self._enter_until_in(self._wait_plan())
        while self.iteration < self.train_iterations and not self._stopping:
            try:
                result = self._train_iteration()
            except _Rejoined:
                continue
            left = time.perf_counter()
            yield result
            if self._checkpoints is not None and self._is_first() and self._checkpoints.due(self.iteration):
                self._checkpoints.save(self._state, self.iteration)
            self._outside_seconds = time.perf_counter() - left
            if self._agreed_offer is not None and self.iteration < self.train_iterations and not self._stopping:
                self._change_membership(self._agreed_offer)
        self._finish()

    def _change_membership(self, offer: Plan) -> None:
        """At an iteration boundary: enter what everybody holds, or the plan that follows when it breaks on the way."""
        plan = self._enter_until_in(offer)
        if not plan.boundary:
            self._next_assignment = plan.assignment.get(self.slot)

    def _train_iteration(self) -> StepResult:
        began = time.perf_counter()
        self._agreed_offer = None
        assigned = (
            self._next_assignment
            if self._next_assignment is not None
            else deal(self.micro_batches, self._members)[self._my_place()]
        )
        self._next_assignment = None
        self._ledger = Ledger(self.iteration, self.micro_batches, assigned)
        self._gradients.begin()
        self._optimizer.zero_grad()
        self._set_phase("computing")
        loss = self._until_committed()
        result = self._step(loss, began)
        self._set_phase("stepped")
        return result

    def _is_first(self) -> bool:
        """The lowest member of the present generation, which may be another process than before."""
        return self._rank == 0 if self._channel is None else self.slot == min(self._members, default=self.slot)

    def _my_place(self) -> int:
        return self.slot if self._channel is not None else self._rank

    def _until_committed(self) -> float:
        """Compute, reduce and commit, over as many generations as it takes; returns the iteration's loss."""
        loss = 0.0
        while True:
            try:
                self._gradients.compute(self._ledger)
                self._set_phase("reducing")
                reducing = time.perf_counter()
                loss = self._reduce()
                self._set_phase("synced")
                self._agreed_offer = self._commit()
                self._reduce_seconds = time.perf_counter() - reducing
                return loss
            except (PeerLost, RuntimeError) as error:
                if not self._is_loss(error):
                    raise
                if self._recover(error):
                    return loss

    def _is_loss(self, error: Exception) -> bool:
        """Whether `error` means a broken generation rather than a fault of the training script itself."""
        if self._channel is None or isinstance(error, FATAL) or not self._gradients.intact:
            return False  # half a micro-batch in the gradient cannot be taken out again
        if self._watch.lost():
            return True
        self._self_stops += 1
        in_collective = self._phase in ("reducing", "synced") and type(error) in (
            RuntimeError,
            dist.DistBackendError,
            dist.DistNetworkError,
        )
        return (in_collective or isinstance(error, PeerLost)) and self._self_stops <= SELF_STOPS

    def _reduce(self) -> float:
        """Reduce the gradients, and prove the ledger: the summed counts of all micro-batches are 1. Returns the mean
        loss.

        The losses travel with the counts so that the job's loss does not depend on who computed what, and the wishes
        to stop so that all who have the reduced gradients agree on the end.
        """
        proof = torch.zeros(3, self.micro_batches, dtype=torch.float64)
        proof[2, 0] = float(self._stop_wanted)
        for index, loss in self._ledger.losses.items():
            if index in self._ledger.done:
                proof[1, index] = loss.double().cpu()
        for index in self._ledger.done:
            proof[0, index] += 1
        proof = proof.to(self._process.device)
        if self._channel is None and dist.get_world_size() == 1:
            self._gradients.reduce()
        else:
            work = dist.all_reduce(proof, async_op=True)
            self._gradients.reduce()
            work.wait()
        Ledger.check_counts(self.iteration, proof[0].round().long().tolist())
        self._stopping = bool(proof[2, 0] > 0)  # not in the commit: whoever steps, even by a plan, has to know it
        return float(proof[1].mean())

    def request_stop(self) -> None:
        """End the training after the present iteration, on all ranks alike; one rank's request is enough. Safe in a
        signal handler.
        """
        self._stop_wanted = True

    def _commit(self) -> Plan | None:
        """Nobody steps before all are synced. Returns the offer that every member holds, if there is one."""
        if self._channel is None:
            return None
        offer = self._watch.offer
        held = torch.zeros(len(self._members), dtype=torch.int64)
        held[self._members.index(self.slot)] = offer.generation if offer else 0
        held = held.to(self._process.device)
        dist.all_reduce(held)
        return offer if offer is not None and set(held.tolist()) == {offer.generation} else None

    def _step(self, loss: float, began: float) -> StepResult:
        stepping = time.perf_counter()
        succeeded, grad_norm, _ = self._optimizer.step()
        if self._scheduler is not None and succeeded:
            self._scheduler.step(increment=self._samples)
        self._self_stops = 0
        now = time.perf_counter()
        self._seconds, self._loss = now - began, loss
        phases = {**self._gradients.seconds, "reduce": self._reduce_seconds, "step": now - stepping}
        phases["outside"] = self._outside_seconds
        result = StepResult(
            self.iteration,
            loss,
            None if grad_norm is None else float(grad_norm),
            float(self._optimizer.param_groups[0]["lr"]),
            self._seconds,
            self.generation,
            len(self._members),
        )
        if self._channel is not None:
            self._channel.send(
                "step",
                generation=self.generation,
                iteration=self.iteration,
                micro_batches=self._ledger.done,
                computed=self._ledger.computed,
                total=self.micro_batches,
                seconds=self._seconds,
                loss=loss,
                phases=phases,
                at=time.time(),
            )
            if self._moments:
                self._channel.send("timing", generation=self.generation, at=time.time(), seconds=self._recovery_parts())
        self.iteration += 1
        return result

    def _recovery_parts(self) -> dict[str, float]:
        """When each part of the recovery ended, in seconds since it began: broken, caught, planned, grouped, entered,
        stepped. A newcomer was not broken, and took no plan in the middle of an iteration."""
        moments, self._moments = {**self._moments, "stepped": time.monotonic()}, {}
        began = min(moments.values())
        return {what: moment - began for what, moment in moments.items()}

    # ------------------------------------------------------------ generations
    def _recover(self, error: Exception) -> bool:
        """Stop, report, and go on under the controller's plan. True when the iteration at hand is to be stepped as it
        is."""
        self._moments = {"caught": time.monotonic()}
        self._stop(error)
        plan = self._wait_plan()
        self._moments |= {"broken": self._watch.broken_at, "planned": time.monotonic()}
        plan = self._enter_until_in(plan)
        if self._came_new:
            raise _Rejoined
        if plan.step == self._ledger.iteration and self._phase == "synced":
            self._next_assignment = plan.assignment.get(self.slot)
            return True
        self._gradients.restore()
        self._ledger.reassign(plan.assignment[self.slot])
        self._set_phase("computing")
        return False

    def _stop(self, error: Exception) -> None:
        """All collectives of the generation are left for good; say where this rank stands."""
        self._watch.give_up()
        self._process.unblocker.unblock()  # the neighbours learn of it at once
        self._gradients.drain(self._process.unblocker.unblock)
        fault = None
        if not isinstance(error, PeerLost):
            fault = {"type": type(error).__name__, "text": str(error)[:2000], "at": time.time()}
        self._rest("stopped", fault)

    def _rest(self, state: str, fault: dict[str, Any] | None = None) -> None:
        """Say that this rank has stopped, and remember it: it is said again whenever one more Break comes
        before a plan."""
        self._resting = (state, fault)
        self._publish(state, fault=fault)

    def _wait_plan(self) -> Plan:
        """The next plan that has this rank as a member."""
        limit = float(os.environ.get("UNICRON_PLAN_TIMEOUT", PLAN_TIMEOUT))
        while True:
            left = self._resting[0] == "left"
            try:
                plan = self._watch.wait_plan(None if left else limit)  # a spare is ended by Slurm or its agent
            except PlanTimeout:
                self._rescue()
                raise
            if plan is None:
                self._watch.give_up()
                self._publish(self._resting[0], fault=self._resting[1])
            elif self.slot in plan.members:
                return plan
            elif not left:
                self._leave()

    def _rescue(self) -> None:
        """Nobody leads the job any more: what this rank knows goes to disk before it ends."""
        if self._checkpoints is not None and self._entered_first and not self._half_received:
            self._checkpoints.rescue(self._state, self.iteration, sorted(self._members).index(self.slot))

    def _enter_until_in(self, plan: Plan) -> Plan:
        """Enter `plan`, or the plan that follows when it breaks on the way; returns the one that this rank is in."""
        while True:
            if self.slot not in plan.members:
                self._leave()
                plan = self._wait_plan()
            try:
                self._enter(plan)
                return plan
            except (PeerLost, RuntimeError, ConnectionError) as error:
                if isinstance(error, FATAL):
                    raise
                self._watch.give_up()
                self._process.unblocker.unblock()
                if not self._entered_first:
                    self._watch.put_back()
                self._rest("stopped" if self._entered_first else "waiting")
                plan = self._wait_plan()

    def _leave(self) -> None:
        """A plan went on without this rank: let go of everything, so that the others do not wait for it. It
        may come back as a newcomer."""
        self._watch.give_up()
        self._roles = self._roles or groups.roles()
        groups.tear_down()
        self._process.unblocker.disarm()
        self._watch.put_back()
        self._entered_first = False
        self._rest("left")

    def _enter(self, plan: Plan) -> None:
        if self._half_received and self.slot not in plan.joiners:
            raise migrate.StateMismatch("the transfer of the training state to this rank was cut off: start it anew")
        self._watch.enter(plan)
        self._moments.setdefault("caught", time.monotonic())
        newcomer = self._came_new = not self._entered_first or self.slot in plan.joiners
        self._publish("entering", entering=plan.generation)
        old = self._roles or groups.roles()
        self._roles = old  # what Megatron's objects point to until they are re-pointed, however often this is tried
        groups.tear_down()
        with self._process.unblocker.building():
            store = groups.connect_store(plan.store, plan.prefix, self._watch.lost)
            if newcomer and self.slot != plan.source:
                groups.wait_for_members(store)
            else:
                groups.open_to_newcomers(store)
            self._check_alive()
            groups.rebuild(self._process.backend, store, plan.members, self.slot, self._watch.lost)
            self._check_alive()
        groups.repoint(groups.group_holders(self._model, self._optimizer), old, groups.roles())
        self._roles = None
        self._gradients.adopt_groups()
        self._moments["grouped"] = time.monotonic()
        self._members = list(plan.members)
        if plan.joiners and plan.source is not None:
            self._migrate(plan, plan.source, newcomer)
        self._check_alive()
        self.generation, self._entered_first = plan.generation, True
        self._watch.entered()
        self._moments["entered"] = time.monotonic()
        if newcomer:
            self._next_assignment = plan.assignment.get(self.slot)
            self._phase, self._ledger = "computing", Ledger(self.iteration, self.micro_batches, [])
        self._publish("running")

    def _migrate(self, plan: Plan, sender: int, newcomer: bool) -> None:
        source = plan.members.index(sender)
        self._half_received = self._half_received or (newcomer and self.slot != sender)
        holders = [place for place, slot in enumerate(plan.members) if slot not in plan.joiners]

        def note(*what: int) -> None:
            self._note = migrate.note(plan.members, *what)
            self._publish("entering", entering=plan.generation, moved=self._transferred)

        def moved(size: int) -> None:
            self._transferred += size
            if (newcomer or self.slot == sender) and self._due(TRANSFER_SECONDS):
                self._publish("entering", entering=plan.generation, moved=self._transferred)

        self._transferred = 0
        self.iteration = migrate.transfer(
            self._state, self.iteration, source, newcomer, self._process.device, holders, note, moved
        )
        self._half_received = False

    def _check_alive(self) -> None:
        if self._watch.lost():
            raise PeerLost("a member was lost while the generation was entered")

    # ------------------------------------------------------------ telling the agent
    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        if self._channel is not None:
            self._publish("running")

    def _progress(self) -> None:
        if self._channel is not None and self._due(PROGRESS_SECONDS):
            self._publish("running")

    def _due(self, seconds: float) -> bool:
        """Whether a message of mere progress may be sent, at most one per so many seconds."""
        now = time.perf_counter()
        due = now - self._last_progress > seconds
        self._last_progress = now if due else self._last_progress
        return due

    def _publish(self, state: str, entering: int = 0, fault: dict[str, Any] | None = None, moved: int = 0) -> None:
        if self._channel is None:
            return
        self._channel.send(
            "rank",
            state=state,
            generation=self.generation,
            entering=entering,
            broken=self._watch.broken,
            iteration=self._reported_iteration(),
            phase=self._phase,
            done=self._ledger.done,
            micro_batches=self.micro_batches,
            train_iterations=self.train_iterations,
            flops_per_iteration=self._flops,
            iteration_seconds=self._seconds,
            loss=self._loss,
            fault=fault,
            note=self._note,
            moved=moved,
        )

    def _reported_iteration(self) -> int:
        """The iteration that the ledger is about; before the first one, the iteration to start with."""
        return self._ledger.iteration if self._entered_first else self.iteration

    def _finish(self) -> None:
        self.train_iterations = self.iteration  # an end that was asked for is the end for everybody
        if self._checkpoints is not None and self._is_first():
            self._checkpoints.save_last(self._state, self.iteration)
        if self._channel is not None:
            self._publish("finished")
            self._channel.close()
