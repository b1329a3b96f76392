"""The gradients of Megatron's models: computing micro-batches, copying buckets before their reduce, reducing,
restoring.

It hooks into megatron-core without changing its sources: `config.finalize_model_grads_func` is taken out of the
schedule and called here; `_ParamAndGradBucketGroup.start_grad_sync` is wrapped for the copies. Every micro-batch has
the weight 1/total on every rank: the schedule divides a loss by the number of micro-batches of its call, so the loss is
multiplied by that number over the total, and the DDP scaling factor is 1 with a SUM reduce. A loss per token is divided
by the tokens of all micro-batches after the reduce.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unicron_transition.iteration import flips
from unicron_transition.iteration.accumulation import Accumulation, PeerLost, Work, evaluating, wait_out
from unicron_transition.iteration.ledger import Ledger, Loss, Proof, hear_parts, tell_parts
from unicron_transition.megatron.auxiliary import Auxiliary
from unicron_transition.seams import elastic_buckets, megatron_core
from unicron_transition.seams.table import UnsupportedLayout

UNBLOCK_SECONDS = 0.02  # between two attempts to free a wait


@contextlib.contextmanager
def again_and_again(unblock: Callable[[], Any]) -> Iterator[None]:
    """Call `unblock` repeatedly in a thread while the body runs: the connection of a wait may be made later."""
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


class Gradients(Accumulation):
    """The gradients of one rank's Megatron DDP chunks."""

    def __init__(self, model: Sequence[Any], forward_step: Callable[..., Any], work: Work):
        from megatron.core.utils import get_model_config

        super().__init__(work)
        if min(work.sequence, work.size) < 1:
            raise ValueError("Megatron's schedule needs seq_length and micro_batch_size")
        self.model = list(model)
        self.forward_step = forward_step
        """Megatron's `forward_step_func(data_iterator, model) -> (output, loss_func)`."""
        self.schedule_arguments = {"seq_length": work.sequence, "micro_batch_size": work.size}
        self.layout, self._coordinate = work.layout, work.layout.coordinate(work.place)._asdict()
        self._lane, self._mine = work.layout.lane(work.place), set[int]()  # micro-batches in this lane's own gradient
        self.config = get_model_config(self.model[0])
        self.per_token = bool(self.config.calculate_per_token_loss)
        self._auxiliary = Auxiliary(self.model, self.config, work.total, work.pending)
        self._sharded, self._healed = work.sharded, work.healed
        self._deferred: RuntimeError | None = None
        self._in_backward = False
        self._ordered = False  # reduces start after the schedule, in one order
        for group in self._bucket_groups():
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0
            self._wrap_start(group)

    def _bucket_groups(self) -> list[Any]:
        return [group for chunk in self.model for group in megatron_core.bucket_groups(chunk)]

    # ------------------------------------------------------------ computing
    def begin_iteration(self, ordered: bool, total: int) -> None:
        self._auxiliary.begin_iteration()
        super().begin_iteration(ordered, total)
        self._auxiliary.total = total
        self._ordered = ordered

    def drop(self) -> None:
        for group in self._bucket_groups():  # Megatron requires a complete first backward pass, or none
            if group.is_first_batch and len(group.per_param_grad_ready_counts) < len(group.params):
                group.per_param_grad_ready_counts = {}
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self._snapshots.forget()
        self._auxiliary.drop()
        self._mine.clear()
        self._deferred, self._whole = None, True

    @property
    def group(self) -> int:
        if len(self.model) == 1:
            return 1
        return int(self.config.microbatch_group_size_per_vp_stage or self.layout.pipeline)

    @property
    def first(self) -> bool:
        """Whether Megatron has not yet seen the order of the gradients in the backward pass of this process."""
        overlapped = (group for group in self._bucket_groups() if group.ddp_config.overlap_grad_reduce)
        return any(group.is_first_batch for group in overlapped)

    def _compute(self, ledger: Ledger) -> None:
        owed = ledger.todo()
        if not owed:
            self._gather_parameters()
            return
        for group in self._bucket_groups():
            group.per_param_grad_ready_counts = {}
        mine, padded = self._share(owed)
        self._in_backward = True
        try:
            self._run_schedule(self._forward(ledger, len(mine), padded), self._fetch, ledger.iteration, padded)
        finally:
            self._in_backward = False
            self._end_backward(time.perf_counter())
        self._auxiliary.end_schedule()
        self._mine.update(mine)
        self._finish(ledger, owed if self.layout.size > 1 else owed[-1:])

    def evaluate(
        self, iteration: int, indices: Sequence[int], fetch: Callable[[int, int], Any]
    ) -> dict[int, tuple[torch.Tensor, Any]]:
        self._gather_parameters()  # all ranks, including those without a share
        if not indices:
            return {}
        results: dict[int, tuple[torch.Tensor, Any]] = {}
        mine, padded = self._share(indices)
        with evaluating(self.model):
            step = self._evaluation_step(iteration, padded, results)
            self._run_schedule(step, fetch, iteration, padded, forward_only=True)
        if self.layout.lanes == 1:
            return results
        known = {index: Loss(*results[index]) for index in mine if index in results}
        shared = hear_parts(self._work.inside(tell_parts(known, indices, 1, 0)), indices, 1)
        return {index: (torch.as_tensor(loss), tokens) for index, (loss, tokens) in shared.items()}

    def _run_schedule(
        self,
        forward_step: Callable[..., Any],
        fetch: Callable[[int, int], Any],
        iteration: int,
        indices: Sequence[int],
        **more: Any,
    ) -> None:
        """Run Megatron's schedule, with the arguments `more`, over these micro-batches of an iteration."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        iterators = [(fetch(iteration, index) for index in indices) for _ in self.model]
        with self._schedule_configuration():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.model,
                num_microbatches=len(indices),
                **self.schedule_arguments,
                **more,
            )

    def _evaluation_step(
        self, iteration: int, indices: Sequence[int], results: dict[int, tuple[torch.Tensor, Any]]
    ) -> Callable[..., Any]:
        passed = [0] * len(self.model)  # forward passes so far, by chunk

        def forward_step(data_iterator: Any, model: Any, *rest: Any) -> Any:
            chunk = next(number for number, one in enumerate(self.model) if one is model)
            index, passed[chunk] = indices[passed[chunk]], passed[chunk] + 1
            self._begin_evaluation(iteration, index, chunk=chunk, **self._coordinate)
            with self._auxiliary.forward(chunk, real=False):
                output, loss_function = self.forward_step(data_iterator, model, *rest)

            def note_loss(*arguments: Any, **keywords: Any) -> Any:
                result = loss_function(*arguments, **keywords)
                results[index] = result[0].detach().clone(), result[1].detach().clone() if len(result) == 3 else 1
                return result

            return output, note_loss

        return forward_step

    def _gather_parameters(self) -> None:
        """Gather the parameters as a forward pass with overlapped gathers would."""
        if self._sharded and self.model[0].ddp_config.overlap_param_gather:
            elastic_buckets.gather_without_forward(self.model)

    def _share(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return this lane's own of the replica's micro-batches, and those that it computes: its own first, then the
        last one of all with weight 0. All lanes compute equally many, since their experts exchange tokens in each, and
        the interleaved schedule takes whole groups."""
        lanes, mine = self.layout.lanes, list(indices[self._lane :: self.layout.lanes])
        count = -(-len(indices) // lanes)
        count += -count % self.group
        return mine, [*mine, *[indices[-1]] * (count - len(mine))]

    @contextlib.contextmanager
    def _schedule_configuration(self) -> Iterator[None]:
        """Let the schedule accumulate and do nothing else."""
        # A rank without work would miss param_sync_func's gathers; the forward passes gather as well.
        taken = ["finalize_model_grads_func", "param_sync_func", *(["grad_sync_func"] if self._ordered else [])]
        before = {name: getattr(self.config, name) for name in taken}
        for name in taken:
            setattr(self.config, name, None)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(self.config, name, function)

    def _forward(self, ledger: Ledger, owed: int, padded: Sequence[int]) -> Callable[..., Any]:
        """Return the forward step of these micro-batches, of which the first `owed` count."""
        passed = [0] * len(self.model)  # forward passes so far, by chunk
        alone = self.layout.size == 1

        def forward_step(data_iterator: Any, model: Any, *rest: Any) -> Any:
            self._next()
            chunk = next(number for number, one in enumerate(self.model) if one is model)
            number, passed[chunk] = passed[chunk], passed[chunk] + 1
            if alone and number:  # the last backward pass is over when the next forward pass begins
                self._finish(ledger, [padded[number - 1]])
            real, index = number < owed, padded[number]
            self._begin_forward(ledger, index, chunk=chunk, **self._coordinate)
            flips.before_forward(model)
            self._whole = self._whole and alone
            with self._auxiliary.forward(chunk, real):
                output, loss_function = self.forward_step(data_iterator, model, *rest)
            self._auxiliary.weigh(output, chunk, real)

            def weigh_loss(*arguments: Any, **keywords: Any) -> Any:
                loss, *others = loss_function(*arguments, **keywords)
                self._begin_backward()
                return self._weigh(ledger, index, loss, others, len(padded), real)

            return output, weigh_loss

        return forward_step

    def _weigh(
        self, ledger: Ledger, index: int, loss: torch.Tensor, others: list[Any], count: int, real: bool
    ) -> tuple[Any, ...]:
        """Weight the script's (loss, log) or (sum of losses, tokens, log) for Megatron, and note it in the ledger."""
        tokens = others[0] if len(others) == 2 else None
        if self.per_token and tokens is None:
            raise UnsupportedLayout(
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

    # ------------------------------------------------------------ the losses of a replica of several lanes
    def parts(self, ledger: Ledger) -> list[float]:
        if self.layout.lanes == 1:
            return []
        known = {
            index: Loss(ledger.losses[index], ledger.tokens[index]) for index in self._mine if index in ledger.losses
        }
        return tell_parts(known, sorted(ledger.done), 1, 0)

    def take_parts(self, ledger: Ledger, numbers: Sequence[float]) -> None:
        if numbers:
            ledger.shared = hear_parts(numbers, sorted(ledger.done), 1)

    # ------------------------------------------------------------ reducing
    def reduce(self, ledger: Ledger, proof: Proof) -> Proof:
        from megatron.core.distributed import finalize_model_grads

        if self._deferred is not None:
            raise PeerLost(f"a bucket's reduce failed: {self._deferred}")
        if self.layout.lanes == 1:  # otherwise Megatron sums dense parameters over other ranks than experts
            self._weigh_sum(self.own_sum(), after=False)
        if self._ordered:
            self._dispatch_overlapped()
        own = own_parts_only(self.model) if self._sharded else contextlib.nullcontext()
        with own, self._auxiliary.reducing(), self._weighing():
            (self.config.finalize_model_grads_func or finalize_model_grads)(self.model, self._tokens(ledger))
        proven = self._work.begin_sum(proof.tensor().to(self._device()))
        proof_sum = proven.finish().cpu()
        proven.check()
        return Proof.of(proof_sum)

    @contextlib.contextmanager
    def _weighing(self) -> Iterator[None]:
        """Weigh the sums when Megatron has waited for them: it changes them afterwards."""
        last = self.model[-1]
        original = last.finish_grad_sync

        def finish_grad_sync(*arguments: Any, **keywords: Any) -> Any:
            result = original(*arguments, **keywords)
            if self.layout.lanes == 1:
                self._weigh_sum(self._reduce_result(), after=True)
            return result

        last.finish_grad_sync = finish_grad_sync
        try:
            yield
        finally:
            del last.finish_grad_sync

    def proven(self, tokens: float) -> float:
        return tokens if self.per_token else float(self.total)

    def _tokens(self, ledger: Ledger) -> torch.Tensor | None:
        """Return the tokens of the micro-batches in this rank's gradient, as the schedule would count them."""
        if not self.per_token:
            return None
        total = torch.zeros((), dtype=torch.int, device=self._device())
        for index in self._mine if self.layout.lanes > 1 else ledger.done:
            if (tokens := ledger.tokens.get(index)) is not None:  # only the last stage has them
                total += tokens.to(total.dtype)
        return total

    def _device(self) -> torch.device:
        first: torch.Tensor = next(self.model[0].module.parameters())
        return first.device

    def _dispatch_overlapped(self) -> None:
        """Start overlapped reduces without a backward hook: of kept gradients, and all in a rank without work."""
        for group in self._bucket_groups():
            if group.ddp_config.overlap_grad_reduce and not group.is_first_batch and group.grad_reduce_handle is None:
                group.start_grad_sync()

    def _wrap_start(self, group: Any) -> None:
        original = group.start_grad_sync

        def start_grad_sync(*arguments: Any, **keywords: Any) -> Any:
            if self._in_backward and self._ordered:
                return None
            if self._in_backward and (self._deferred is not None or self._work.over()):
                self._deferred = self._deferred or PeerLost("a member of the generation is gone")
                return None  # an error in an autograd hook would cut the backward pass short
            if self._healed and not (group.is_first_batch and group.grad_reduce_handle is not None):
                for bucket in group.buckets:
                    self._snapshots.copy_before_reduce(id(bucket), self._overwritten(bucket, group))
            for bucket in group.buckets:
                flips.before_reduce(self._overwritten(bucket, group))
            try:
                return original(*arguments, **keywords)
            except RuntimeError as error:
                if not self._in_backward:
                    raise
                self._deferred = error
                return None

        group.start_grad_sync = start_grad_sync

    def _overwritten(self, bucket: Any, group: Any) -> torch.Tensor:
        """Return the part of a bucket that its reduce overwrites, with partial sums if it fails."""
        return elastic_buckets.own_part(bucket, group) if self._sharded else bucket.grad_data

    def _tensors_to_reduce(self) -> Iterator[torch.Tensor]:
        return (self._overwritten(bucket, group) for group in self._bucket_groups() for bucket in group.buckets)

    def _open_gradients(self) -> Iterator[flips.Entry]:
        for chunk in self.model:
            for group in megatron_core.bucket_groups(chunk):
                names = {parameter: name for name, parameter in chunk.module.named_parameters()}
                if group.grad_reduce_handle is None:
                    for parameter in group.params:
                        yield f"the gradient of {names.get(parameter, '?')}", parameter.main_grad

    def own_sum(self) -> Iterator[torch.Tensor]:
        return (bucket.grad_data for group in self._bucket_groups() for bucket in group.buckets)

    _reduce_result = _tensors_to_reduce

    def hold_reduces(self) -> None:
        self._ordered = True

    # ------------------------------------------------------------ recovering
    def drain(self, unblock: Callable[[], Any]) -> None:
        if self._sharded:
            with again_and_again(unblock):
                elastic_buckets.drain(self.model)
            return
        handles = (group.grad_reduce_handle for group in self._bucket_groups())
        wait_out([work for handle in handles for work in getattr(handle, "works", ())], unblock)

    def restore(self) -> bool:
        undone = super().restore()
        if undone:
            self._auxiliary.restore()
        self._deferred, self._ordered = None, True
        return undone

    def adopt_groups(self) -> None:
        """Forget handles and sizes of the old groups."""
        for chunk in self.model:
            for buffer in megatron_core.buffers(chunk):
                buffer.data_parallel_world_size = buffer.data_parallel_group.size()
        for group in self._bucket_groups():
            group.grad_reduce_handle = None
            group.param_gather_handle = None
            megatron_core.reduce_again(group)
            group.is_last_microbatch = True
            group.cached_grad_buffer_shard_list = [None] * len(group.buckets)
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)


# ---------------------------------------------------------------- a distributed optimizer's own parts
# A reduce-scatter in place writes only this rank's own part of each bucket, whether it succeeds or fails (seen with
# gloo; in NCCL's interface the buffer that it sends is constant). The rest stays this rank's unreduced sum, so a copy
# of the own part, one data-parallel size'th of a gradient, undoes the reduce. Megatron's changes to gradients after the
# reduce are restricted to the own part as well, because the optimizer does not use the rest.
@contextlib.contextmanager
def own_parts_only(model: Sequence[Any]) -> Iterator[None]:
    """Wrap Megatron's `finalize_model_grads`, so that after the reduce it changes only the own parts.

    Its changes are the sum over stages that share an embedding, the sum over tensor-parallel ranks for sequence
    parallelism and norms, and the division by the number of tokens. All of these are between ranks that have the same
    part of the same bucket. Megatron itself would send the whole gradients, of which all but the own part is unreduced.
    """
    with contextlib.ExitStack() as stack:
        for chunk in model:
            for buffer in megatron_core.buffers(chunk):
                stack.enter_context(_own_parts_of(buffer))
        yield


@contextlib.contextmanager
def _own_parts_of(buffer: Any) -> Iterator[None]:
    whole = {}
    ranges = list(_own_ranges(buffer))
    for parameter, (start, end, number) in buffer.param_index_map.items():
        lower, upper = max(start, ranges[number][0]), min(end, ranges[number][1])
        whole[parameter] = parameter.main_grad
        parameter.main_grad = buffer.grad_data[lower : max(lower, upper)]

    def scale_gradients(factor: float) -> None:
        for lower, upper in ranges:
            buffer.grad_data[lower:upper].mul_(factor)

    buffer.scale_gradients = scale_gradients
    try:
        yield
    finally:
        del buffer.scale_gradients
        for parameter, gradient in whole.items():
            parameter.main_grad = gradient


def _own_ranges(buffer: Any) -> Iterator[tuple[int, int]]:
    """Yield the range of this rank's part of each bucket in the buffer."""
    rank = buffer.data_parallel_group.rank()
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel() // buffer.data_parallel_world_size
        yield bucket.offset + rank * size, bucket.offset + (rank + 1) * size
