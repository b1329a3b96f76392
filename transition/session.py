"""The training loop that survives: one object between a training script and the generation protocol
(docs/design/generations.md).

A rank prepares itself in a world without peers (model, optimizer, data), then enters generations. When a member is lost
every survivor stops between two micro-batches or at its reduce, reports, and goes on with the same iteration under the
controller's plan. Newcomers and leavers change the membership at an iteration boundary, which all members reach in the
same iteration because the commit all-reduce carries the offer that each holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from transition import groups, migrate, process
from transition.accumulation import PeerLost, Work
from transition.checkpoint import TURN_SECONDS, CheckpointError, Checkpoints, Writer
from transition.exchange import Exchange, at_commit
from transition.handover import Handover
from transition.kinds import Trained, kind_of
from transition.ledger import Ledger, LedgerError, deal
from transition.member import RELAID, Member
from transition.memory.images import folder
from transition.pending import Pending, hold_scalers
from transition.remembered import Remembered
from transition.result import StepResult
from transition.safekeeping import Safekeeping
from transition.saving import Saving
from transition.snapshots import SETTING, chosen
from transition.watch import Plan, PlanTimeout

PROGRESS_SECONDS = 0.2  # at most one progress message per this time
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
BROKEN = (RuntimeError, dist.DistBackendError, dist.DistNetworkError)  # a collective's ways to say that a peer is gone


class _Rejoined(Exception):
    """This rank had been left out and came back as a newcomer, or the job was formed anew: the iteration that it was in
    is not its own any more."""


class _Again(Exception):
    """The generation was lost before the commit: the iteration is reduced once more, under a new plan."""


class _ReplicaStopped(PeerLost):
    """All ranks of the replica have finished their schedule, and stop together."""


class Session:
    """Iterate over it: one :class:`StepResult` for each optimizer step.

    model: a `torch.nn.Module` with torch's optimizer and schedule, or a list of Megatron's DDP chunks with Megatron's.
    micro_batches: per iteration, over all ranks. forward_step: `forward_step(micro_batch, model)` -> mean loss, or (sum
    of losses, tokens); with Megatron its `forward_step_func`. fetch: `fetch(iteration, index)` -> one micro-batch, a
    function of nothing else. seq_length, micro_batch_size: Megatron's schedule needs them, else they count FLOPs.
    checkpoints: where to go on from, and where the first member saves. seed: of the training's random numbers, by
    default torch's own. clip_grad, scaler: the largest norm and a `torch.amp.GradScaler`, for a plain module. Raises
    :class:`groups.UnsupportedLayout` for what it cannot heal, and :class:`CheckpointError` when there are checkpoints
    and none can be used.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        micro_batches: int,
        forward_step: Callable[..., Any],
        fetch: Callable[[int, int], Any],
        seq_length: int = 0,
        micro_batch_size: int = 0,
        train_iterations: int,
        start_iteration: int = 0,
        checkpoints: Checkpoints | None = None,
        seed: int | None = None,
        clip_grad: float | None = None,
        scaler: Any = None,
    ):
        if micro_batches < 1 or train_iterations < start_iteration:
            raise ValueError(
                f"micro_batches {micro_batches} and train_iterations {train_iterations} must be at least 1 and "
                f"{start_iteration}"
            )
        self._process = current = process.current()
        self.layout = current.layout
        trained = kind_of(model, optimizer, scheduler, clip_grad=clip_grad, scaler=scaler)
        trained.check(self.layout)
        self._watch, self._channel, self.slot = current.watch, current.channel, current.slot
        self._model, self._optimizer, self._scheduler = trained.chunks, trained.optimizer, trained.scheduler
        self.micro_batches, self.train_iterations, self.iteration = micro_batches, train_iterations, start_iteration
        self._state = trained.state(torch.initial_seed() if seed is None else seed)
        self._member = self._join(current, trained)
        self._exchange = Exchange(current)
        self._pending = Pending()
        healed = self._channel is not None and self._state.sharded
        where = chosen()
        self._kept = Safekeeping(current, self._state, self._exchange, where) if healed else None
        work = Work(
            fetch=fetch,
            total=micro_batches,
            lost=self._watch.lost if self.layout.size == 1 else self._watch.hit,
            over=self._watch.lost,
            on_progress=self._progress,
            layout=self.layout,
            place=self.slot % self.layout.size,
            seed=self._state.seed,
            sharded=self._kept is not None,
            healed=self._channel is not None,
            where=where,
            pending=self._pending,
            sequence=seq_length,
            size=micro_batch_size,
        )
        self._gradients = trained.gradients(forward_step, work)
        at_commit(self._optimizer, self._commit)
        hold_scalers(self._optimizer, self._pending)
        self._parameters = sum(each.numel() for chunk in self._model for each in chunk.module.parameters())
        self._samples = micro_batches * max(1, micro_batch_size)
        # 6 N per token: forward 2, backward 4 (Kaplan et al. 2020, section 2.1); a replica's ranks have about as many
        self._flops = 6.0 * self._parameters * self.layout.size * self._samples * max(1, seq_length)
        self._phase = "computing"
        self._next_assignment: list[int] | None = None
        self._ordered_next = True
        self._ledger = Ledger(start_iteration, micro_batches, [])
        self._seconds = 0.0
        self._loss: float | None = None
        self._committed = False
        self._reduce_seconds = self._outside_seconds = 0.0
        self._last_progress = 0.0
        self._self_stops = 0
        self._agreed_offer: Plan | None = None
        self._stop_wanted = self._stop_agreed = self._stopping = False
        self._checkpoints = checkpoints
        self._remembered = Remembered(self.slot, self._state)
        self._saving = Saving(checkpoints, self._remembered, self._kept)
        self._watch.on_memory = self._hear
        unread = False
        if self._channel is not None and self._kept is None:  # nothing is read before a plan asks for it
            self.iteration = self._remembered.look(checkpoints, start_iteration, self._writer())
        else:
            unread = self._begin(checkpoints)
        self._handover = Handover(
            self._member, self._state, self._exchange, self._kept, checkpoints, start_iteration, unread
        )

    def _begin(self, checkpoints: Checkpoints | None) -> bool:
        """Where this rank stands before it is in a generation: at the newest checkpoint. Returns whether that is not
        read yet, because memory holds a state that is as new."""
        saved, unread = None, False
        if checkpoints is not None:
            newest = next(iter(checkpoints.found()), None) if self._kept is not None else None
            unread = newest is not None and self._kept is not None and self._kept.remembered >= newest.iteration
            saved = newest.iteration if newest is not None and unread else checkpoints.load(self._state)
        self.iteration = self.iteration if saved is None else saved
        if self._kept is not None:
            self._remembered.note(checkpoints, folder())
        if self._kept is not None and (saved is None or unread):
            self._kept.check_untouched()
        return unread

    def _hear(self, message: Mapping[str, Any]) -> None:
        """What the agent says of the node's memory, in the channel's thread: of files to one alone, whoever keeps this
        rank's state."""
        if self._kept is not None and message["kind"] not in ("save", "saved"):
            self._kept.hear(message)
        else:
            self._remembered.hear(message)

    def _join(self, current: process.Process, trained: Trained) -> Member:
        """This rank's part in the generations; without an agent, in the one world that there is."""
        member = Member(current, FATAL)
        if self._channel is None:
            replica, place = self.layout.from_megatron_rank(dist.get_rank(), dist.get_world_size() // self.layout.size)
            self.slot = member.slot = replica * self.layout.size + place
            member.members, member.inside = list(range(dist.get_world_size())), True
            trained.begin_alone(self._state, current.device)
            return member
        member.groups = groups.Groups(self.layout, current.unblocker, current.aborter)
        member.groups.note_holders(trained.holders())
        member.report, member.take, member.rescue = self._report, self._take, self._rescue
        return member

    @property
    def memory(self) -> str:
        """What healing takes of this rank's memory, for people; empty where nobody heals."""
        if self._channel is None:
            return ""
        undo = f"{self._gradients.snapshot_bytes / self._parameters:.1f} to undo a reduce ({SETTING}={chosen()})"
        kept = (
            f", {self._kept.size(self._saving.writes) / self._parameters:.1f} for the optimizer's states"
            if self._kept
            else ""
        )
        size = self._remembered.size / self._parameters
        memory = f", {size:.1f} of shared memory for the state" if size else ""
        return f"healing takes, in bytes a parameter: {undo}{kept}{memory}"

    @property
    def generation(self) -> int:
        """The generation that this rank is in."""
        return self._member.generation

    @property
    def stopping(self) -> bool:
        """All ranks have agreed that the last iteration was the last one."""
        return self._stopping

    # ------------------------------------------------------------ the loop
    def join(self) -> int:
        """Wait until this rank is in a generation; returns the iteration that it begins with there. Iterating does it,
        too: this is for who has to know before the first step."""
        if self._channel is not None and not self._member.inside:
            self._member.rest("waiting")
            self._change_to(self._member.enter_until_in(self._member.wait_plan()))
        return self.iteration

    def __iter__(self) -> Iterator[StepResult]:
        self.join()
        while self.iteration < self.train_iterations and not self._stopping:
            try:
                result = self._train_iteration()
            except _Rejoined:
                continue
            left = time.perf_counter()
            yield result
            if self.iteration < self.train_iterations and not self._stopping:
                self._remember()
            self._outside_seconds = time.perf_counter() - left
            if self._agreed_offer is not None and self.iteration < self.train_iterations and not self._stopping:
                self._change_to(self._member.enter_until_in(self._agreed_offer))
        self._finish()

    def _remember(self) -> None:
        """The state at this iteration boundary goes to memory, and, where that is due, to a file."""
        here = self._member.members, self.generation, self._writer()
        due = self._saving.due(self.iteration) and self._writes()
        aside = due and self._saving.store(self.iteration, self._state, *here)
        self._remembered.keep(self.iteration, *here, aside)

    def _change_to(self, plan: Plan) -> None:
        """At an iteration boundary this rank is in `plan`: what everybody held, or what followed when it broke."""
        self._ordered_next = True
        self._remembered.begun()
        self._publish("running")
        if not plan.boundary:
            self._next_assignment = self._member.assigned(plan)

    def _train_iteration(self) -> StepResult:
        began = time.perf_counter()
        self._agreed_offer, self._committed = None, False
        self._saving.begin()
        assigned = self._next_assignment
        if assigned is None:
            assigned = deal(self.micro_batches, self._member.replicas, self._member.replica)
        self._next_assignment = None
        self._ledger = Ledger(self.iteration, self.micro_batches, assigned)
        self._gradients.begin(self._ordered_next or self._member.replicas > self.micro_batches)
        self._optimizer.zero_grad()
        self._set_phase("computing")
        result = self._until_stepped(began)
        self._set_phase("stepped")
        return result

    def _writes(self) -> bool:
        """This rank writes a part of each checkpoint: those of the first replica do, and with a distributed optimizer
        all."""
        return self._state.sharded or self._member.replica == 0

    def _writer(self) -> Writer:
        """What this rank's part is to the whole."""
        shard, shards = (self._member.replica, self._member.replicas) if self._state.sharded else (0, 1)
        size = self.layout.size
        return Writer(self.slot % size, size, shard, shards, layout=self.layout.text, loss=self._state.loss)

    def _until_stepped(self, began: float) -> StepResult:
        """Compute, reduce and step, over as many generations as it takes."""
        while True:
            try:
                self._gradients.compute(self._ledger)
                self._member.reached("computed")
                self._leave_schedule()
                self._set_phase("reducing")
                reducing = time.perf_counter()
                self._loss = self._reduce()
                self._reduce_seconds = time.perf_counter() - reducing
                return self._step(began)
            except _Again:
                continue
            except (PeerLost, RuntimeError) as error:
                undone = self._kept is not None  # what a step has changed already
                if (self._committed and not undone) or not self._is_loss(error):
                    raise
                if self._recover(error):
                    raise LedgerError("a plan steps an iteration that this rank has not reduced") from error

    def _leave_schedule(self) -> None:
        """The ranks of a replica leave their schedule together: all go on to the reduce, or all stop before it. Else
        one could wait for another that has stopped, and what connects them would have to be broken."""
        self._stop_agreed = self._stop_wanted  # a signal may come at any moment: from here on it is for the next time
        if self.layout.size > 1:
            lost, stop = self._exchange.inside([float(self._watch.lost()), float(self._stop_agreed)])
            self._stop_agreed = stop > 0
            if lost > 0:
                raise _ReplicaStopped("a member of the generation is gone")
        if self._watch.lost():
            raise PeerLost("a member of the generation is gone")
        self._watch.shelter(False)

    def _is_loss(self, error: Exception) -> bool:
        """Whether `error` means a broken generation rather than a fault of the training script itself."""
        alone = self.layout.size == 1
        if self._channel is None or isinstance(error, FATAL) or (alone and not self._gradients.intact):
            return False  # half a micro-batch in the gradient cannot be taken out again
        if self._watch.lost() or isinstance(error, _ReplicaStopped):
            return True
        self._self_stops += 1
        # a forward pass may wait for peers, too: of its replica, or for gathered parameters
        waits = not alone or self._kept is not None or self._phase in ("reducing", "synced")
        in_collective = waits and type(error) in BROKEN
        return (in_collective or isinstance(error, PeerLost)) and self._self_stops <= SELF_STOPS

    def _reduce(self) -> float:
        """Reduce the gradients, and prove the ledger: the summed counts of all micro-batches are 1. Returns the mean
        loss.

        The proof is that of the data-parallel group of this rank's place, and comes after the buckets, on the same
        communicator. The losses travel with the counts so that the job's loss does not depend on who computed what,
        and the wishes to stop so that all who have the reduced gradients agree on the end.
        """
        self._gradients.reduce(self._ledger)
        proof = torch.zeros(4, self.micro_batches, dtype=torch.float64)
        proof[3, 0] = float(self._stop_agreed)
        for index in self._ledger.done:
            proof[0, index] += 1
            if index in self._ledger.losses:
                proof[1, index] = self._ledger.losses[index].double().cpu()
            if (tokens := self._ledger.tokens.get(index)) is not None:
                proof[2, index] = float(tokens)
        proof = self._exchange.over_replicas(proof)
        Ledger.check_counts(self.iteration, proof[0].round().long().tolist())
        self._stopping = bool(proof[3, 0] > 0)  # not in the commit: whoever steps, even by a plan, has to know it
        loss = float(proof[1].sum()) / max(self._gradients.proven(float(proof[2].sum())), 1.0)
        return self._exchange.from_last_stage(loss)

    def request_stop(self) -> None:
        """End the training after the present iteration, on all ranks alike; one rank's request is enough. Safe in a
        signal handler.
        """
        self._stop_wanted = True

    def _commit(self) -> None:
        """Right before the parameters change, after all else of the step that communicates: nobody steps before all
        can. Carries the offer that every member holds, if there is one. Raises _Again where a plan has this iteration
        reduced once more."""
        if not self._committed and self._channel is not None:
            self._agree_to_step()
        elif not self._committed and self._saving.by_clock:
            self._saving.hear(self._exchange.commit(None, False, self._saving.wanted))
        self._committed = True
        self._remembered.wait()
        self._pending.apply()

    def _agree_to_step(self) -> None:
        if self._kept is not None:
            self._kept.settle()  # before anybody writes over the state before
        try:
            if self.layout.size > 1 and self._kept is None and self._watch.lost():
                raise PeerLost("the norm of the gradients may be garbage")  # of an aborted collective in the replica
            self._set_phase("synced")
            saving = self._saving
            said = self._exchange.commit(self._watch.offer, self._gradients.first, saving.wanted, saving.busy)
            saving.hear(said)
            self._agreed_offer, self._ordered_next = said.offer, said.first
        except (PeerLost, RuntimeError) as error:
            if not self._is_loss(error):
                raise
            if not self._recover(error):
                raise _Again from error
        self._watch.hold_off(self._kept is None)  # nothing of the step waits for a peer any more

    def _keep(self) -> None:
        """The state after the step, and its copies in other nodes: before all have them the gradients are not zeroed.
        Raises _Again where a plan has the iteration reduced once more, from the state before it."""
        if self._kept is None:
            return
        try:
            self._kept.keep(self._ledger.iteration + 1)
        except (PeerLost, RuntimeError) as error:
            if not self._is_loss(error):
                raise
            if not self._recover(error):
                raise _Again from error

    def _step(self, began: float) -> StepResult:
        stepping = time.perf_counter()
        succeeded, grad_norm, _ = self._optimizer.step()
        self._commit()  # an overflow has skipped the step, and with it the commit
        if self._scheduler is not None and succeeded:
            self._scheduler.step(increment=self._samples)
        self._state.loss = self._loss
        self._keep()
        self._watch.shelter(True)
        self._watch.hold_off(False)
        self._self_stops = 0
        now = time.perf_counter()
        self._seconds = now - began
        result = StepResult(
            self._ledger.iteration,
            self._loss or 0.0,
            None if grad_norm is None else float(grad_norm),
            float(self._optimizer.param_groups[0]["lr"]),
            self._seconds,
            self.generation,
            len(self._member.members),
        )
        self._say_step({"reduce": self._reduce_seconds, "step": now - stepping})
        self.iteration = self._ledger.iteration + 1
        return result

    def _say_step(self, phases: dict[str, float]) -> None:
        if self._channel is None:
            return
        speaks = self.slot % self.layout.size == 0  # one of the replica's ranks says what all of them have computed
        self._channel.send(
            "step",
            generation=self.generation,
            iteration=self._ledger.iteration,
            micro_batches=self._ledger.done if speaks else [],
            computed=self._ledger.computed if speaks else [],
            total=self.micro_batches,
            seconds=self._seconds,
            loss=self._loss,
            phases={**self._gradients.seconds, **phases, "outside": self._outside_seconds},
            at=time.time(),
        )
        if self._member.moments:
            self._channel.send("timing", generation=self.generation, at=time.time(), seconds=self._recovery_parts())

    def _recovery_parts(self) -> dict[str, float]:
        """When each part of the recovery ended, in seconds since it began: broken, caught, planned, grouped, entered,
        computed, stepped. A newcomer was not broken, and took no plan in the middle of an iteration."""
        moments, self._member.moments = {**self._member.moments, "stepped": time.monotonic()}, {}
        began = min(moments.values())
        return {what: moment - began for what, moment in moments.items()}

    # ------------------------------------------------------------ generations
    def _recover(self, error: Exception) -> bool:
        """Stop, report, and go on under the controller's plan. True when the iteration at hand is to be stepped as it
        is, or when all have the state after it."""
        member, before = self._member, self._member.members
        member.moments = {"caught": time.monotonic()}
        self._agreed_offer = None
        if not self._gradients.intact or self._unsure_parameters():
            self._ledger.drop()
            self._gradients.spoilt()
        member.stop(error, self._gradients.drain, isinstance(error, _ReplicaStopped))
        plan = member.wait_plan()
        member.moments |= {"broken": self._watch.broken_at, "planned": time.monotonic()}
        plan = member.enter_until_in(plan)
        self._ordered_next = True
        if plan.members != before:
            self._self_stops = 0
        self._publish("running")
        steps = plan.step == self._ledger.iteration and self._phase == "synced"
        if member.came_new or not steps:
            self._pending.forget()
        if member.came_new:
            self._next_assignment = member.assigned(plan)
            raise _Rejoined
        if steps or (plan.state is not None and plan.iteration == self._ledger.iteration + 1):
            self._next_assignment = member.assigned(plan)
            self._watch.shelter(False)
            return True
        self._committed = False
        self._optimizer.zero_grad()  # a step that was begun has made `grad` another name of the gradient buffer
        if not self._gradients.restore():
            self._ledger.drop()
        self._set_phase("computing")  # a further loss must not find it reduced
        assigned = member.assigned(plan)
        if assigned is None or plan.iteration not in (None, self._ledger.iteration):
            raise LedgerError(f"the plan for iteration {self._ledger.iteration} gives this replica nothing to compute")
        try:
            self._keep_or_drop(assigned)
        except (PeerLost, RuntimeError) as further:
            if not self._is_loss(further):
                raise
            return self._recover(further)
        self._ledger.reassign(assigned)
        return False

    def _unsure_parameters(self) -> bool:
        """Parameters that were gathered while this iteration computed may be garbage: an aborted NCCL gather says
        nothing."""
        overlapped = self._kept is not None and self._model[0].ddp_config.overlap_param_gather
        return overlapped and self._process.backend == "nccl"

    def _keep_or_drop(self, assigned: Sequence[int]) -> None:
        """What a replica has in its gradients stays there if all of its ranks have the same; else it is not one's."""
        if self.layout.size == 1:
            if not self._gradients.intact:
                self._gradients.drop()
            return
        mine = Ledger.signature(self._ledger.done if self._gradients.intact else None)
        most, least = self._exchange.inside([mine, -mine])
        if most != -least or not self._gradients.intact or not set(self._ledger.done) <= set(assigned):
            self._gradients.drop()
            self._gradients.restore()
            self._ledger.drop()

    def _take(self, plan: Plan, newcomer: bool) -> None:
        """The groups of `plan` are there."""
        self._gradients.adopt_groups()
        if self._member.inside:
            self._remembered.begun()
        found = self._remembered.begin(plan, self._next_one)
        self.iteration = self._handover.take(plan, newcomer, self.iteration if found is None else found)
        if self.slot in plan.joiners:
            self._remembered.begun()
        self._gradients.seed = self._state.seed
        if self._member.came_new:
            self._stopping = False
            self._next_assignment = self._member.assigned(plan)
            self._phase, self._ledger = "computing", Ledger(self.iteration, self.micro_batches, [])

    def _rescue(self, why: str) -> None:
        """Nobody leads the job any more, or all ranks end: what this rank knows goes to disk before."""
        unfinished = self._kept is not None and self._committed and self._phase == "synced"
        if self._checkpoints is not None and not unfinished:  # of two states in the ranks none is whole
            turn = 0 if self._state.sharded else self._member.replica
            apart = TURN_SECONDS if why == RELAID else None
            self._checkpoints.rescue(self._state, self.iteration, turn, self._writer(), why, apart)

    # ------------------------------------------------------------ telling the agent
    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        self._publish("running")

    def _progress(self) -> None:
        if self._due(PROGRESS_SECONDS):
            self._publish("running")

    def _due(self, seconds: float) -> bool:
        """Whether a message of mere progress may be sent, at most one per so many seconds."""
        now = time.perf_counter()
        due = now - self._last_progress > seconds
        self._last_progress = now if due else self._last_progress
        return due

    def _publish(self, state: str) -> None:
        self._member.publish(state)

    def _report(self, state: str) -> dict[str, Any]:
        """This session's part of the rank's status."""
        rests = state in ("stopped", "standby", "waiting")
        keeps = self._member.inside and (self._gradients.undoable or not rests)
        return {
            "shards": self._kept.held() if self._kept is not None and rests else [],
            "iteration": self._ledger.iteration if self._member.inside else self.iteration,
            "phase": self._phase if self._member.inside else "computing",
            "done": self._ledger.done if keeps else [],
            "micro_batches": self.micro_batches,
            "train_iterations": self.train_iterations,
            "flops_per_iteration": self._flops,
            "iteration_seconds": self._seconds,
            "loss": self._loss,
            "saved": -1 if self._checkpoints is None else self._checkpoints.newest,
            **self._remembered.status(),
            "kept": self._has(state),
            "sharded": self._kept is not None,
            "remembers": self._remembered.active,
        }

    def _has(self, state: str) -> list[tuple[int, str]]:
        """(iteration, mark) of the states with which this rank can go on where nobody trains any more."""
        if not self._remembered.active or state not in ("waiting", "stopped", "standby"):
            return []
        return self._remembered.told(self._next_one, self._writer())

    @property
    def _next_one(self) -> int:
        """The iteration that comes next for the state that this rank has."""
        return self._ledger.iteration + (self._phase == "stepped") if self._member.inside else self.iteration

    def _finish(self) -> None:
        self.train_iterations = self.iteration  # an end that was asked for is the end for everybody
        if self._checkpoints is not None and self._writes():
            self._checkpoints.save_last(self._state, self.iteration, self._writer())
        self._remembered.close()
        if self._channel is not None:
            self._publish("finished")
            self._channel.close()
