"""The micro-batch ledger: which micro-batches of an iteration are in this rank's gradient, and which were computed.

The micro-batch is the unit of reuse; each is in exactly one rank's gradient sum when the optimizer steps
(docs/design/micro-batch-reuse.md).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class LedgerError(RuntimeError):
    """Raised if a micro-batch would be counted twice or not at all: the optimizer must not step."""


class Proof(NamedTuple):
    """A rank's statement of what is in its gradient, or the sum over all ranks: numbers for each micro-batch."""

    counts: list[int]
    wishes: list[int]
    """Only the first one is used: ranks that want to stop."""
    losses: list[float]
    """Only one replica has that of a micro-batch."""
    tokens: list[float]
    """Likewise."""

    def tensor(self) -> torch.Tensor:
        """Return it as a tensor of four rows, which can be summed over the ranks."""
        return torch.tensor(self, dtype=torch.float64)

    @classmethod
    def of(cls, rows: torch.Tensor) -> Proof:
        """Return the proof that is in such a tensor."""
        small, numbers = rows[:2].round().to(torch.int64).tolist(), rows[2:].tolist()
        return cls(*small, *numbers)

    @property
    def loss(self) -> float:
        """The sum of all losses."""
        return _sum(self.losses)

    @property
    def all_tokens(self) -> float:
        """The sum of all tokens; 0 unless the loss is per token."""
        return _sum(self.tokens) if any(self.tokens) else 0.0


def _sum(numbers: list[float]) -> float:
    """Return the sum in torch's order, which the ranks of all releases have in common: a state's mark depends on it."""
    return float(torch.tensor(numbers, dtype=torch.float64).sum())


class Loss(NamedTuple):
    """The loss of a micro-batch, or of the part of its sequences that one rank has."""

    loss: Any
    tokens: Any
    """None for a mean loss."""


UNKNOWN = -math.inf  # less than any number of a rank that knows it
MEAN = -1.0  # in place of the tokens of a mean loss
NUMBERS = 3  # for each part: the loss if it is finite, its tokens, and whether it is not finite


def tell_parts(known: Mapping[int, Loss], indices: Sequence[int], parts: int, part: int) -> list[float]:
    """Return what this rank knows of the losses of `indices`, as numbers whose maximum over the replica's ranks tells
    all of it. known: index -> loss of what this rank has computed, which is number `part` of `parts`."""
    numbers = [UNKNOWN] * (NUMBERS * parts * len(indices))
    for place, index in enumerate(indices):
        if index in known:
            loss, first = float(known[index].loss), NUMBERS * (place * parts + part)
            tokens = known[index].tokens
            finite = math.isfinite(loss)
            own = [loss if finite else UNKNOWN, MEAN if tokens is None else float(tokens), float(not finite)]
            numbers[first : first + NUMBERS] = own
    return numbers


def hear_parts(numbers: Sequence[float], indices: Sequence[int], parts: int) -> dict[int, Loss]:
    """Return index -> loss from the maximum of all ranks' numbers: the sum of its parts, or the mean of mean losses.
    Raises :class:`LedgerError` for one that no rank has computed."""
    found = {}
    for place, index in enumerate(indices):
        first = NUMBERS * parts * place
        rows = [numbers[start : start + NUMBERS] for start in range(first, first + NUMBERS * parts, NUMBERS)]
        if any(tokens == UNKNOWN for _, tokens, _ in rows):
            raise LedgerError(f"no rank of the replica has computed micro-batch {index}, or a part of it")
        loss = sum(math.nan if bad > 0 else loss for loss, _, bad in rows)
        mean = rows[0][1] == MEAN
        found[index] = Loss(loss / parts, None) if mean else Loss(loss, sum(tokens for _, tokens, _ in rows))
    return found


@dataclass
class Ledger:
    """The work of one rank in one iteration."""

    iteration: int
    total: int
    """Micro-batches of the iteration, over all ranks."""
    assigned: list[int]
    done: list[int] = field(default_factory=list)
    """The micro-batches in the gradient buffer, in the order of their backward passes."""
    computed: list[int] = field(default_factory=list)
    """All that were computed, including those that were dropped since."""
    losses: dict[int, Any] = field(default_factory=dict)
    """Index -> 0-d tensor, unscaled."""
    tokens: dict[int, Any] = field(default_factory=dict)
    """Index -> 0-d tensor, of a loss per token."""
    shared: dict[int, Loss] = field(default_factory=dict)
    """Index -> loss of the replica, of whose ranks each has computed a part only."""
    skipped: frozenset[int] = frozenset()
    """Micro-batches that are at fault, and in no gradient."""

    def todo(self) -> list[int]:
        """Return the micro-batches that are assigned and not yet in the gradient."""
        finished = set(self.done)
        return [index for index in self.assigned if index not in finished]

    def finish(self, index: int) -> None:
        """Note that the backward pass of `index` is over. Raises :class:`LedgerError` for an index that is not owed."""
        if index in self.done or index not in self.assigned:
            raise LedgerError(
                f"micro-batch {index} of iteration {self.iteration} is not owed by this rank: owed "
                f"{self.assigned}, done {self.done}"
            )
        self.done.append(index)
        self.computed.append(index)

    def drop(self) -> None:
        """Note that the gradient is empty."""
        self.done = []

    def discard(self) -> None:
        """Note that the gradient is empty because it was not sound: what was in it does not count as computed."""
        for index in self.done:
            self.computed.remove(index)
        self.drop()

    def reassign(self, indices: Iterable[int]) -> None:
        """Adopt a plan's assignment. Raises :class:`LedgerError` if it drops work that is already in the gradient."""
        assigned = list(indices)
        dropped = set(self.done) - set(assigned)
        if dropped:
            raise LedgerError(f"the plan for iteration {self.iteration} drops finished micro-batches {sorted(dropped)}")
        self.assigned = assigned

    def loss_of(self, index: int) -> float:
        """Return the loss of a micro-batch, as far as this rank knows it."""
        shared = self.shared.get(index)
        return float(shared.loss if shared else self.losses.get(index, 0.0))

    def proof(self, wish: bool) -> Proof:
        """Return this rank's part of the proof. wish: this rank's own."""
        counts, wishes = [0] * self.total, [0] * self.total
        losses, tokens = [0.0] * self.total, [0.0] * self.total
        wishes[0] = int(wish)
        for index in self.done:
            counts[index] += 1
            loss, count = self.shared.get(index) or Loss(self.losses.get(index, 0.0), self.tokens.get(index))
            losses[index] = float(loss)
            tokens[index] = 0.0 if count is None else float(count)
        return Proof(counts, wishes, losses, tokens)

    @staticmethod
    def signature(done: Sequence[int] | None) -> float:
        """Return a number for a set of micro-batches in any order; None, for an unfinished one, has its own."""
        text = "none" if done is None else ",".join(map(str, sorted(done)))
        return float(zlib.crc32(text.encode()))

    @staticmethod
    def check_counts(iteration: int, counts: Sequence[int], skipped: Collection[int] = ()) -> None:
        """Raise :class:`LedgerError` unless each micro-batch i is in one gradient of the job, `counts[i]` is 1, and a
        skipped one in none."""
        wrong = {index: count for index, count in enumerate(counts) if count != (index not in skipped)}
        if wrong:
            raise LedgerError(f"iteration {iteration}: micro-batches not counted exactly once (index: count): {wrong}")


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, for a training script."""

    iteration: int
    """Its number, from 0 on."""
    loss: float
    """Mean over all micro-batches of the iteration, the same number on every rank."""
    grad_norm: float | None
    """Norm of all gradients, if they are clipped."""
    learning_rate: float
    seconds: float
    """From the start of the iteration to its step."""
    generation: int
    world_size: int
    """Ranks that trained in it."""
