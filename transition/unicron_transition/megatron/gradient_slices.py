"""Gradients with a distributed optimizer: a rank's own part of them.

A reduce-scatter in place writes this rank's own part of each bucket and nothing else, whether it succeeds or fails
(seen with gloo; NCCL's interface has the buffer that it sends from as constant). The rest of the buffer stays this
rank's unreduced sum until it is zeroed, so a copy of the own part, one data-parallel size'th of a gradient, undoes the
reduce. What Megatron does to gradients after the reduce is kept to the own part as well: the rest has no meaning to the
optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from unicron_transition.seams import megatron_core


@contextlib.contextmanager
def own_parts_only(model: Sequence[Any]) -> Iterator[None]:
    """Wraps Megatron's `finalize_model_grads`: what it does to gradients after the reduce, it does to the own parts.

    That is the sum over stages that share an embedding, the sum over tensor-parallel ranks for sequence parallelism
    and norms, and the division by the number of tokens. All of these are between ranks that have the same part of the
    same bucket. Megatron itself sends the whole gradients, of which all but the own part is unreduced.
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
    """This rank's part of each bucket, in the buffer."""
    rank = buffer.data_parallel_group.rank()
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel() // buffer.data_parallel_world_size
        yield bucket.offset + rank * size, bucket.offset + (rank + 1) * size
