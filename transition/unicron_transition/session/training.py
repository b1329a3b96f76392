"""The training of one rank, over as many generations as it takes (docs/design/generations.md).

When a member is lost, every survivor stops between two micro-batches or at its reduce, reports, and continues the same
iteration under the controller's plan. Newcomers and leavers change the membership at an iteration boundary, the same
one for all members, because the commit all-reduce carries the offer that each of them holds.

Invariants, in every rank and whatever happens:

- The optimizer steps only with a gradient that has each micro-batch of the iteration exactly once: the summed counts of
  all ledgers prove it (:meth:`Training._reduce`).
- No parameter changes before all members have agreed to step (:meth:`Training._commit`). After a loss, survivors that
  had reduced by then step by the plan, or all compute the iteration to its end once more; never only some of them.
- The phases of an iteration are computing, reducing, synced and stepped, in this order. A plan takes a rank back to
  computing, but never from stepped.
- A replica keeps all micro-batches that are in its gradient, or drops all of them: a plan that takes some away is an
  error (:meth:`Ledger.reassign`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicron_detector.processes.rank_messages import Plan
from unicron_transition.generations import groups
from unicron_transition.generations.meshes import WorldGroups
from unicron_transition.generations.watch import PlanTimeout
from unicron_transition.iteration import rank_process
from unicron_transition.iteration.accumulation import DeferredChanges, PeerLost, Work, hold_scalers, scalers
from unicron_transition.iteration.exchange import CommitResult, Exchange, at_commit
from unicron_transition.iteration.gradient_copies import Where, chosen_place
from unicron_transition.iteration.ledger import Ledger, LedgerError, StepResult
from unicron_transition.iteration.soundness import UnsoundIteration
from unicron_transition.seams.dtensors import local
from unicron_transition.seams.table import UnsupportedLayout
from unicron_transition.session import link_search
from unicron_transition.session.checks import AuditAgain, Checks, CorruptState, LastingCorruption
from unicron_transition.session.checks import settings as check_settings
from unicron_transition.session.evaluation import Evaluations
from unicron_transition.session.handover import Handover
from unicron_transition.session.member import Member
from unicron_transition.session.model_kinds import ModelKind, kind_of
from unicron_transition.session.pacing import Pacing
from unicron_transition.session.persistence import Persistence
from unicron_transition.session.progress import RankReporter, SessionPosition
from unicron_transition.session.trials import OnBadBatch, Trials
from unicron_transition.sharded.sharded_state import ShardedState
from unicron_transition.snapshot import migrate
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints
from unicron_transition.snapshot.local_state import LocalState
from unicron_transition.snapshot.whole_state import WholeState

FATAL = (  # another try would not help
    migrate.StateMismatch,
    migrate.CorruptTransfer,
    UnsupportedLayout,
    PlanTimeout,
    LedgerError,
    CheckpointError,
    UnsoundIteration,
)
SELF_STOPS = 3  # failures of an iteration without a Break until they count as the script's own
PEER_ERRORS = (RuntimeError, dist.DistBackendError, dist.DistNetworkError)  # of collectives whose peer is gone


class RankRejoined(Exception):
    """This rank has joined as a newcomer, or the job formed anew: its old iteration is no longer valid."""


class _Again(Exception):
    """The generation broke before the commit: the iteration is reduced again under a new plan."""


class _Unsound(Exception):
    """The iteration is no step: what is unsound in it is computed again."""


class _ReplicaStopped(PeerLost):
    """Raised when all ranks of the replica have finished their schedule and stop together."""


class Training:
    """The training of one rank. Its public face is :class:`Session`, which describes the parameters."""

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        micro_batches: int | Callable[[int], int],
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
        on_bad_batch: str = "end",
    ):
        if on_bad_batch not in list(OnBadBatch):
            raise ValueError(f'on_bad_batch={on_bad_batch!r}: write "end" or "skip"')
        self.micro_batches_of = micro_batches if callable(micro_batches) else lambda iteration: micro_batches
        first = self.micro_batches_of(start_iteration)
        if first < 1 or train_iterations < start_iteration:
            raise ValueError(
                f"micro_batches {first} and train_iterations {train_iterations} must be at least 1 and "
                f"{start_iteration}"
            )
        self._process = current = rank_process.current()
        self.layout = current.layout
        kind = kind_of(model, optimizer, scheduler, clip_grad=clip_grad, scaler=scaler)
        kind.check(self.layout, current.meshes)
        if callable(micro_batches) and not kind.varies:
            raise ValueError("micro_batches is one number for a plain module: a function is for Megatron's models")
        self._watch, self._channel, self.slot = current.watch, current.channel, current.slot
        self._model, self._optimizer, self._scheduler = kind.chunks, kind.optimizer, kind.scheduler
        self._at = SessionPosition(start_iteration, train_iterations, (Ledger(start_iteration, first, []), "computing"))
        self._state = kind.state(torch.initial_seed() if seed is None else seed)
        self._member = self._join(current, kind)
        self._exchange = Exchange(current, lambda: self._member.links, self._groups(kind))
        if self._member.groups is not None:
            self._exchange.tells = self._member.groups.all_tell
        kind.adopt_exchange(self._exchange, self._state, current)
        self._pending = DeferredChanges()
        where = chosen_place()
        self._local = self._local_state(current, where)
        work = Work(
            fetch=fetch,
            total=first,
            lost=self._watch.lost if self.layout.size == 1 else self._watch.hit,
            over=self._watch.lost,
            layout=self.layout,
            place=self.slot % self.layout.size,
            seed=self._state.seed,
            sharded=self._local.sharded,
            healed=self._channel is not None,
            where=where,
            begin_sum=self._exchange.begin_sum,
            inside=self._exchange.inside,
            pending=self._pending,
            sequence=seq_length,
            size=micro_batch_size,
        )
        self._gradients = kind.gradients(forward_step, work)
        at_commit(self._optimizer, self._commit)
        hold_scalers(self._optimizer, self._pending)
        parameters = sum(local(each).numel() for chunk in self._model for each in chunk.module.parameters())
        self._size = max(1, micro_batch_size)
        # 6 N per token: forward 2, backward 4 (Kaplan et al. 2020, section 2.1); a replica's ranks have about as many
        flops = 6.0 * parameters * self.layout.size * self._size * max(1, seq_length)
        self._next_assignment: list[int] | None = None
        self._ordered_next = True
        self._committed = False
        self._reduce_seconds = self._commit_seconds = self._outside_seconds = 0.0
        self._self_stops = 0
        self._communicating = False  # the script does, between two iterations
        self._disturbed = False  # a rank was lost since the others may have stepped: they may be in the next iteration
        self._agreed_offer: Plan | None = None
        self._stop_wanted = self._stop_agreed = self._stopping = False
        self._persistence = Persistence(self._member, self._state, checkpoints, self._local)
        self._saving = self._persistence.schedule
        scaled = bool(scalers(self._optimizer)) or (scaler is not None and scaler.is_enabled())
        judged = self._member, self._exchange, self._gradients, self._state
        self._trials = Trials(*judged, OnBadBatch(on_bad_batch), scaled)
        self._reporter = RankReporter(self._at, self._member, self._gradients, self._persistence, parameters, flops)
        self._reporter.micro_batches_of = self.micro_batches_of
        self._pacing = Pacing(self._member, self._gradients.group)
        self._reporter.share = lambda: self._pacing.share
        wanted = check_settings() if self._channel is not None else (0, 0)
        self._checks = Checks(self._member, self._gradients, self._state, lambda: self._exchange.tells(), wanted)
        self._trials.can_go_back = lambda: self._checks.verifies
        current.iteration_takes = lambda: math.inf if self._at.phase == "stepped" else self._at.seconds
        self._member.report = self._reporter.status
        if self._channel is not None:
            self._channel.progress = self._reporter.progress
        self._at.iteration = self._local.find_start(checkpoints, start_iteration, self._persistence.writer)
        self._handover = Handover(self._member, self._state, self._exchange, self._local)
        self.evaluations = Evaluations(self._exchange, self._gradients, self._watch.lost, current.device)

    def _local_state(self, current: rank_process.Process, where: Where) -> LocalState:
        """Return the keeper of this rank's state beyond the rank's end; without an agent it keeps nothing."""
        if self._channel is None:
            return LocalState(self._state)
        if self._state.sharded:
            return ShardedState(current, self._state, self._exchange, where)
        return WholeState(self._state, self.slot)

    def _join(self, current: rank_process.Process, kind: ModelKind) -> Member:
        """Return this rank as a member of the generations; without an agent, of the one world that there is."""
        member = Member(current, FATAL)
        if self._channel is None:
            replica, place = self.layout.from_megatron_rank(dist.get_rank(), dist.get_world_size() // self.layout.size)
            self.slot = member.slot = replica * self.layout.size + place
            member.members, member.inside = list(range(dist.get_world_size())), True
            return member
        place = self.slot % self.layout.size
        member.groups = groups.Groups(self.layout, current.unblocker, current.aborter, current.meshes, place)
        member.groups.note_holders(kind.holders())
        member.take, member.rescue = self._take_up_plan, self._rescue
        return member

    def _groups(self, kind: ModelKind) -> groups.Groups | WorldGroups | None:
        """Return the groups of this rank's replica and place; None if Megatron keeps them, or a rank is a replica. With
        lanes Megatron's data-parallel group is of the ranks at several places."""
        if self.layout.size == 1 or (kind.keeps_groups and self.layout.lanes == 1):
            return None
        return self._member.groups or WorldGroups(self.layout)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the present iteration, over all ranks."""
        return self.micro_batches_of(self._at.iteration)

    @property
    def generation(self) -> int:
        """The generation that this rank is in."""
        return self._member.generation

    # ------------------------------------------------------------ an iteration
    def _train_iteration(self) -> StepResult:
        began = time.perf_counter()
        self._agreed_offer, self._committed, self._disturbed = None, False, False
        self._saving.begin_iteration()
        self._trials.begin_iteration()
        self._checks.begin_iteration(self.micro_batches)
        assigned, total = self._next_assignment, self.micro_batches
        if assigned is None:
            assigned = self._pacing.deal(total)
        self._next_assignment = None
        self._at.moment = Ledger(self._at.iteration, total, assigned), "computing"
        self._gradients.begin_iteration(self._ordered_next or self._member.replicas * self.layout.lanes > total, total)
        self._optimizer.zero_grad()
        self._member.publish("running")  # now: a script that hangs may hold the interpreter
        return self._until_stepped(began)

    def _until_stepped(self, began: float) -> StepResult:
        again = False
        while True:
            try:
                if again:
                    self._try_again()
                    again = False
                self._compute()
                self._member.note_moment("computed")
                self._leave_schedule()
                self._set_phase("reducing")
                reducing = time.perf_counter()
                self._at.loss = self._reduce()
                self._reduce_seconds = time.perf_counter() - reducing
                return self._step(began)
            except _Unsound:
                again = True
            except CorruptState as found:
                verdict = link_search.explain(found.verdict, self._member, self._exchange, self._gradients)
                self._member.note = self._checks.fault(verdict, self._at.ledger.iteration)
                try:
                    self._checks.count_return(self._at.ledger.iteration)
                except LastingCorruption:
                    self._persistence.go_back()  # whoever begins again must not find what was kept since
                    raise
                self.go_back()
            except AuditAgain:
                self._leave_try()
                self._gradients.drop()
                self._at.ledger.discard()
            except _Again:
                again = False
            except (PeerLost, RuntimeError) as error:
                undone = self._local.sharded  # a plan can undo the step
                if (self._committed and not undone) or not self._is_loss(error):
                    raise
                again = False
                if self._recover(error):
                    raise LedgerError("a plan steps an iteration that this rank has not reduced") from error

    def _compute(self) -> None:
        """Compute all that the ledger owes; each round by itself if the iteration was no step before."""
        ledger, lanes = self._at.ledger, self.layout.lanes
        if not self._trials.under_way:
            if self._checks.audits(ledger.iteration):
                self._checks.compute(ledger, self._gradients.compute)
            self._pacing.compute(ledger, self._gradients.compute)
            return
        self._gradients.hold_reduces()
        owed, assigned = ledger.todo(), ledger.assigned
        for first in range(0, len(owed), lanes) or [0]:
            ledger.assigned = [*ledger.done, *owed[first : first + lanes]]
            self._gradients.compute(ledger)
            self._trials.note_apart(ledger, owed[first : first + lanes])
        ledger.assigned = assigned

    def _try_again(self) -> None:
        """Agree with all members on who computes what in another try of this iteration, which was no step; collective.
        Raises UnsoundIteration, and PeerLost or RuntimeError if a member is gone."""
        ledger, kept = self._at.ledger, self._leave_try()
        marks = self._trials.marks(ledger, kept)
        if not kept:
            ledger.discard()
        retry = self._trials.retry(ledger, marks, self._at.loss or 0.0)
        if retry.skipped != ledger.skipped:
            ledger.skipped = retry.skipped
            self._gradients.begin_iteration(True, ledger.total - len(retry.skipped))
        elif retry.drops:
            self._gradients.drop()
        if retry.drops:
            ledger.discard()
        ledger.reassign(retry.assigned)

    def _leave_try(self) -> bool:
        """Undo the reduce of an iteration that is no step; returns whether this rank's own sum is there again."""
        self._committed = False
        self._pending.forget()
        self._set_phase("computing")
        self._optimizer.zero_grad()  # an unfinished step has left `grad` as an alias of the gradient buffer
        return self._gradients.restore()

    def _leave_schedule(self) -> None:
        """Leave the replica's schedule with all its ranks: all go on to the reduce, or all stop before it. Otherwise
        one could wait for another that has stopped, until their connections are broken."""
        self._stop_agreed = self._stop_wanted  # a later signal counts for the next iteration
        if self.layout.size > 1:
            parts = self._gradients.parts(self._at.ledger)
            lost, stop, *told = self._exchange.inside([float(self._watch.lost()), float(self._stop_agreed), *parts])
            self._stop_agreed = stop > 0
            if lost > 0:
                raise _ReplicaStopped("a member of the generation is gone")
            self._gradients.take_parts(self._at.ledger, told)
        if self._watch.lost():
            raise PeerLost("a member of the generation is gone")
        self._watch.shelter(False)

    def _is_loss(self, error: Exception) -> bool:
        """Whether `error` means a broken generation, and is no fault of the training script."""
        alone = self.layout.size == 1
        if self._channel is None or isinstance(error, FATAL) or (alone and not self._gradients.intact):
            return False  # half a micro-batch in the gradient cannot be taken out again
        if self._watch.lost() or isinstance(error, _ReplicaStopped):
            return True
        self._self_stops += 1
        # a forward pass may also wait for peers: of its replica, or for gathered parameters
        waits = not alone or self._local.sharded or self._at.phase in ("reducing", "synced")
        waits = waits or self.evaluations.running or self._communicating
        in_collective = waits and type(error) in PEER_ERRORS
        return (in_collective or isinstance(error, PeerLost)) and self._self_stops <= SELF_STOPS

    def _reduce(self) -> float:
        """Reduce the gradients, and prove the ledger: the summed counts of all micro-batches are 1. Returns the mean
        loss.

        The proof covers the data-parallel group of this rank's place, and comes with the last bucket or after it on the
        same communicator. It also carries the losses, so that the job's loss does not depend on which rank computed
        what, and the requests to stop, so that all ranks with the reduced gradients agree on the end.
        """
        ledger = self._at.ledger
        proof = self._gradients.reduce(ledger, ledger.proof(self._stop_agreed))
        Ledger.check_counts(ledger.iteration, proof.counts, ledger.skipped)
        self._stopping = proof.wishes[0] > 0  # not in the commit, which a rank that steps by a plan may miss
        loss = proof.loss / max(self._gradients.proven(proof.all_tokens), 1.0)
        loss = self._exchange.from_last_stage(loss)
        self._trials.note_reduced(loss)
        return loss

    def _commit(self) -> None:
        """Agree with all members right before the parameters change, after all other communication of the step. The
        commit carries the offer that every member holds, if any. Raises _Again if a plan has this iteration reduced
        again."""
        if not self._committed and self._channel is not None:
            self._agree_to_step()
        elif not self._committed:
            told = self._statement()
            self._on_commit(self._exchange.commit(None, False, self._saving.wanted, False, self._trials.unsound, told))
        self._committed = True
        self._local.wait_copied()
        self._pending.apply()

    def _agree_to_step(self) -> None:
        self._local.wait_whole()  # before any rank overwrites the previous state
        result = CommitResult()  # of a rank that steps by a plan
        with self._recovering():
            if self.layout.size > 1 and not self._local.sharded and self._watch.lost():
                raise PeerLost("the norm of the gradients may be garbage")  # a collective in the replica was aborted
            unsound = self._trials.unsound
            if not unsound:  # otherwise no plan may step it
                self._set_phase("synced")
            saving, first, told = self._saving, self._gradients.first, self._statement()
            began = time.perf_counter()
            result = self._exchange.commit(self._watch.offer, first, saving.wanted, saving.busy, unsound, told)
            self._commit_seconds += time.perf_counter() - began
            self._agreed_offer, self._ordered_next = result.offer, result.first
        self._on_commit(result)
        self._watch.hold_off(not self._local.sharded)  # from here on the step waits for no peer

    def _on_commit(self, result: CommitResult) -> None:
        """Take in what all members have agreed to. Raises an exception, in all of them, if the iteration is no step."""
        if result.unsound:
            self._checks.forget()
            raise _Unsound
        ledger = self._at.ledger
        if self._checks.take_statements(ledger.iteration, self._pacing.take_statements(result.told, ledger.total)):
            self._persistence.note_verified(ledger.iteration)
        self._saving.on_commit(result)

    def _statement(self) -> list[float]:
        ledger = self._at.ledger
        if not self._exchange.tells():
            return []
        return [*self._pacing.statement(ledger), *self._checks.statement(ledger.iteration)]

    @contextlib.contextmanager
    def _recovering(self) -> Iterator[None]:
        """Recover from a loss in the body, and go on behind it. Raises _Again if a plan has the iteration reduced again
        from the state before it."""
        try:
            yield
        except (PeerLost, RuntimeError) as error:
            if not self._is_loss(error):
                raise
            if not self._recover(error):
                raise _Again from error

    def _step(self, began: float) -> StepResult:
        stepping, self._commit_seconds = time.perf_counter(), 0.0
        succeeded, grad_norm, _ = self._optimizer.step()
        self._commit()  # an overflow skips the step, and the commit in it
        if self._scheduler is not None and succeeded:
            self._scheduler.step(increment=self._at.ledger.total * self._size)
        self._trials.settle_iteration(self._at.ledger)
        self._state.loss = self._at.loss
        with self._recovering():  # with its copies in other nodes, before the gradients are zeroed
            self._local.keep_step(self._at.ledger.iteration + 1)
        self._watch.shelter(True)
        self._watch.hold_off(False)
        self._self_stops = 0
        now = time.perf_counter()
        self._at.seconds = now - began
        result = StepResult(
            self._at.ledger.iteration,
            self._at.loss or 0.0,
            None if grad_norm is None else float(grad_norm),
            float(self._optimizer.param_groups[0]["lr"]),
            self._at.seconds,
            self.generation,
            len(self._member.members),
        )
        self._set_phase("stepped")
        self._reporter.report_step(
            {
                "reduce": self._reduce_seconds + self._commit_seconds,  # it waits for the others in both
                "step": now - stepping - self._commit_seconds,
                "outside": self._outside_seconds,
            }
        )
        self._at.iteration = self._at.ledger.iteration + 1
        return result

    # ------------------------------------------------------------ generations
    def change_to(self, plan: Plan) -> None:
        """Go on in `plan`, entered at an iteration boundary: all ranks held it, or it followed one that broke."""
        self._ordered_next = True
        self._local.note_has_state()
        self._member.publish("running")
        if not plan.boundary:
            self._next_assignment = self._assignment_of(plan)

    def regroup(self, error: Exception) -> None:
        """Recover from a loss between two iterations, as if it came at the start of the next one."""
        self._gradients.drop()
        self._disturbed = True
        self._at.moment = Ledger(self._at.iteration, self.micro_batches, []), "computing"
        with contextlib.suppress(RankRejoined):
            if self._recover(error):
                raise LedgerError("a plan steps an iteration that has not begun") from error
            self._next_assignment = list(self._at.ledger.assigned)

    def go_back(self) -> None:
        """Give up the training state, because it is unsound, and go on from the last verified one. Every member calls
        it at the same point of the same iteration, when it knows that all others know. Always raises RankRejoined, in
        a generation that begins with that state."""
        member = self._member
        member.moments = {"caught": time.monotonic()}
        self._agreed_offer = None
        with contextlib.suppress(PeerLost, RuntimeError):  # a peer that is gone does not matter any more
            self._exchange.wait_until_sent()
        self._pending.forget()
        self._persistence.go_back()
        member.give_up_state(self._gradients.drain)
        self._gradients.drop()
        plan = member.enter_until_in(member.wait_plan())
        self._ordered_next, self._committed, self._disturbed, self._self_stops = True, False, True, 0
        member.publish("running")
        self._next_assignment = self._assignment_of(plan)
        raise RankRejoined

    def _assignment_of(self, plan: Plan) -> list[int] | None:
        """Return the micro-batches that the plan gives this replica. Ranks about to step report the total of the next
        iteration, which may be larger, so the plan may have more."""
        assigned = self._member.assignment_of(plan)
        total = self.micro_batches_of(self._at.iteration if plan.iteration is None else plan.iteration)
        return None if assigned is None else [index for index in assigned if index < total]

    def _recover(self, error: Exception) -> bool:
        """Stop, report, and go on under the plan. True if this iteration is to be stepped as it is, or if all ranks
        already have the state after it."""
        member, before = self._member, self._member.members
        member.moments = {"caught": time.monotonic()}
        self._agreed_offer = None
        if not self._gradients.intact or self._unsure_parameters() or self._unsure_sums(error):
            self._at.ledger.drop()
            self._gradients.spoilt()
        member.stop(error, self._gradients.drain, isinstance(error, _ReplicaStopped))
        plan = member.wait_plan()
        member.moments |= {"broken": self._watch.broken_at, "planned": time.monotonic()}
        plan = member.enter_until_in(plan)
        self._ordered_next = True
        if plan.members != before:
            self._self_stops = 0
        self._member.publish("running")
        steps = plan.step == self._at.ledger.iteration and self._at.phase == "synced"
        if member.came_new or not steps:
            self._pending.forget()
        if member.came_new:
            self._next_assignment = self._assignment_of(plan)
            raise RankRejoined
        if steps or (plan.state is not None and plan.iteration == self._at.ledger.iteration + 1):
            self._next_assignment = self._assignment_of(plan)
            self._watch.shelter(False)
            self._disturbed = True
            return True
        self._committed = False
        self._trials.begin_iteration()
        self._checks.begin_iteration(self._at.ledger.total)
        if self._at.ledger.skipped:  # which the plan has dealt again, and the others have another weight
            self._at.ledger.skipped = frozenset()
            self._gradients.begin_iteration(True, self._at.ledger.total)
            self._at.ledger.drop()
        self._optimizer.zero_grad()  # an unfinished step has left `grad` as an alias of the gradient buffer
        if not self._gradients.restore():
            self._at.ledger.drop()
        self._set_phase("computing")  # a further loss must not find it reduced
        assigned = self._assignment_of(plan)
        if assigned is None or plan.iteration not in (None, self._at.ledger.iteration):
            raise LedgerError(
                f"the plan for iteration {self._at.ledger.iteration} gives this replica nothing to compute"
            )
        try:
            self._keep_or_drop(assigned)
        except (PeerLost, RuntimeError) as further:
            if not self._is_loss(further):
                raise
            return self._recover(further)
        self._at.ledger.reassign(assigned)
        return False

    def _unsure_parameters(self) -> bool:
        """Whether gathered parameters may be garbage: an aborted NCCL gather raises nothing."""
        overlapped = self._local.sharded and self._model[0].ddp_config.overlap_param_gather
        return overlapped and self._process.backend == "nccl"

    def _unsure_sums(self, error: Exception) -> bool:
        """Whether sums inside the replica may be garbage: an aborted NCCL collective raises nothing, and a micro-batch
        is done for the ledger while the device still computes it."""
        apart = self._at.phase == "computing" and not isinstance(error, _ReplicaStopped)
        return apart and self.layout.size > 1 and self._process.backend == "nccl"

    def _keep_or_drop(self, assigned: Sequence[int]) -> None:
        """Keep the replica's gradients if all of its ranks have the same micro-batches in them; otherwise drop them."""
        if self.layout.size == 1:
            if not self._gradients.intact:
                self._gradients.drop()
            return
        mine = Ledger.signature(self._at.ledger.done if self._gradients.intact else None)
        most, least = self._exchange.inside([mine, -mine])
        if most != -least or not self._gradients.intact or not set(self._at.ledger.done) <= set(assigned):
            self._gradients.drop()
            self._gradients.restore()
            self._at.ledger.drop()

    def _take_up_plan(self, plan: Plan, newcomer: bool) -> None:
        """Start to use the groups of `plan`, and take the training state if this rank lacks it."""
        self._process.groups_since = time.time_ns()
        self._gradients.adopt_groups()
        if self._member.inside:
            self._local.note_has_state()
        own = self._reporter.next_one
        self._at.iteration = self._handover.take_up(plan, newcomer, self._at.iteration, own)
        if self.slot in plan.joiners:
            self._local.note_has_state()
        self._gradients.seed = self._state.seed
        if self._member.came_new:
            self._stopping = False
            self._next_assignment = self._assignment_of(plan)
            self._at.moment = Ledger(self._at.iteration, self.micro_batches, []), "computing"
        if not plan.boundary:
            self.evaluations.agree(self._at.iteration, self._member.came_new)

    def _rescue(self, why: str) -> None:
        """Write this rank's state to disk: no controller leads the job any more, or all ranks end."""
        unfinished = self._local.sharded and self._committed and self._at.phase == "synced"
        if not unfinished:  # otherwise the ranks have parts of two states
            self._persistence.rescue(self._at.iteration, why)

    def _set_phase(self, phase: str) -> None:
        """Set the phase, which the channel's thread reports unless the step comes first."""
        self._at.moment = self._at.ledger, phase
