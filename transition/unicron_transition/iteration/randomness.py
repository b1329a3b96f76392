"""Random numbers belong to the micro-batch: before its forward pass every generator is seeded for it, so that dropout
is the same whichever rank computes it, in whatever order and however often (docs/design/micro-batch-reuse.md).

Megatron's activation recomputation restores the states from the start of its forward pass, so it gets the same masks.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import torch

from unicron_transition.seams import megatron_core

# Megatron's name for the default generator's state, the same in all tensor ranks of a stage.
SHARED_STATE = "data-parallel-rng"


def seed(
    base: int, iteration: int, micro_batch: int, *, tensor: int = 0, pipeline: int = 0, context: int = 0, chunk: int = 0
) -> None:
    """Seed all generators for the forward pass of one micro-batch in one model chunk of one rank: torch's, CUDA's, and
    each state of Megatron's tracker.

    base: the job's seed. micro_batch: its index in the iteration, over all ranks. tensor, pipeline, context: the rank's
    coordinate in its replica; its data-parallel rank does not count. chunk: of the virtual pipeline. The default
    generators and the tracker's data-parallel state are the same in all tensor ranks, all other states differ.
    """
    place = (base % 2**63, iteration, micro_batch, pipeline, context, chunk)
    shared = _hash(SHARED_STATE, 0, place)
    torch.default_generator.manual_seed(shared)
    on_cuda = bool(torch.cuda.is_initialized())
    if on_cuda:
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(shared)
    tracker = megatron_core.rng_tracker()
    if tracker is None:
        return
    generator = torch.Generator("cuda" if on_cuda else "cpu")
    tracker.set_states(
        {
            name: _state(state, generator, shared if name == SHARED_STATE else _hash(name, tensor, place))
            for name, state in tracker.get_states().items()
        }
    )


def _hash(name: str, tensor: int, place: tuple[int, ...]) -> int:
    data = struct.pack("<7q", tensor, *place) + name.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _state(old: Any, generator: torch.Generator, value: int) -> Any:
    """Return the tracker's new state, never in the tensor of `old`, which activation checkpoints hold."""
    if isinstance(old, torch.Generator):  # a CUDA graph knows its generators by identity
        return old.manual_seed(value)
    return generator.manual_seed(value).get_state()
