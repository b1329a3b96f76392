"""A rank's work on each micro-batch, whatever it trains: data, random numbers and times; and the interface of the
gradients in which micro-batches add up."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unicron_detector.chaos.inject import injector
from unicron_detector.processes.rank_channel import name_micro_batch
from unicron_transition.generations.layout import Layout
from unicron_transition.iteration import flips, randomness
from unicron_transition.iteration.gradient_copies import Snapshots, Where
from unicron_transition.iteration.ledger import Ledger, LedgerError, Proof
from unicron_transition.iteration.soundness import norm_of

DRAIN_SECONDS = 10.0


class PeerLost(RuntimeError):
    """Raised when the generation is over: a member is gone, or its groups are broken."""


def wait_out(works: Iterable[Any], unblock: Callable[[], Any]) -> None:
    """Wait for pending reduces with broken connections (milliseconds), or raise :class:`LedgerError` after
    DRAIN_SECONDS."""
    deadline = time.monotonic() + DRAIN_SECONDS
    for work in works:
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise LedgerError(f"a reduce outlives its connections by {DRAIN_SECONDS:.0f} s")
            unblock()
            time.sleep(0.001)


@contextlib.contextmanager
def evaluating(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put all of the modules into evaluation mode, without gradients; afterwards each is in its own mode again."""
    modes = [(module, module.training) for each in modules for module in each.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(frozen=True)
class Sum:
    """A pending sum."""

    tensor: torch.Tensor
    """The tensor that is summed, in place."""
    work: Any
    """None in a world of one."""
    check: Callable[[], None]
    """Raises PeerLost if the sum may be garbage. To be called when the device is done with it."""

    def finish(self) -> torch.Tensor:
        """Wait for the sum, and return it. Raises RuntimeError or PeerLost if a peer is gone."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class DeferredChanges:
    """Changes beside those of the parameters, which are made only when the iteration is committed.

    Megatron updates the loss scale of fp16 and the biases of experts before the last communication of an iteration. If
    the iteration were reduced again after that, its micro-batches would be computed with other values than those that
    are in the gradient already. So these changes wait for the commit.
    """

    def __init__(self) -> None:
        self._changes: list[Callable[[], None]] = []

    def add(self, change: Callable[[], None]) -> None:
        """Make this change at the commit."""
        self._changes.append(change)

    def apply(self) -> None:
        """Make the changes: the iteration is committed."""
        changes, self._changes = self._changes, []
        for change in changes:
            change()

    def forget(self) -> None:
        """Drop the changes: the iteration is reduced again, or the state after it came from elsewhere."""
        self._changes.clear()


def scalers(optimizer: Any) -> list[Any]:
    """Return Megatron's gradient scalers in the script's optimizer."""
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    return [scaler for each in optimizers if (scaler := getattr(each, "grad_scaler", None)) is not None]


def hold_scalers(optimizer: Any, pending: DeferredChanges) -> None:
    """Make every scaler's update wait in `pending`."""

    def later(update: Callable[[bool], None]) -> Callable[[bool], None]:
        return lambda found_inf: pending.add(lambda: update(found_inf))

    for scaler in scalers(optimizer):
        scaler.update = later(scaler.update)


@dataclass(frozen=True)
class Work:
    """A rank's part in the training, from its session."""

    fetch: Callable[[int, int], Any]
    """`fetch(iteration, index)` returns a micro-batch that depends on nothing else, so any rank can compute it."""
    total: int
    """Micro-batches of an iteration."""
    lost: Callable[[], bool]
    """Whether the rank must stop computing: in a replica of several ranks only if one of them is gone."""
    over: Callable[[], bool]
    """Whether the generation is over."""
    layout: Layout
    place: int
    """The rank's place in its replica."""
    seed: int
    """Seed of the job's random numbers."""
    sharded: bool
    """Whether the optimizer is distributed; then reduces overwrite only this rank's own part."""
    healed: bool
    """Whether a reduce may have to be undone."""
    where: Where
    """The place of the copies that undo a reduce."""
    begin_sum: Callable[[torch.Tensor], Sum]
    """Begins the sum of a tensor over all replicas."""
    inside: Callable[[Sequence[float]], list[float]]
    """Returns the maximum of each number over the ranks of the replica."""
    pending: DeferredChanges
    """The changes that wait for the commit."""
    sequence: int
    """Tokens of a sample."""
    size: int
    """Samples of a micro-batch."""


class Accumulation(ABC):
    """The gradients of one rank, in which micro-batches add up with the weight 1/total each."""

    def __init__(self, work: Work):
        self._work, self.total, self.seed = work, work.total, work.seed
        self.weigh: Callable[[Iterable[torch.Tensor], bool], None] | None = None
        """weigh(tensors, after) is called with this rank's own sum before the reduce, and with its part of the result.
        Only while no reduce begins in a backward pass."""
        self.lost = work.lost
        self._snapshots = Snapshots(work.where)
        self._whole = True  # no part of a micro-batch is in the gradient
        self._at_hand: tuple[int, int] | None = None  # iteration and index of the present micro-batch
        self.seconds = {"data": 0.0, "forward": 0.0, "backward": 0.0}  # of the present iteration
        self._began = self._data_before = 0.0  # for the present micro-batch
        self._backward_since: float | None = None

    # ------------------------------------------------------------ what the session asks
    def begin_iteration(self, ordered: bool, total: int) -> None:
        """Begin an iteration of `total` micro-batches: zero the gradients, and forget how to undo a reduce. ordered:
        reduces must not start in the backward pass, since not all ranks have one or know its order yet."""
        self.drop()
        self.total = total
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    @abstractmethod
    def drop(self) -> None:
        """Drop all micro-batches from the gradient."""

    def compute(self, ledger: Ledger) -> None:
        """Compute forward and backward passes of everything that `ledger` still owes. Raises :class:`PeerLost` between
        two micro-batches once :attr:`lost`. Any other error names its micro-batch: if that fails on other ranks as
        well, no rank is at fault."""
        self._at_hand = None
        try:
            self._compute(ledger)
        except PeerLost:
            raise
        except Exception as error:
            if self._at_hand is not None:
                name_micro_batch(error, *self._at_hand)
            raise

    @abstractmethod
    def _compute(self, ledger: Ledger) -> None:
        """Do the work of :meth:`compute`."""

    @abstractmethod
    def evaluate(
        self, iteration: int, indices: Sequence[int], fetch: Callable[[int, int], Any]
    ) -> dict[int, tuple[torch.Tensor, Any]]:
        """Evaluate `fetch(iteration, index)` of each index in evaluation mode. Returns index -> (sum of losses, its
        divisor), nothing in stages without a loss. Raises :class:`PeerLost` between two micro-batches once the
        generation is over."""

    @abstractmethod
    def reduce(self, ledger: Ledger, proof: Proof) -> Proof:
        """Sum all gradients over the replicas, and with them the proof, whose sum is returned. Raises RuntimeError if a
        peer is gone."""

    @abstractmethod
    def proven(self, tokens: float) -> float:
        """Finish the reduce after the ledger's proof of all `tokens`; return the divisor of the sum of losses."""

    def parts(self, ledger: Ledger) -> list[float]:
        """Return what this rank knows of the losses of its replica, whose lanes and context ranks compute a part each:
        numbers whose maximum over the replica :meth:`take_parts` gets. Nothing where one rank knows them all."""
        return []

    def take_parts(self, ledger: Ledger, numbers: Sequence[float]) -> None:  # noqa: B027
        """Note the losses of the replica in the ledger."""

    def drain(self, unblock: Callable[[], Any]) -> None:  # noqa: B027
        """Wait for pending reduces, which would otherwise write into restored gradients later."""

    @property
    def undoable(self) -> bool:
        """Whether the reduces of this iteration that have begun can be undone. Without an agent nothing is copied."""
        return self._work.healed and self._snapshots.undoable

    def restore(self) -> bool:
        """Undo every reduce that has begun, so that this rank's own sum is in the gradient again. False if there were
        no copies for that; then the gradient is empty."""
        undoable = self.undoable
        if undoable:
            self._snapshots.restore()
        else:
            self.drop()
        return undoable

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the copies that undo a reduce."""
        return self._snapshots.size(self._tensors_to_reduce())

    @abstractmethod
    def _tensors_to_reduce(self) -> Iterator[torch.Tensor]:
        """Return the tensors that reduces overwrite."""

    @abstractmethod
    def _open_gradients(self) -> Iterator[flips.Entry]:
        """Return the gradients that no reduce has begun to overwrite, by parameter."""

    def adopt_groups(self) -> None:  # noqa: B027
        """Start to use the groups of another generation."""

    def spoilt(self) -> None:
        """Note that the gradient must not be trusted."""
        self._whole = False

    @property
    def intact(self) -> bool:
        """Whether no part of a micro-batch is in the gradient; False after an error in a backward pass."""
        return self._whole

    @property
    def group(self) -> int:
        """Micro-batches that a virtual pipeline computes together."""
        return 1

    @property
    def first(self) -> bool:
        """Whether the order of the gradients in the backward pass matters and is not known yet."""
        return False

    # ------------------------------------------------------------ its size
    def norm(self) -> float:
        """Return the norm of this rank's part of the reduced gradient; not finite if a number in it is not."""
        return norm_of(self._reduce_result())

    def own_norm(self) -> float:
        """Return the norm of this rank's own sum, before the reduce."""
        return norm_of(self.own_sum())

    def _weigh_sum(self, tensors: Iterable[torch.Tensor], after: bool) -> None:
        if self.weigh is not None:
            self.weigh(tensors, after)

    @abstractmethod
    def _reduce_result(self) -> Iterable[torch.Tensor]:
        """Return the gradients that a reduce has summed."""

    @abstractmethod
    def own_sum(self) -> Iterable[torch.Tensor]:
        """Return all gradients."""

    @abstractmethod
    def hold_reduces(self) -> None:
        """Begin no reduce in a backward pass of this iteration: its schedule is computed in several pieces."""

    # ------------------------------------------------------------ one micro-batch
    def _begin_evaluation(self, iteration: int, index: int, **coordinate: int) -> None:
        if self._work.over():
            raise PeerLost("a member of the generation is gone")
        randomness.seed(self.seed, iteration, index, **coordinate)

    def _fetch(self, iteration: int, index: int) -> Any:
        began = time.perf_counter()
        self._at_hand = iteration, index
        micro_batch = self._work.fetch(iteration, index)
        self.seconds["data"] += time.perf_counter() - began
        return micro_batch

    def _next(self) -> None:
        """End the last micro-batch, and begin another one."""
        self._end_backward(time.perf_counter())
        injector.point()
        self._began, self._data_before = time.perf_counter(), self.seconds["data"]

    def _begin_forward(self, ledger: Ledger, index: int, **coordinate: int) -> None:
        if self.lost():
            raise PeerLost("a member of the generation is gone")
        self._at_hand = ledger.iteration, index
        randomness.seed(self.seed, ledger.iteration, index, **coordinate)

    def _begin_backward(self) -> None:
        """Note that the loss is there."""
        self._whole = False
        self._backward_since = time.perf_counter()
        self.seconds["forward"] += self._backward_since - self._began - (self.seconds["data"] - self._data_before)

    def _end_backward(self, now: float) -> None:
        """Note that the last backward pass, if there is one, is over."""
        if self._backward_since is not None:
            flips.after_backward(self._open_gradients)
            injector.slow_down(now - self._began)
            self.seconds["backward"] += time.perf_counter() - self._backward_since
            self._backward_since = None

    def _finish(self, ledger: Ledger, indices: Sequence[int]) -> None:
        self._whole, self._at_hand = True, None
        for index in indices:
            ledger.finish(index)
