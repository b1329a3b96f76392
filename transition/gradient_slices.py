"""Gradients with a distributed optimizer: what a reduce overwrites, and how it is undone.

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

import torch

from transition import elastic_buckets, groups


class GradientSlices:
    """The copies of this rank's own parts; their memory is kept for the next iteration."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # by the bucket's identity
        self._places: dict[int, torch.Tensor] = {}  # where those that are of the present reduce belong

    def take(self, group: Any) -> None:
        """Copy what the reduce of a bucket group will overwrite; before `start_grad_sync`."""
        for bucket in group.buckets:
            place, copy = elastic_buckets.own_part(bucket, group), self._copies.get(id(bucket))
            if copy is None or copy.shape != place.shape:
                copy = self._copies[id(bucket)] = torch.empty_like(place)
            copy.copy_(place)
            self._places[id(bucket)] = place

    def restore(self) -> None:
        """Undo every reduce since :meth:`forget`: the buffers are this rank's unreduced sums again.

        Parameters never move in the buffers, so it does not matter whether the data-parallel size has changed since.
        """
        for key, place in self._places.items():
            place.copy_(self._copies[key])
        self._places.clear()

    def forget(self) -> None:
        """A new iteration: the copies are of no use any more."""
        self._places.clear()


@contextlib.contextmanager
def own_parts_only(model: Sequence[Any]) -> Iterator[None]:
    """Around Megatron's `finalize_model_grads`: what it does to gradients after the reduce, it does to the own parts.

    That is the sum over stages that share an embedding, the sum over tensor-parallel ranks for sequence parallelism
    and norms, and the division by the number of tokens. All of these are between ranks that have the same part of the
    same bucket. Megatron itself sends the whole gradients, of which all but the own part is unreduced.
    """
    with contextlib.ExitStack() as stack:
        for chunk in model:
            for buffer in groups.buffers(chunk):
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
