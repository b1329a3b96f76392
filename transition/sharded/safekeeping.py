"""The state of a distributed optimizer over the generations: every shard is in two nodes' memory before the gradients
that made it are forgotten (docs/design/sharded-optimizer.md)."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Sequence

import msgpack
import torch

from unicron.detector.processes.rank_messages import Cut, Fetch, MemoryMessage
from unicron.transition.generations import sharding
from unicron.transition.generations.layout import replicas
from unicron.transition.generations.sharding import MARK_BITS, named
from unicron.transition.iteration.exchange import Exchange
from unicron.transition.iteration.gradient_copies import Where
from unicron.transition.iteration.rank_log import warn
from unicron.transition.iteration.rank_process import Process
from unicron.transition.megatron import auxiliary
from unicron.transition.seams import elastic_buckets
from unicron.transition.seams.table import UnsupportedLayout
from unicron.transition.sharded.shard_files import Rooms
from unicron.transition.sharded.shards import Shards
from unicron.transition.snapshot import contents
from unicron.transition.snapshot.cuts import Wanted
from unicron.transition.snapshot.cutting import Cutting
from unicron.transition.snapshot.frozen import Untrained
from unicron.transition.snapshot.images import memory_folder
from unicron.transition.snapshot.keeper import wanted_copies
from unicron.transition.snapshot.migrate import TrainingState


class Safekeeping:
    """Of one rank. Collective methods raise RuntimeError when a peer is lost."""

    def __init__(self, process: Process, state: TrainingState, exchange: Exchange, where: Where = Where.CARD):
        self._process, self._state, self._exchange = process, state, exchange
        self._copies = wanted_copies()
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        slot, size = process.slot, process.layout.size
        here: torch.device = next(state.model[0].parameters()).device
        memory = torch.device("cpu") if where is Where.HOST else here
        images = memory_folder() if memory.type == "cpu" else None
        self._cuts = Cutting(images, slot, warn)
        rooms = Rooms(images, slot, memory, pinned=memory.type == "cpu" and here.type == "cuda", cuts=self._cuts)
        self.shards = Shards(state.model, state.optimizer, process.watch.lost, rooms, process.device, slot % size, size)
        self._untrained = Untrained(state, images, slot, slot % size, size, warn)
        first = slot // self._per_node * self._per_node
        self._here = [each for each in range(first, first + self._per_node) if each % size == slot % size]
        self.shards.claim(self._here)
        self._came = False  # an image of another node's
        self._shifts: list[int] = []
        self._version = -1

    def check_untouched(self) -> None:
        """Raises :class:`UnsupportedLayout` where the script has loaded a state of the optimizer by itself: it
        is of a shard that this rank will not have."""
        if any(each.optimizer.state for each in elastic_buckets.distributed(self._state.optimizer)):
            raise UnsupportedLayout(
                "unicron can't go on from an optimizer state that the script loaded: let unicron.Checkpoints do it"
            )

    @property
    def newest(self) -> tuple[int, int]:
        """(base, version) of what all members have."""
        return self.shards.base, self._version

    @property
    def remembered(self) -> int:
        """The newest version that earlier processes left in the memory of this node; -1 for none."""
        return max((version for _, version, _, _ in self.held()), default=-1)

    def hear(self, message: MemoryMessage) -> None:
        """What the agent says of the node's memory, in the channel's thread: a cut that is to be kept, or an image that
        has come."""
        match message:
            case Fetch():
                self._came = True
            case Cut(none=True):
                self._cuts.wanted, self._cuts.none = Wanted(), True
            case Cut():
                self._cuts.wanted = Wanted(message.iteration, message.good)

    def held(self) -> list[tuple[int, int, int, list[int]]]:
        """What this rank, at rest, could give, for its report."""
        if self._came:
            self._came = False
            self.shards.claim(self._here, again=True)
        return self.shards.held()

    def settle(self) -> None:
        """What this rank keeps is whole, where it outlives the rank. All members do so before one of them writes over
        what is older."""
        self.shards.rooms.settle()

    def enter(self, generation: int, members: Sequence[int], slot: int, size: int) -> None:
        """Collective over the members: the groups of a generation are in use, so take this rank's place in them. Other
        states are adopted or begun then."""
        self.settle()
        self.shards.enter(named(generation, self._exchange.largest(secrets.randbits(MARK_BITS))))
        place = slot % size
        nodes = [str(slots[place] // self._per_node) for slots in replicas(members, size)]
        self._shifts = sharding.heirs(nodes, self._copies)

    def adopt(self, base: int, version: int, lacking: bool | None = None) -> None:
        """Take up a state from whoever holds it; with it go the schedule, the biases of experts and the seed.

        lacking: this rank has not trained yet, so it needs what is not trained, too; None where that comes otherwise.
        """
        whole = functools.partial(self._whole, version, lacking)
        extra = msgpack.unpackb(self.shards.adopt(base, version, whole), strict_map_key=False)
        self._state.adopt_schedule(extra["scheduler"])
        auxiliary.adopt_biases(self._state.model, extra["biases"])
        self._state.seed, self._state.loss = int(extra["seed"]), extra["loss"]
        if lacking is not None:
            has = not lacking or self._untrained.restore(extra["untrained"])
            self._untrained.share(has, self._process.device, self._exchange.data_parallel)
        self._confirm(version)

    def _whole(self, version: int, lacking: bool | None, extra: bytes) -> bool:
        """Collective over the members: what the shards of `version` name of what is not trained is there, too."""
        if lacking is None:
            return True
        mark, untrained = msgpack.unpackb(extra, strict_map_key=False)["untrained"], self._untrained
        has = not mark or not lacking or untrained.find(mark) is not None
        nowhere = not untrained.somewhere(has, self._process.device, self._exchange.data_parallel)
        if nowhere:
            warn(
                f"training state in memory passed over: of iteration {version} what is not trained (parameters, "
                "buffers) is in no node's memory; an older state is taken, or a checkpoint"
            )
        return not self._exchange.largest(int(nowhere))

    def keep(self, version: int) -> None:
        """The optimizer's state as it is, and its copies. From then on the gradients that made it may be forgotten."""
        state, untrained = self._state, self._untrained.keep()
        self.shards.rooms.drop_cuts()
        cut = self._cuts.due(version)
        if cut and untrained and self.shards.index == 0:  # one rank of the place is enough
            self.settle()  # the thread has its hands off the cuts
            cut = self._untrained.cut(self._cuts, version)
        extra = {
            "scheduler": state.schedule(),
            "biases": auxiliary.biases(state.model),
            "seed": state.seed,
            "loss": state.loss,
            "untrained": untrained,
        }
        besides = self._untrained.offsets() if self._has_untrained else None
        can = besides is None or self._untrained.image is not None
        file = functools.partial(self._file, version, untrained if self._has_untrained else "") if can else None
        self.shards.export(version, msgpack.packb(extra), file, cut, besides)
        self._confirm(version)

    @property
    def _has_untrained(self) -> bool:
        """Of the files of this rank's place its own is the one that has what is not trained, too."""
        return self.shards.index == 0 and bool(self._untrained.bytes)

    def _file(self, version: int, untrained: str, about: bytes, step: float) -> bytes:
        """For whoever reads the image of this rank's shard as a file of a checkpoint."""
        return contents.head_of(self._state, about, version, self._process.layout.text, step, untrained)

    def set_aside(self, version: int) -> bool:
        """The agent is to make a checkpoint's file of what this rank has kept last; False where it cannot, because it,
        or what is not trained, is in no agent's memory."""
        return self.shards.set_aside(version, self._untrained.image if self._has_untrained else None)

    @property
    def filing(self) -> bool:
        """The agent is at that still."""
        return self.shards.rooms.filing

    @property
    def missed(self) -> bool:
        """What was to become the last checkpoint's file could not be set aside."""
        return self.shards.rooms.missed

    def size(self, filed: bool) -> int:
        """Bytes that the states take: this rank's own and the copies of others', the last two versions of each; filed:
        and one while the agent makes a file of it."""
        return (2 * (1 + len(self._shifts)) + filed) * self.shards.shard_bytes

    def _confirm(self, version: int) -> None:
        self.shards.send_copies(version, self._shifts)
        self._exchange.all_there()
        self.shards.confirm(version)
        self._version = version
