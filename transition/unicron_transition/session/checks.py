"""One rank's part in checks that nobody computes wrongly without being noticed: audits of gradients, and comparisons of
the replicas' states (:mod:`unicron_transition.iteration.audits` decides).

In an audit each replica first computes the first micro-batch of another one, and then its own. What the replicas found
goes with the commit, so no rank has changed a parameter when a difference is seen.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from unicron_detector.processes.rank_messages import Fault
from unicron_detector.words import number_spans
from unicron_transition.generations.layout import deal
from unicron_transition.iteration import audits
from unicron_transition.iteration.accumulation import Accumulation
from unicron_transition.iteration.audits import ROUNDS, Digest, Findings, Verdict, Weights
from unicron_transition.iteration.ledger import UNKNOWN, Ledger
from unicron_transition.iteration.rank_log import inform, warn
from unicron_transition.iteration.soundness import UnsoundIteration, norm_of
from unicron_transition.session.member import Member
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.tensor_transfer import checksum

AUDIT, COMPARE = "UNICRON_AUDIT", "UNICRON_COMPARE"
DEFAULTS = {AUDIT: 256, COMPARE: 64}
EXACT = 1 << 52  # whole numbers below it are exact in a float
NEVER = math.inf  # tolerance of a session whose gradients cannot be audited, until another rank joins
MOST_RETURNS = 3  # to a sound state without coming further


class CorruptState(Exception):
    """Some replica has computed wrongly, or has another state: all ranks go back to one that is known to be sound."""

    def __init__(self, verdict: Verdict):
        super().__init__(f"the replicas differ in their {verdict.what}")
        self.verdict = verdict


class LastingCorruption(UnsoundIteration):
    """Raised in all ranks if going back does not help. The job ends: new processes would measure anew how well
    gradients repeat, and take the fault for noise."""


class AuditAgain(Exception):
    """The audit's first round shows a difference: the iteration is computed once more, with other auditors."""


@dataclass
class _Round:
    """The findings of this rank in the present round of an audit."""

    own: Digest | None = None
    audited: tuple[int, Digest] | None = None
    state: float | None = None
    sums: list[float] = field(default_factory=list)
    """The numbers of :class:`audits.Weights`, as far as they are known."""


def settings(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (N: one micro-batch in N of each rank is audited, M: iterations between two comparisons); 0 for never.
    Raises ValueError."""
    found = []
    for name, usual in DEFAULTS.items():
        text = environment.get(name) or str(usual)
        if not text.isdecimal():
            raise ValueError(f"{name}={text!r}: write a whole number, 0 for never")
        found.append(int(text))
    return found[0], found[1]


@dataclass
class Checks:
    """The checks of one rank. They need an agent, which acts on what they find, and two replicas."""

    member: Member
    gradients: Accumulation
    state: TrainingState
    tells: Callable[[], bool]
    """Whether all members are of a release that knows checks."""
    wanted: tuple[int, int]
    """The numbers of :func:`settings`."""
    _total: int = 0  # micro-batches of the iteration
    _agreed: tuple[int, int] = (0, 0)  # of the generation, the largest that any member wants
    _generation: int = -1  # for which that was agreed
    _calibrating: bool = True  # no member has measured how well gradients repeat
    _tolerance: float = math.nan
    _round: _Round = field(default_factory=_Round)
    _rounds: list[list[Findings]] = field(default_factory=list)
    _furthest: int = -1  # iteration from which all have gone back
    _returns: int = 0  # without coming further

    # ------------------------------------------------------------ what is due
    def audits(self, iteration: int) -> bool:
        """Whether the present iteration is audited; the same in all members."""
        every, replicas = self._agreed[0], self.member.replicas
        if not every or replicas < 2 or self._generation != self.member.generation:
            return False
        total = self._total
        if total < replicas:
            return False
        each = max(1, -(-every * replicas // total))  # iterations: a replica has total / replicas of them
        return self._calibrating or bool(self._rounds) or iteration % each == 0

    @property
    def verifies(self) -> bool:
        """Whether the replicas compare their states at all; the same in all members."""
        return self._agreed[1] > 0 and self.member.replicas > 1 and self._generation == self.member.generation

    def compares(self, iteration: int) -> bool:
        """Whether the replicas compare their states in this iteration; the same in all members. They do so in each
        audit, which verifies a state only with that. The other way round, an audit in each comparison would cost more
        than N says where an iteration has few micro-batches."""
        every = self._agreed[1]
        if not every or self.member.replicas < 2 or self._generation != self.member.generation:
            return False
        return iteration % every == 0 or self.audits(iteration)

    # ------------------------------------------------------------ one iteration
    def begin_iteration(self, total: int) -> None:
        """Begin an iteration of so many micro-batches."""
        self._total, self._rounds = total, []
        self.forget()

    def forget(self) -> None:
        """Forget what was found in this iteration: it goes on otherwise."""
        self._round = _Round()
        self.gradients.weigh = None

    def _weigh(self, tensors: Iterable[torch.Tensor], after: bool) -> None:
        found = list(tensors)
        self._round.sums += [_difference(found)] if after else [_difference(found), norm_of(found)]

    def shift(self) -> int:
        """Return how many replicas further the auditor of each replica is in this round."""
        return 1 if not self._rounds or self.member.replicas < 3 else 2

    def compute(self, ledger: Ledger, compute: Callable[[Ledger], None]) -> None:
        """Compute the first micro-batches of another replica, and then of this one, and note their gradients."""
        layout, replicas, replica = self.member.layout, self.member.replicas, self.member.replica
        other = (replica - self.shift()) % replicas
        self.gradients.hold_reduces()
        self.gradients.weigh = self._weigh
        theirs = Ledger(
            ledger.iteration, ledger.total, deal(ledger.total, replicas, other, layout.lanes)[: layout.lanes]
        )
        try:
            compute(theirs)
            self._round.audited = other, self._digest()
        finally:
            self.gradients.drop()
        assigned = ledger.assigned
        ledger.assigned = assigned[: layout.lanes]
        try:
            compute(ledger)
        finally:
            ledger.assigned = assigned
        self._round.own = self._digest()

    def _digest(self) -> Digest:
        tensors = list(self.gradients.own_sum())
        return Digest(_bits(tensors), norm_of(tensors), _difference(tensors))

    # ------------------------------------------------------------ at the commit
    def statement(self, iteration: int) -> list[float]:
        """Return what this rank tells with the commit: as many numbers in all members."""
        if not self.tells():
            return []
        if self._generation != self.member.generation:
            unknown = math.isnan(self._tolerance)
            return [*map(float, self.wanted), float(unknown), UNKNOWN if unknown else self._tolerance]
        compares, audited = self.compares(iteration), self._round.own is not None
        if not compares and not audited:
            return []
        if compares:
            self._round.state = _bits(self.state.tensors())
        member, layout, found = self.member, self.member.layout, self._round
        place = member.slot % layout.size
        sums = Weights(*found.sums) if len(found.sums) == len(Weights._fields) else None
        return audits.pack_findings(
            place, layout.size, member.replica, member.replicas, found.own, found.audited, found.state, sums
        )

    def take_statements(self, iteration: int, numbers: Sequence[float]) -> bool:
        """Judge what the members have told; returns whether the state with which the iteration began is verified.
        Raises :class:`AuditAgain` or :class:`CorruptState`, in all members alike."""
        if not numbers:
            return False
        if self._generation != self.member.generation:
            self._agreed, self._generation = (int(numbers[0]), int(numbers[1])), self.member.generation
            self._agree_on_tolerance(some_new=numbers[2] > 0, largest=numbers[3])
            return False
        replicas, audited, compared = self.member.replicas, self._round.own is not None, self.compares(iteration)
        told = audits.unpack_findings(numbers, self.member.layout.size, replicas, self.shift())
        self._rounds.append(told)
        if (verdict := audits.differing_states(told)) is not None:
            raise CorruptState(verdict)
        if audited and not self._judge(replicas):
            return False
        if audited and len(self._rounds) == ROUNDS:
            self._note_mended(self._wrong_sums(self._rounds[0]), iteration)
        self._rounds = []
        return compared and (audited or not self._agreed[0])

    def _agree_on_tolerance(self, some_new: bool, largest: float) -> None:
        """Take the tolerance that others have measured. Measured again, it would be the error of a rank that computes
        wrongly and was started again, and then nobody would see that error any more."""
        self._calibrating = some_new and largest in (UNKNOWN, NEVER)
        if not self._calibrating:
            self._tolerance = largest

    def _judge(self, replicas: int) -> bool:
        """Judge the rounds so far; returns whether their gradients count."""
        sums = self._wrong_sums(self._rounds[-1])
        tolerance = 0.0 if self._calibrating else self._tolerance
        if len(self._rounds) < ROUNDS:
            if sums or not all(audits.agree(told, tolerance) for told in self._rounds[-1]):
                self.forget()
                raise AuditAgain
            self._tolerance, self._calibrating = tolerance, False
            return True
        if sums:
            raise CorruptState(Verdict("sum", frozenset(), frozenset(sums)))
        if self._calibrating:
            return self._calibrate(replicas)
        verdict = audits.wrong_gradients(self._rounds, replicas, self._tolerance)
        if verdict is not None:
            raise CorruptState(verdict)
        return True

    def _note_mended(self, sums: set[int], iteration: int) -> None:
        """Note that a sum was wrong in these replicas and is right in the second round: nothing follows from it."""
        if sums:
            fault = self.fault(Verdict("sum", frozenset(), frozenset(sums)), iteration)
            fault.text += ", and the right one when all summed again"
            self.member.note = fault
            self.member.publish("running")

    def _wrong_sums(self, rounds: Sequence[Findings]) -> set[int]:
        dtypes = {each.dtype for each in self.gradients.own_sum()}
        precision = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        return {of for told in rounds for of in audits.wrong_sum(told, precision, self.state.sharded)}

    def _calibrate(self, replicas: int) -> bool:
        found = audits.calibrate(self._rounds, replicas)
        self._calibrating, self._rounds = False, []
        self._tolerance = found.tolerance
        first = self.member.slot == min(self.member.members)
        if found.trouble:
            self._tolerance = NEVER
            self._agreed, self.wanted = (0, self._agreed[1]), (0, self.wanted[1])
            if first:
                warn(
                    f"gradients are not audited: {found.trouble}. fetch(iteration, index) and forward_step must depend "
                    "on these two numbers alone; if they do, a rank computes wrongly: unicronctl pair-test"
                )
        elif found.between and first:
            warn(
                "two ranks compute other gradients of the same micro-batch, each of them repeatably: up to "
                f"{found.tolerance:.1e} of their norm counts as equal. Unless their devices are of different kinds, "
                "a rank computes wrongly: unicronctl pair-test"
            )
        elif found.tolerance and first:
            inform(
                f"gradients do not repeat bit by bit here: up to {found.tolerance:.1e} of their norm counts as equal"
            )
        return not found.trouble

    def count_return(self, iteration: int) -> None:
        """Count that all ranks go back because of what they have found in `iteration`. Raises
        :class:`LastingCorruption` if they have done so in vain."""
        self._returns = self._returns + 1 if iteration <= self._furthest else 1
        self._furthest = max(self._furthest, iteration)
        if self._returns > MOST_RETURNS:
            raise LastingCorruption(
                f"the training went back {MOST_RETURNS} times to a sound state, and came no further than iteration "
                f"{self._furthest}: look at what `unicronctl events` says of it, and test its nodes (unicronctl "
                "pair-test)"
            )

    # ------------------------------------------------------------ texts
    def fault(self, verdict: Verdict, iteration: int) -> Fault:
        """Return a verdict as a fault for the controller."""
        member, size = self.member, self.member.layout.size

        def slots(replicas: Iterable[int]) -> str:
            found = [slot for one in replicas for slot in member.members[one * size : (one + 1) * size]]
            return number_spans("slot", found)

        what = "state of parameters and optimizer" if verdict.what == "state" else "gradient of one micro-batch"
        if verdict.what == "number":
            text = f"parameters are not finite on {slots(verdict.among)} at iteration {iteration}"
        elif verdict.what == "link":
            one = f"what comes from or goes to {slots(verdict.culprits)}"
            spoilt = one if verdict.culprits else f"what {slots(verdict.among)} send each other"
            text = f"a sum was wrong at iteration {iteration}: {spoilt} is spoilt"
        elif verdict.what == "sum":
            text = (
                f"{slots(verdict.among)} got another sum of gradients at iteration {iteration} than what all have sent"
            )
        elif verdict.culprits:
            text = f"{slots(verdict.culprits)} had another {what} than the other replicas at iteration {iteration}"
        else:
            text = (
                f"{slots(verdict.among)} differ in the {what} at iteration {iteration}; no majority says who is right"
            )
        slot = member.members[min(verdict.culprits) * size] if verdict.culprits else None
        return Fault("SilentCorruption", text, time.time(), iteration=iteration, culprit=slot)


def _bits(tensors: Iterable[torch.Tensor]) -> float:
    """Return a checksum of all bits of the tensors, a whole number that a float has exactly."""
    return float(int(checksum(*tensors)[0]) % EXACT)


def _difference(tensors: Iterable[torch.Tensor]) -> float:
    total = 0.0
    for each in tensors:
        flat = torch.view_as_real(each).reshape(-1) if each.is_complex() else each.reshape(-1)
        total += float(flat[::2].sum(dtype=torch.float64) - flat[1::2].sum(dtype=torch.float64))
    return total
