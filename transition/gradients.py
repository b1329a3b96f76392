"""The gradient side of an iteration: compute micro-batches, snapshot buckets before their reduce, reduce, restore.

Seams into megatron-core, none of its sources changed: `config.finalize_model_grads_func` is taken out of the schedule
and called here; `_ParamAndGradBucketGroup.start_grad_sync` is wrapped for the snapshot. Every micro-batch weighs
1/total whatever rank computes it: the schedule divides a loss by the number of micro-batches of its call, so the loss
is multiplied by that number over the total, and the DDP scaling factor is 1 with a SUM reduce. A loss per token is
divided by the tokens of all micro-batches after the reduce, whoever counted them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from detector.inject import injector
from transition import elastic_buckets, groups, randomness
from transition.gradient_slices import own_parts_only
from transition.layout import Layout
from transition.ledger import Ledger, LedgerError
from transition.snapshots import Snapshots, Where

DRAIN_SECONDS = 10.0
UNBLOCK_SECONDS = 0.02  # between two tries to free what is waited for


@contextlib.contextmanager
def again_and_again(unblock: Callable[[], Any]) -> Iterator[None]:
    """Inside, a thread goes on freeing what waits: what was not there to be freed before."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(UNBLOCK_SECONDS):
            unblock()

    thread = threading.Thread(target=repeat, name="unicron-drain", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class PeerLost(RuntimeError):
    """The generation is over: a member is gone, or its groups are broken."""


class Gradients:
    """Owns the DDP model chunks of one rank. `over()` tells whether the generation is over, `lost()` whether the
    schedule cannot go on either: in a replica of several ranks only when one of them is gone.

    forward_step: Megatron's `forward_step_func(data_iterator, model) -> (output, loss_func)`. fetch: `fetch(iteration,
    index)` -> one micro-batch, a function of nothing else, so that any rank can compute any of them. place: of this
    rank in its replica. seed: of the job's random numbers. sharded: by a distributed optimizer, whose reduces overwrite
    this rank's own part only. healed: a reduce may have to be undone; where: the copies for that.
    """

    def __init__(
        self,
        model: Sequence[Any],
        forward_step: Callable[..., Any],
        fetch: Callable[[int, int], Any],
        total: int,
        schedule_arguments: dict[str, Any],
        lost: Callable[[], bool],
        over: Callable[[], bool],
        on_progress: Callable[[], None],
        layout: Layout,
        place: int = 0,
        seed: int = 0,
        sharded: bool = False,
        healed: bool = True,
        where: Where = Where.CARD,
    ):
        from megatron.core.utils import get_model_config

        self.model, self.forward_step, self.fetch, self.total = list(model), forward_step, fetch, total
        self.schedule_arguments, self.lost, self.over, self.on_progress = schedule_arguments, lost, over, on_progress
        self.layout, self._coordinate, self.seed = layout, layout.coordinate(place)._asdict(), seed
        self.config = get_model_config(self.model[0])
        self.per_token = bool(self.config.calculate_per_token_loss)
        self._sharded, self._healed, self._snapshots = sharded, healed, Snapshots(where)
        self._deferred: RuntimeError | None = None
        self._in_backward = False
        self._ordered = False  # reduces start after the schedule, in the same order in all ranks
        self._whole = True  # no micro-batch is in the gradient in part
        self.seconds = {"data": 0.0, "forward": 0.0, "backward": 0.0}  # of the present iteration
        self._began = 0.0  # the micro-batch at hand
        self._backward_since: float | None = None
        for group in self._bucket_groups():
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0
            self._wrap_start(group)

    def _bucket_groups(self) -> list[Any]:
        return [group for chunk in self.model for group in groups.bucket_groups(chunk)]

    # ------------------------------------------------------------ computing
    def begin(self, ordered: bool) -> None:
        """A new iteration: zero the gradients, forget the snapshots. ordered: overlapped reduces must not start from
        the backward pass, since not all ranks have one, or know its order yet."""
        self.drop()
        self._ordered = ordered
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def drop(self) -> None:
        """Nothing is in the gradient any more."""
        for group in self._bucket_groups():  # Megatron asserts that a first backward pass was seen whole, or not
            if group.is_first_batch and len(group.per_param_grad_ready_counts) < len(group.params):
                group.per_param_grad_ready_counts = {}
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self._snapshots.forget()
        self._deferred, self._whole = None, True

    def spoilt(self) -> None:
        """What is in the gradient is not to be trusted."""
        self._whole = False

    @property
    def first(self) -> bool:
        """Megatron has not yet seen in which order the backward pass of this process makes its gradients."""
        overlapped = (group for group in self._bucket_groups() if group.ddp_config.overlap_grad_reduce)
        return any(group.is_first_batch for group in overlapped)

    def compute(self, ledger: Ledger) -> None:
        """Forward and backward of everything that `ledger` still owes, in one schedule. Raises :class:`PeerLost`
        between two micro-batches; in a replica of several ranks only when one of them is lost."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        owed = ledger.todo()
        if not owed:
            self._gather_parameters()
            return
        for group in self._bucket_groups():
            group.per_param_grad_ready_counts = {}
        count = self._padded(len(owed))
        iterators = [self._data(ledger.iteration, owed, count) for _ in self.model]
        with self._schedule_configuration():
            self._in_backward = True
            try:
                get_forward_backward_func()(
                    forward_step_func=self._forward(ledger, owed, count),
                    data_iterator=iterators if len(iterators) > 1 else iterators[0],
                    model=self.model,
                    num_microbatches=count,
                    **self.schedule_arguments,
                )
            finally:
                self._in_backward = False
                self._end_backward(time.perf_counter())
        self._finished(ledger, owed if self.layout.size > 1 else owed[-1:])

    def _gather_parameters(self) -> None:
        """What the forward pass would have begun with, where gathers are overlapped with it."""
        if self._sharded and self.model[0].ddp_config.overlap_param_gather:
            elastic_buckets.gather_without_forward(self.model)

    def _padded(self, count: int) -> int:
        """The interleaved schedule takes whole groups of micro-batches only: what is missing is computed once more,
        with the weight 0."""
        if len(self.model) == 1:
            return count
        group = self.config.microbatch_group_size_per_vp_stage or self.layout.pipeline
        return -(-count // group) * group

    def _finished(self, ledger: Ledger, indices: Sequence[int]) -> None:
        self._whole = True
        for index in indices:
            ledger.finish(index)
        self.on_progress()

    @property
    def intact(self) -> bool:
        """No micro-batch is in the gradient in part. False after an error in the middle of a backward pass."""
        return self._whole

    @contextlib.contextmanager
    def _schedule_configuration(self) -> Iterator[None]:
        """The schedule only accumulates."""
        # A rank without work would take no part in param_sync_func's gathers; the forward passes gather, too.
        taken = ["finalize_model_grads_func", "param_sync_func", *(["grad_sync_func"] if self._ordered else [])]
        before = {name: getattr(self.config, name) for name in taken}
        for name in taken:
            setattr(self.config, name, None)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(self.config, name, function)

    def _data(self, iteration: int, indices: Sequence[int], count: int) -> Iterator[Any]:
        for number in range(count):
            began = time.perf_counter()
            micro_batch = self.fetch(iteration, indices[min(number, len(indices) - 1)])
            self.seconds["data"] += time.perf_counter() - began
            yield micro_batch

    def _end_backward(self, now: float) -> None:
        """The backward pass that began when the last loss was there is over."""
        if self._backward_since is not None:
            injector.slow_down(now - self._began)
            self.seconds["backward"] += time.perf_counter() - self._backward_since
            self._backward_since = None

    def _forward(self, ledger: Ledger, owed: Sequence[int], count: int) -> Callable[..., Any]:
        passed = [0] * len(self.model)  # forward passes so far, by chunk
        alone = self.layout.size == 1

        def forward_step(data_iterator: Any, model: Any, *rest: Any) -> Any:
            self._end_backward(time.perf_counter())
            injector.point()
            self._began = began = time.perf_counter()
            data_before = self.seconds["data"]
            chunk = next(number for number, one in enumerate(self.model) if one is model)
            number, passed[chunk] = passed[chunk], passed[chunk] + 1
            if alone and number:  # the schedule asks for the next forward when the backward before it is over
                self._finished(ledger, [owed[number - 1]])
            if self.lost():
                raise PeerLost("a member of the generation is gone")
            real = number < len(owed)
            index = owed[min(number, len(owed) - 1)]
            randomness.seed(self.seed, ledger.iteration, index, chunk=chunk, **self._coordinate)
            self._whole = self._whole and alone
            output, loss_function = self.forward_step(data_iterator, model, *rest)

            def weighted(*arguments: Any, **keywords: Any) -> Any:
                loss, *others = loss_function(*arguments, **keywords)
                self._whole = False
                self._backward_since = time.perf_counter()
                self.seconds["forward"] += self._backward_since - began - (self.seconds["data"] - data_before)
                return self._weighted(ledger, index, loss, others, count, real)

            return output, weighted

        return forward_step

    def _weighted(
        self, ledger: Ledger, index: int, loss: torch.Tensor, others: list[Any], count: int, real: bool
    ) -> tuple[Any, ...]:
        """What Megatron gets of the script's (loss, log) or (sum of losses, tokens, log); the ledger notes it."""
        tokens = others[0] if len(others) == 2 else None
        if self.per_token and tokens is None:
            raise groups.UnsupportedLayout(
                "calculate_per_token_loss needs a loss function that returns (sum of losses, tokens, log)"
            )
        if real:
            mean = loss if tokens is None or self.per_token else loss / tokens.clamp(min=1)
            ledger.losses[index] = mean.detach().clone()
            ledger.tokens[index] = tokens.detach().clone() if self.per_token and tokens is not None else None
        elif self.per_token and tokens is not None:
            others[0] = tokens * 0
        weight = 1.0 if self.per_token else count / self.total
        return (loss * (weight if real else 0.0), *others)

    # ------------------------------------------------------------ reducing
    def reduce(self, ledger: Ledger) -> None:
        """Reduce all gradients over the data-parallel group and finalize them. Raises RuntimeError when a peer is
        gone."""
        from megatron.core.distributed import finalize_model_grads

        if self._deferred is not None:
            raise PeerLost(f"a bucket's reduce failed: {self._deferred}")
        if self._ordered:
            self._dispatch_overlapped()
        with own_parts_only(self.model) if self._sharded else contextlib.nullcontext():
            (self.config.finalize_model_grads_func or finalize_model_grads)(self.model, self._tokens(ledger))

    def _tokens(self, ledger: Ledger) -> torch.Tensor | None:
        """Of the micro-batches in this rank's gradient, as the schedule would count them."""
        if not self.per_token:
            return None
        total = torch.zeros((), dtype=torch.int, device=self._device())
        for index in ledger.done:
            if (tokens := ledger.tokens.get(index)) is not None:  # the last stage counts
                total += tokens.to(total.dtype)
        return total

    def _device(self) -> torch.device:
        return next(self.model[0].module.parameters()).device

    def _dispatch_overlapped(self) -> None:
        """With overlapped reduces the backward hooks start them: not for gradients that were kept, nor in a rank that
        had nothing to compute."""
        for group in self._bucket_groups():
            if group.ddp_config.overlap_grad_reduce and not group.is_first_batch and group.grad_reduce_handle is None:
                group.start_grad_sync()

    def _wrap_start(self, group: Any) -> None:
        original = group.start_grad_sync

        def start_grad_sync(*arguments: Any, **keywords: Any) -> Any:
            if self._in_backward and self._ordered:
                return None
            if self._in_backward and (self._deferred is not None or self.over()):
                self._deferred = self._deferred or PeerLost("a member of the generation is gone")
                return None  # raising inside an autograd hook would cut the backward pass short
            if self._healed and not (group.is_first_batch and group.grad_reduce_handle is not None):
                self._snapshot(group)
            try:
                return original(*arguments, **keywords)
            except RuntimeError as error:
                if not self._in_backward:
                    raise
                self._deferred = error
                return None

        group.start_grad_sync = start_grad_sync

    def _snapshot(self, group: Any) -> None:
        """Before the reduce of a bucket group."""
        for bucket in group.buckets:
            self._snapshots.take(id(bucket), self._overwritten(bucket, group))

    def _overwritten(self, bucket: Any, group: Any) -> torch.Tensor:
        """By its reduce: a failed in-place all-reduce leaves a mix of partial sums."""
        return elastic_buckets.own_part(bucket, group) if self._sharded else bucket.grad_data

    @property
    def snapshot_bytes(self) -> int:
        """That the copies take which undo a reduce."""
        owners = [(bucket, group) for group in self._bucket_groups() for bucket in group.buckets]
        return self._snapshots.size(self._overwritten(bucket, group) for bucket, group in owners)

    # ------------------------------------------------------------ recovering
    def drain(self, unblock: Callable[[], Any]) -> None:
        """Wait for overlapped reduces that are still under way: one that ended later would write into gradients
        restored by then.

        Their connections are broken, so it takes milliseconds. Raises :class:`LedgerError` after DRAIN_SECONDS.
        """
        if self._sharded:
            with again_and_again(unblock):
                elastic_buckets.drain(self.model)
            return
        deadline = time.monotonic() + DRAIN_SECONDS
        for group in self._bucket_groups():
            for work in getattr(group.grad_reduce_handle, "works", ()):
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise LedgerError(f"a reduce outlives its connections by {DRAIN_SECONDS:.0f} s")
                    unblock()
                    time.sleep(0.001)

    @property
    def undoable(self) -> bool:
        """The reduces of this iteration, as far as they have begun, can be undone."""
        return self._snapshots.undoable

    def restore(self) -> bool:
        """Undo every reduce that had begun: this rank's own gradient sum is back. False where nothing was kept for
        that: nothing is in the gradient then."""
        undoable = self.undoable
        if undoable:
            self._snapshots.restore()
        else:
            self.drop()
        self._deferred, self._ordered = None, True
        return undoable

    def adopt_groups(self) -> None:
        """After the groups were re-pointed: forget handles and sizes that belong to the old ones."""
        for chunk in self.model:
            for buffer in groups.buffers(chunk):
                buffer.data_parallel_world_size = buffer.data_parallel_group.size()
        for group in self._bucket_groups():
            group.grad_reduce_handle = None
            group.param_gather_handle = None
            group.is_last_microbatch = True
            group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
