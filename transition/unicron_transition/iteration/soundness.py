"""Decides what an unsound iteration means: one with a loss or a gradient that is not finite, or whose gradient is far
larger than any before it (docs/design/soundness.md).

Such an iteration is no step. What is in an unsound gradient is computed once more, by other replicas. If it is sound
there, the hardware of the first one is suspect; if not, the micro-batch itself is at fault. All ranks judge the same
marks, so they decide alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from unicron_transition.iteration.ledger import UNKNOWN

MOST_TRIALS = 6  # of one iteration
SEEN, LEAST_SEEN = 64, 16  # norms that make a band, and those that it takes at least
FAR = 100.0  # times the largest norm of the band: of finite gradients that are tried once more
APART = 10.0  # times the middle of all replicas' norms: the replica whose sum makes the norm large
HALF = (torch.float16, torch.bfloat16)


class UnsoundIteration(RuntimeError):
    """Raised if no other try makes an iteration sound. The text says what is at fault, and what to do."""


class Band:
    """The norms of the latest gradients of one rank.

    >>> band = Band()
    >>> for norm in [1.0] * 20: band.note(norm)
    >>> band.is_far(50.0), band.is_far(1e6)
    (False, True)
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=SEEN)

    def note(self, norm: float) -> None:
        """Take in the norm of a step."""
        self._norms.append(norm)

    def is_far(self, norm: float) -> bool:
        """Whether a finite norm is far above all of the latest ones."""
        return len(self._norms) >= LEAST_SEEN and norm > FAR * max(self._norms) > 0.0


@dataclass(frozen=True)
class Marks:
    """The knowledge of all members about an unsound iteration. A replica is named by its data-parallel rank."""

    known: Mapping[int, int]
    """Micro-batches that are unsound by themselves: index -> replica that has computed it."""
    owners: Mapping[int, int]
    """Every micro-batch in a gradient: index -> replica."""
    norms: Sequence[float]
    """Each replica's norm before the reduce: infinite if it is not finite, UNKNOWN if it is not known any more."""

    def as_numbers(self, total: int) -> list[float]:
        """Return them as numbers whose maximum over all members has everything that any of them knows."""
        numbers = [UNKNOWN] * (2 * total)
        for start, marks in ((0, self.known), (total, self.owners)):
            for index, replica in marks.items():
                numbers[start + index] = replica
        return [*numbers, *self.norms]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float], total: int) -> Marks:
        """Return the marks in such numbers."""
        known, owners = (
            {index: int(replica) for index, replica in enumerate(numbers[start : start + total]) if replica >= 0}
            for start in (0, total)
        )
        return cls(known, owners, tuple(numbers[2 * total :]))

    def suspects(self) -> dict[int, int]:
        """Return index -> replica of what is unsound: by itself, or else all that is in a gradient that is not
        finite."""
        return dict(self.known) or self._in(replica for replica, norm in enumerate(self.norms) if norm == math.inf)

    def to_drop(self) -> dict[int, int]:
        """Return index -> replica of everything in the gradients with a suspect, or else in those that are far larger
        than the others."""
        return self._in(self.suspects().values()) or self._in(self._apart())

    def _in(self, replicas: Iterable[int]) -> dict[int, int]:
        wanted = set(replicas)
        return {index: replica for index, replica in self.owners.items() if replica in wanted}

    def _apart(self) -> list[int]:
        finite = sorted(norm for norm in self.norms if math.isfinite(norm))
        middle = finite[(len(finite) - 1) // 2] if finite else math.inf
        return [replica for replica, norm in enumerate(self.norms) if norm > APART * middle]


@dataclass
class Trial:
    """The tries of one iteration."""

    norm: float = math.inf
    """The norm of this rank's part of the gradient that was no step."""
    witnesses: Sequence[int] = ()
    """Slots of the ranks that saw in their own parts that it was none."""
    suspects: dict[int, int] = field(default_factory=dict)
    """Index -> the replica in which it was unsound first."""
    faulty: set[int] = field(default_factory=set)
    """Micro-batches that were unsound in two replicas, or twice in the only one."""
    tries: int = 0

    def judge(self, marks: Marks, replicas: int) -> set[int]:
        """Take in the marks of another try; return the micro-batches that it proves to be at fault."""
        self.tries += 1
        again = {
            index
            for index, replica in marks.known.items()
            if index in self.suspects and (replicas == 1 or self.suspects[index] != replica)
        }
        for index, replica in (marks.suspects() or marks.to_drop()).items():
            self.suspects.setdefault(index, replica)
        self.faulty |= again
        return again

    def repeats(self, norm: float) -> bool:
        """Whether a sound try with this norm has the gradient that was no step: then it was right."""
        return math.isfinite(self.norm) and norm > self.norm / 2

    def culprits(self, norm: float, replicas: int) -> dict[int, int]:
        """Return index -> replica of what was unsound there and is sound elsewhere, after a sound try with this norm.
        Nothing of a replica whose gradient had a faulty micro-batch in it, which explains the rest. Nothing at all if
        the gradient is as large as before: then it is right; nor if three or more replicas all had something unsound,
        for that has a common cause."""
        all_of_many = len(set(self.suspects.values())) == replicas > 2
        if self.repeats(norm) or all_of_many:
            return {}
        explained = {self.suspects[index] for index in self.faulty if index in self.suspects}
        return {index: replica for index, replica in self.suspects.items() if replica not in explained}


def deal_elsewhere(dropped: Mapping[int, int], replicas: int) -> dict[int, int]:
    """Deal the micro-batches of unsound gradients, index -> replica, to other replicas, if there are others.

    >>> deal_elsewhere({1: 1, 4: 1}, 3)
    {1: 0, 4: 2}
    """
    clean = [replica for replica in range(replicas) if replica not in dropped.values()]
    if clean:
        return {index: clean[number % len(clean)] for number, index in enumerate(sorted(dropped))}
    return {index: (replica + 1) % replicas for index, replica in dropped.items()}


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the norm of all numbers in the tensors together: not finite only if one of them is not."""
    parts = [each for each in tensors if each.numel()]
    if not parts:
        return 0.0
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32 if each.dtype in HALF else None) for each in parts]
    norm = float(torch.linalg.vector_norm(torch.stack([each.double() for each in norms])))
    if math.isfinite(norm) or not all(bool(torch.isfinite(each).all()) for each in parts):
        return norm
    return math.sqrt(sum(float(each.double().abs().square().sum()) for each in parts))
