"""The world in which a rank builds its model: it has all the job's coordinates, and no peers.

torch's `fake` backend knows a rank and a size, and its collectives return at once. So Megatron builds the part of the
model that belongs to this rank's place while nobody else is there yet, and the optimizer's smallest shard.
"""

from __future__ import annotations

import os

from unicron_transition.generations.layout import Layout
from unicron_transition.seams import process_groups


def most_replicas(layout: Layout, slot: int) -> int:
    """How many replicas the job can have at most: its ranks are UNICRON_MAX_RANKS."""
    ranks = int(os.environ.get("UNICRON_MAX_RANKS", "0"))
    return max(ranks // layout.size, slot // layout.size + 1)


def prepare(layout: Layout, slot: int) -> None:
    """Initializes torch.distributed as the rank of this slot in a world as large as the job can be."""
    most = most_replicas(layout, slot)
    rank = layout.megatron_rank(slot // layout.size, slot % layout.size, most)
    process_groups.init_without_peers(rank, most * layout.size)
