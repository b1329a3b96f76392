"""The gradient side of an iteration: compute micro-batches one by one, snapshot buckets before their reduce, reduce,
restore.

Seams into megatron-core, none of its sources changed: `config.finalize_model_grads_func` is taken out of the schedule
and called here; `_ParamAndGradBucketGroup.start_grad_sync` is wrapped for the snapshot. Every micro-batch weighs
1/total whatever rank computes it: the schedule divides a loss by the number of micro-batches of its call, so the loss
is multiplied by that number over the total, and the DDP scaling factor is 1 with a SUM reduce.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from detector.inject import injector
from transition import groups
from transition.ledger import Ledger, LedgerError

DRAIN_SECONDS = 10.0


class PeerLost(RuntimeError):
    """The generation is over: a member is gone, or its groups are broken."""


class Gradients:
    """Owns the DDP model chunks of one rank. `lost()` tells whether the generation is over; it is asked between
    micro-batches.

    forward_step: Megatron's `forward_step_func(data_iterator, model) -> (output, loss_func)`. fetch: `fetch(iteration,
    index)` -> one micro-batch, a function of nothing else, so that any rank can compute any of them.
    """

    def __init__(
        self,
        model: Sequence[Any],
        forward_step: Callable[..., Any],
        fetch: Callable[[int, int], Any],
        total: int,
        schedule_arguments: dict[str, Any],
        lost: Callable[[], bool],
        on_progress: Callable[[], None],
    ):
        from megatron.core.utils import get_model_config

        self.model, self.forward_step, self.fetch, self.total = list(model), forward_step, fetch, total
        self.schedule_arguments, self.lost, self.on_progress = schedule_arguments, lost, on_progress
        self.config = get_model_config(self.model[0])
        self._snapshots: dict[int, tuple[Any, torch.Tensor]] = {}
        self._fresh: set[int] = set()  # buckets whose snapshot belongs to the present reduce
        self._deferred: RuntimeError | None = None
        self._in_backward = False
        self._disturbed = False
        self._backward_of: int | None = None
        self.seconds = {"data": 0.0, "forward": 0.0, "backward": 0.0}  # of the present iteration
        self._began = 0.0  # the micro-batch at hand
        self._backward_since: float | None = None
        self._check_configuration()
        for group in self._bucket_groups():
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0
            self._wrap_start(group)

    def _check_configuration(self) -> None:
        for chunk in self.model:
            if chunk.ddp_config.use_distributed_optimizer:
                raise groups.UnsupportedLayout(
                    "unicron can't heal a distributed optimizer: a lost rank's shard has no copy; unset "
                    "use_distributed_optimizer"
                )
            if chunk.ddp_config.average_in_collective:
                raise groups.UnsupportedLayout("unicron weighs micro-batches itself: unset average_in_collective")
        if self.config.calculate_per_token_loss:
            raise groups.UnsupportedLayout("unicron weighs micro-batches equally: unset calculate_per_token_loss")

    def _bucket_groups(self) -> list[Any]:
        return [group for chunk in self.model for group in groups.bucket_groups(chunk)]

    # ------------------------------------------------------------ computing
    def begin(self) -> None:
        """A new iteration: zero the gradients, forget the snapshots."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self._fresh.clear()
        self._deferred, self._disturbed = None, False
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def compute(self, ledger: Ledger) -> None:
        """Forward and backward of everything that `ledger` still owes. Raises :class:`PeerLost` between two
        micro-batches."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        owed = ledger.todo()
        if not owed:
            return
        with self._schedule_configuration():
            self._in_backward = True
            try:
                get_forward_backward_func()(
                    forward_step_func=self._forward(ledger, owed),
                    data_iterator=self._data(ledger.iteration, owed),
                    model=self.model,
                    num_microbatches=len(owed),
                    **self.schedule_arguments,
                )
            finally:
                self._in_backward = False
                self._end_backward(time.perf_counter())
        self._finished(ledger, owed[-1])

    def _finished(self, ledger: Ledger, index: int) -> None:
        self._backward_of = None
        ledger.finish(index)
        self.on_progress()

    @property
    def intact(self) -> bool:
        """No micro-batch is in the gradient in part. False after an error in the middle of a backward pass."""
        return self._backward_of is None

    @contextlib.contextmanager
    def _schedule_configuration(self) -> Iterator[None]:
        """The schedule only accumulates; after a disturbance its hooks must not start a reduce on their own either."""
        finalize, no_sync = self.config.finalize_model_grads_func, self.config.no_sync_func
        self.config.finalize_model_grads_func = None
        try:
            with contextlib.ExitStack() as stack:
                if self._disturbed:
                    self.config.no_sync_func = None
                    for chunk in self.model:
                        stack.enter_context(chunk.no_sync())
                yield
        finally:
            self.config.finalize_model_grads_func, self.config.no_sync_func = finalize, no_sync

    def _data(self, iteration: int, indices: Sequence[int]) -> Iterator[Any]:
        for index in indices:
            began = time.perf_counter()
            micro_batch = self.fetch(iteration, index)
            self.seconds["data"] += time.perf_counter() - began
            yield micro_batch

    def _end_backward(self, now: float) -> None:
        """The backward pass that began when the last loss was there is over."""
        if self._backward_since is not None:
            injector.slow_down(now - self._began)
            self.seconds["backward"] += time.perf_counter() - self._backward_since
            self._backward_since = None

    def _forward(self, ledger: Ledger, owed: Sequence[int]) -> Callable[..., Any]:
        position = 0
        weight = len(owed) / self.total

        def forward_step(data_iterator: Any, model: Any, *rest: Any) -> Any:
            nonlocal position
            self._end_backward(time.perf_counter())
            injector.point()
            self._began = began = time.perf_counter()
            data_before = self.seconds["data"]
            if position:  # the schedule asks for the next forward when the backward before it is over
                self._finished(ledger, owed[position - 1])
            if self.lost():
                raise PeerLost("a member of the generation is gone")
            index = owed[position]
            position += 1
            output, loss_function = self.forward_step(data_iterator, model, *rest)

            def weighted(*arguments: Any, **keywords: Any) -> Any:
                loss, *others = loss_function(*arguments, **keywords)
                ledger.losses[index] = loss.detach().clone()
                self._backward_of = index
                self._backward_since = time.perf_counter()
                self.seconds["forward"] += self._backward_since - began - (self.seconds["data"] - data_before)
                return (loss * weight, *others)

            return output, weighted

        return forward_step

    # ------------------------------------------------------------ reducing
    def reduce(self) -> None:
        """Reduce all gradients over the data-parallel group and finalize them. Raises RuntimeError when a peer is
        gone."""
        from megatron.core.distributed import finalize_model_grads

        if self._deferred is not None:
            raise PeerLost(f"a bucket's reduce failed: {self._deferred}")
        if self.lost():
            raise PeerLost("a member of the generation is gone")
        if self._disturbed:
            self._dispatch_overlapped()
        (self.config.finalize_model_grads_func or finalize_model_grads)(self.model, None)

    def _dispatch_overlapped(self) -> None:
        """With overlapped reduces the backward hooks start them; they do not fire again for gradients that were
        kept."""
        for group in self._bucket_groups():
            if group.ddp_config.overlap_grad_reduce and not group.is_first_batch and group.grad_reduce_handle is None:
                group.start_grad_sync()

    def _wrap_start(self, group: Any) -> None:
        original = group.start_grad_sync

        def start_grad_sync(*arguments: Any, **keywords: Any) -> Any:
            if self._in_backward and (self._deferred is not None or self.lost()):
                self._deferred = self._deferred or PeerLost("a member of the generation is gone")
                return None  # raising inside an autograd hook would cut the backward pass short
            if not (group.is_first_batch and group.grad_reduce_handle is not None):
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
        """A failed in-place all-reduce leaves a mix of partial sums, so the bucket is copied first."""
        for bucket in group.buckets:
            key = id(bucket)
            if key not in self._snapshots:
                self._snapshots[key] = (bucket, torch.empty_like(bucket.grad_data))
            self._snapshots[key][1].copy_(bucket.grad_data)
            self._fresh.add(key)

    # ------------------------------------------------------------ recovering
    def drain(self, unblock: Callable[[], Any]) -> None:
        """Wait for overlapped reduces that are still under way: one that ended later would write into gradients
        restored by then.

        Their connections are broken, so it takes milliseconds. Raises :class:`LedgerError` after DRAIN_SECONDS.
        """
        deadline = time.monotonic() + DRAIN_SECONDS
        for group in self._bucket_groups():
            for work in getattr(group.grad_reduce_handle, "works", ()):
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise LedgerError(f"a reduce outlives its connections by {DRAIN_SECONDS:.0f} s")
                    unblock()
                    time.sleep(0.001)

    def restore(self) -> None:
        """Undo every reduce that had begun: this rank's own gradient sum is back."""
        for key in self._fresh:
            bucket, copy = self._snapshots[key]
            bucket.grad_data.copy_(copy)
        self._fresh.clear()
        self._deferred, self._disturbed = None, True

    def adopt_groups(self) -> None:
        """After the groups were re-pointed: forget handles and sizes that belong to the old ones."""
        for chunk in self.model:
            for buffer in groups.buffers(chunk):
                buffer.data_parallel_world_size = buffer.data_parallel_group.size()
        for group in self._bucket_groups():
            group.grad_reduce_handle = None
            group.param_gather_handle = None
            group.is_last_microbatch = True
            group.per_param_grad_ready_counts = {}
            group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
