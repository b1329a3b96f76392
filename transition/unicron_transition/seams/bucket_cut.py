"""How Megatron cuts a bucket into equal parts for the data-parallel ranks. Sizes in elements; without torch."""

from __future__ import annotations

import math

QUANTUM = 128  # Megatron starts buckets at 256-byte boundaries for parameters of two bytes
NCCL_QUANTUM = 2**16  # with `pad_buckets_for_high_nccl_busbw`


def padded(elements: int, count: int, quantum: int = QUANTUM) -> int:
    """The size of a bucket that is cut into `count` parts: Megatron's own rule, whatever the bucket's place."""
    divisor = math.lcm(count, quantum)
    return -(-elements // divisor) * divisor


def capacity(elements: int, most: int, quantum: int = QUANTUM) -> int:
    """The room that a bucket needs so that it can be cut into any number of parts up to `most`.

    At most 2 * `most` * `quantum` elements more than there are. Always a multiple of what Megatron asks of a bucket
    that is cut into `most`.
    """
    return padded(max(padded(elements, count, quantum) for count in range(1, most + 1)), most, quantum)
