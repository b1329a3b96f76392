"""The state of a distributed optimizer over the generations: every shard is in two nodes' memory before the gradients
that made it are forgotten (docs/design/micro-batch-reuse.md)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgpack
import torch

from transition import elastic_buckets, groups, sharding
from transition.exchange import Exchange
from transition.layout import replicas
from transition.migrate import TrainingState
from transition.process import Process
from transition.shards import Shards
from transition.snapshots import Where

COPIES = 1  # UNICRON_STATE_COPIES: of each shard in other ranks; with two, a shard survives the loss of its heir too


class Safekeeping:
    """Of one rank. Collective methods raise RuntimeError when a peer is lost."""

    def __init__(self, process: Process, state: TrainingState, exchange: Exchange, where: Where = Where.CARD):
        self._process, self._state, self._exchange = process, state, exchange
        self._copies = _wanted_copies()
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = torch.device("cpu") if where is Where.HOST else None
        self.shards = Shards(state.model, state.optimizer, process.watch.lost, memory, process.device)
        self._shifts: list[int] = []
        self._version = -1

    def check_untouched(self) -> None:
        """Raises :class:`groups.UnsupportedLayout` where the script has loaded a state of the optimizer by itself: it
        is of a shard that this rank will not have."""
        if any(each.optimizer.state for each in elastic_buckets.distributed(self._state.optimizer)):
            raise groups.UnsupportedLayout(
                "unicron can't go on from an optimizer state that the script loaded: let transition.Checkpoints do it"
            )

    @property
    def newest(self) -> tuple[int, int]:
        """(base, version) of what all members have."""
        return self.shards.base, self._version

    def held(self) -> list[tuple[int, int, int, list[int]]]:
        """What this rank could give, for its report."""
        return self.shards.held()

    def enter(self, generation: int, members: Sequence[int], slot: int, size: int) -> None:
        """The groups of a generation are in use: take this rank's place in them. Other states are adopted or begun
        then."""
        self.shards.enter(generation)
        place = slot % size
        nodes = [str(slots[place] // self._per_node) for slots in replicas(members, size)]
        self._shifts = sharding.heirs(nodes, self._copies)

    def adopt(self, base: int, version: int) -> None:
        """Take up a state from whoever holds it; with it go the schedule and the seed."""
        extra = msgpack.unpackb(self.shards.adopt(base, version), strict_map_key=False)
        self._state.adopt_schedule(extra["scheduler"])
        self._state.seed, self._state.loss = int(extra["seed"]), extra["loss"]
        self._confirm(version)

    def keep(self, version: int) -> None:
        """The optimizer's state as it is, and its copies. From then on the gradients that made it may be forgotten."""
        extra = {"scheduler": self._state.schedule(), "seed": self._state.seed, "loss": self._state.loss}
        self.shards.export(version, msgpack.packb(extra))
        self._confirm(version)

    @property
    def size(self) -> int:
        """Bytes that the states take: this rank's own and the copies of others', the last two versions of each."""
        return 2 * (1 + len(self._shifts)) * self.shards.shard_bytes

    def _confirm(self, version: int) -> None:
        self.shards.send_copies(version, self._shifts)
        self._exchange.all_there()
        self.shards.confirm(version)
        self._version = version


def _wanted_copies() -> int:
    text = os.environ.get("UNICRON_STATE_COPIES") or str(COPIES)
    if not text.isdecimal():
        raise ValueError(f"UNICRON_STATE_COPIES={text!r}: write a number of copies, 1 or more; 0 for none")
    return int(text)
