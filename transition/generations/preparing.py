"""The world in which a rank builds its model: it has all the job's coordinates, and no peers.

torch's `fake` backend knows a rank and a size, and its collectives return at once. So Megatron builds the part of the
model that belongs to this rank's place while nobody else is there yet, and the optimizer's smallest shard.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from unicron.transition.generations.layout import Layout

BACKEND = "fake"


def most_replicas(layout: Layout, slot: int) -> int:
    """How many replicas the job can have at most: its ranks are UNICRON_MAX_RANKS."""
    ranks = int(os.environ.get("UNICRON_MAX_RANKS", "0"))
    return max(ranks // layout.size, slot // layout.size + 1)


def prepare(layout: Layout, slot: int) -> None:
    """Initializes torch.distributed as the rank of this slot in a world as large as the job can be."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    most = most_replicas(layout, slot)
    rank = layout.megatron_rank(slot // layout.size, slot % layout.size, most)
    _groups_without_peers()
    dist.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=most * layout.size)


def preparing() -> bool:
    """This rank is in such a world."""
    return dist.is_initialized() and dist.get_backend() == BACKEND


def _groups_without_peers() -> None:
    """Megatron asks for gloo groups by name; in a world without peers they are of its own kind, too."""
    original = dist.new_group
    if hasattr(original, "unicron_original"):
        return

    def new_group(*arguments: Any, **keywords: Any) -> Any:
        if preparing():
            arguments, keywords = arguments[:2], {**keywords, "backend": BACKEND}
        return original(*arguments, **keywords)

    new_group.unicron_original = original  # type: ignore[attr-defined]
    dist.new_group = new_group
