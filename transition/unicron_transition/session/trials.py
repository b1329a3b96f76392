"""One rank's part in the judgement of its iterations: whether a step is sound, and the tries of one that is not
(:mod:`unicron_transition.iteration.soundness` decides)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from unicron_detector.processes.rank_channel import name_micro_batch
from unicron_detector.processes.rank_messages import Fault
from unicron_detector.words import number_spans
from unicron_transition.generations.layout import deal
from unicron_transition.iteration.accumulation import Accumulation
from unicron_transition.iteration.audits import Verdict
from unicron_transition.iteration.exchange import Exchange
from unicron_transition.iteration.ledger import UNKNOWN, Ledger
from unicron_transition.iteration.rank_log import warn
from unicron_transition.iteration.soundness import (
    MOST_TRIALS,
    Band,
    Marks,
    Trial,
    UnsoundIteration,
    deal_elsewhere,
    norm_of,
)
from unicron_transition.seams.dtensors import local
from unicron_transition.session import link_search
from unicron_transition.session.checks import CorruptState
from unicron_transition.session.member import Member
from unicron_transition.snapshot.migrate import TrainingState

TRIES_OF_A_SUM = 2  # that were not sound although each micro-batch was: then somebody spoils what is sent


class OnBadBatch(StrEnum):
    """The choice for a micro-batch that is at fault itself."""

    END = "end"
    SKIP = "skip"


@dataclass(frozen=True)
class Retry:
    """The way on of this rank's replica with an iteration that was no step."""

    drops: bool
    """Its gradient is unsound."""
    assigned: list[int]
    skipped: frozenset[int]
    """Micro-batches that nobody computes from now on; then all replicas drop their gradients."""


class Trials:
    """The judgement of one rank's iterations."""

    def __init__(
        self,
        member: Member,
        exchange: Exchange,
        gradients: Accumulation,
        state: TrainingState,
        on_bad: OnBadBatch,
        scaled: bool,
    ):
        self._member, self._exchange, self._gradients, self._on_bad = member, exchange, gradients, on_bad
        self._state = state
        self._scaled = scaled  # a gradient scaler skips steps with an overflow by itself
        self._band = Band()
        self._trial: Trial | None = None
        self._norm = 0.0
        self._apart: dict[int, int] = {}  # index -> replica, of what was unsound when it was computed alone
        self.unsound = False
        """This rank has seen that the reduced iteration is no step."""
        self.can_go_back: Callable[[], bool] = lambda: False
        """Whether states are verified, to which all members can go back; the same in all of them."""

    @property
    def under_way(self) -> bool:
        """Whether the present iteration was no step before."""
        return self._trial is not None

    def begin_iteration(self) -> None:
        """Begin an iteration, or begin it anew under a plan."""
        self._trial, self.unsound = None, False
        self._apart.clear()

    # ------------------------------------------------------------ one try
    def note_reduced(self, loss: float) -> None:
        """Judge the reduced gradient, which is the same in all ranks with the same part of it, and the mean loss."""
        self._norm = 0.0 if self._scaled else self._gradients.norm()
        far = self._trial is None and self._band.is_far(self._norm)
        self.unsound = not math.isfinite(loss) or not math.isfinite(self._norm) or far

    def note_apart(self, ledger: Ledger, indices: list[int]) -> None:
        """Note whether these micro-batches, which alone were computed since the last call, are sound."""
        sound = self._scaled or math.isfinite(self._gradients.own_norm())
        for index in indices:
            if not sound and not self._apart:  # later ones add to the same gradient
                self._apart[index] = self._member.replica

    def marks(self, ledger: Ledger, kept: bool) -> Marks:
        """Return what this rank knows of the iteration that was no step. kept: the reduce was undone, so the gradient
        is this rank's own sum."""
        replicas, replica = self._member.replicas, self._member.replica
        unsound = [index for index in ledger.done if not math.isfinite(ledger.loss_of(index))]
        known = {**dict.fromkeys(unsound, replica), **self._apart}
        self._apart.clear()
        norms = [UNKNOWN] * replicas
        if kept and ledger.done and not self._scaled:
            norm = self._gradients.own_norm()
            norms[replica] = norm if math.isfinite(norm) else math.inf
        return Marks(known, dict.fromkeys(ledger.done, replica), norms)

    def retry(self, ledger: Ledger, mine: Marks, loss: float) -> Retry:
        """Agree with all members on the next try; collective. Raises :class:`UnsoundIteration` if there is none, and
        PeerLost or RuntimeError if a member is gone; :class:`CorruptState` if parameters are not finite, or a rank
        spoils what it sends."""
        if self._trial is None and self.can_go_back():  # else its images and files would hold such numbers as well
            self._check_parameters()
        members = self._member.members
        saw = [1.0 if self.unsound and slot == self._member.slot else UNKNOWN for slot in members]
        told = mine.as_numbers(ledger.total)
        heard = self._exchange.most([*told, *saw])
        if self._trial is None:
            witnesses = [slot for slot, seen in zip(members, heard[len(told) :], strict=True) if seen != UNKNOWN]
            self._trial = Trial(self._norm if math.isfinite(loss) else math.inf, witnesses)
        trial, replicas, replica = self._trial, self._member.replicas, self._member.replica
        marks = Marks.from_numbers(heard[: len(told)], ledger.total)
        if faulty := trial.judge(marks, replicas):
            return self._without(ledger, faulty)
        if trial.tries > MOST_TRIALS:
            raise UnsoundIteration(
                f"iteration {ledger.iteration} is not sound after {MOST_TRIALS} tries, and no micro-batch is at fault "
                "by itself: the sums of its gradients are not finite; check the links between the nodes"
            )
        dropped = marks.to_drop()
        if not dropped and trial.tries >= TRIES_OF_A_SUM and self.can_go_back():
            verdict = link_search.search(self._member, self._exchange, self._gradients.own_sum())
            if verdict.culprits:
                raise CorruptState(verdict)
        comes = [index for index, of in deal_elsewhere(dropped, replicas).items() if of == replica]
        drops = replica in dropped.values()
        return Retry(drops, [*([] if drops else ledger.assigned), *comes], ledger.skipped)

    def _without(self, ledger: Ledger, faulty: set[int]) -> Retry:
        """Return how to go on without these micro-batches. Raises :class:`UnsoundIteration` unless the script allows
        that."""
        left = [index for index in range(ledger.total) if index not in ledger.skipped and index not in faulty]
        first = min(faulty)
        where = "on two replicas" if self._member.replicas > 1 else "twice"
        if not left:
            self._check_parameters()
            error = UnsoundIteration(
                f"iteration {ledger.iteration} has no sound micro-batch: their losses or gradients are not finite, "
                f"{where} each. The training has diverged, or its state is unsound: go back to an older checkpoint"
            )
        else:
            error = UnsoundIteration(
                f"{number_spans('micro-batch', faulty)} of iteration {ledger.iteration} "
                f"{'is' if len(faulty) == 1 else 'are'} at fault: not finite {where}. Look at "
                f'fetch({ledger.iteration}, {first}), or leave such out with Session(on_bad_batch="skip")'
            )
        if self._on_bad is OnBadBatch.END or not left:
            name_micro_batch(error, ledger.iteration, first)
            raise error
        if self._member.replica == 0:
            text = (
                f"{number_spans('micro-batch', faulty)} of iteration {ledger.iteration}: not finite {where}, so the "
                "data or the model is at fault: left out (on_bad_batch=skip)"
            )
            self._report("UnsoundMicroBatch", text, ledger.iteration, first)
        own = deal(len(left), self._member.replicas, self._member.replica, self._member.layout.lanes)
        return Retry(True, [left[one] for one in own], ledger.skipped | faulty)

    def _check_parameters(self) -> None:
        """Raise :class:`CorruptState` in all members if a parameter of one of them is not finite; collective."""
        replicas = self._member.replicas
        mine = not math.isfinite(norm_of(local(each) for tree in self._state.trees for each in tree.parameters))
        own = [float(mine and replica == self._member.replica) for replica in range(replicas)]
        among = frozenset(replica for replica, bad in enumerate(self._exchange.most(own)) if bad > 0)
        if among:
            raise CorruptState(Verdict("number", among if len(among) < replicas else frozenset(), among))

    # ------------------------------------------------------------ the end
    def settle_iteration(self, ledger: Ledger) -> None:
        """The iteration is a step: name who made its first try unsound, if anybody did."""
        if math.isfinite(self._norm):  # with a member of release 0.2 nothing is refused
            self._band.note(self._norm)
        trial, self._trial = self._trial, None
        if trial is None:
            return
        size, members = self._member.layout.size, self._member.members
        culprits = trial.culprits(self._norm, self._member.replicas)
        if not trial.suspects and not trial.faulty and not trial.repeats(self._norm):
            text = (
                f"the sum of the gradients of iteration {ledger.iteration} was not sound, and it was when summed "
                "again: what each rank had computed is not at fault, so check the links between the nodes"
            )
            if self._member.slot == min(trial.witnesses or members):
                self._report("SilentCorruption", text, ledger.iteration)
        # of shards, only the ranks with the unsound part know how large it was before
        innocent = [slot for slot in trial.witnesses if members.index(slot) // size not in culprits.values()]
        others = innocent or list(trial.witnesses) or members
        by = [*sorted(others), *(slot for slot in members if slot not in others)]
        for reporter, replica in zip(by, sorted(set(culprits.values())), strict=False):
            if self._member.slot != reporter:  # each names one: a rank's next note takes the place of its last
                continue
            indices = [index for index, of in culprits.items() if of == replica]
            slots = members[replica * size : (replica + 1) * size]
            text = (
                f"{number_spans('micro-batch', indices)} of iteration {ledger.iteration} made a loss or a gradient "
                f"that is not sound on {number_spans('slot', slots)}, and a sound one when computed again"
            )
            self._report("UnsoundRank", text, ledger.iteration, indices[0], slots[0])

    def _report(self, kind: str, text: str, iteration: int, index: int | None = None, slot: int | None = None) -> None:
        warn(text)
        self._member.note = Fault(kind, text, time.time(), iteration=iteration, micro_batch=index, culprit=slot)
        self._member.publish("running")
