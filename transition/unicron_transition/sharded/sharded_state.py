"""The state of a distributed optimizer over the generations: every shard is in two nodes' memory before the gradients
that made it are forgotten (docs/design/sharded-optimizer.md)."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgpack
import torch

from unicron_detector.processes.rank_messages import Plan
from unicron_transition.generations import sharding
from unicron_transition.generations.layout import replicas
from unicron_transition.generations.sharding import MARK_BITS, state_base
from unicron_transition.iteration.exchange import Exchange
from unicron_transition.iteration.gradient_copies import Where
from unicron_transition.iteration.rank_log import warn
from unicron_transition.iteration.rank_process import Process
from unicron_transition.megatron import auxiliary
from unicron_transition.seams import elastic_buckets
from unicron_transition.seams.table import UnsupportedLayout
from unicron_transition.sharded.buffer_pool import BufferPool
from unicron_transition.sharded.shards import Shards
from unicron_transition.snapshot import checkpoint_file, contents
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.cuts import Cuts
from unicron_transition.snapshot.frozen import UntrainedTensors
from unicron_transition.snapshot.image_format import memory_folder
from unicron_transition.snapshot.keeper import wanted_copies
from unicron_transition.snapshot.local_state import LocalState
from unicron_transition.snapshot.migrate import TrainingState


class ShardedState(LocalState):
    """The state of one rank: its own shard, and copies of others. Collective methods raise RuntimeError for a lost
    peer."""

    sharded = True

    def __init__(self, process: Process, state: TrainingState, exchange: Exchange, where: Where = Where.CARD):
        super().__init__(state)
        self._process, self._exchange = process, exchange
        self._copies = wanted_copies()
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._per_block = self._per_node * int(os.environ.get("UNICRON_BLOCK", "1"))
        self._slot, self._size = slot, size = process.slot, process.layout.size
        here: torch.device = next(state.model[0].parameters()).device
        memory = torch.device("cpu") if where is Where.HOST else here
        images = memory_folder() if memory.type == "cpu" else None
        self._cuts: Cuts = Cuts(images, slot, warn)
        pinned = memory.type == "cpu" and here.type == "cuda"
        pool = BufferPool(images, slot, memory, pinned=pinned, cuts=self._cuts)
        self.shards = Shards(state.model, state.optimizer, process.watch.lost, pool, process.device, slot % size, size)
        self._untrained = UntrainedTensors(state, images, slot, slot % size, size, warn)
        first = slot // self._per_node * self._per_node
        self._here = [each for each in range(first, first + self._per_node) if each % size == slot % size]
        self.shards.claim(self._here)
        self._filing = pool.aside
        self._shifts: list[int] = []
        self._version = self._version_before = -1
        self._start = 0
        self._unread = False  # the checkpoint was not read, because memory holds a state at least as new
        self._trained = False  # this rank has been in a generation

    # ------------------------------------------------------------ before a generation
    def find_start(self, checkpoints: Checkpoints | None, start: int, writer: Callable[[], Writer]) -> int:
        self._checkpoints, self._folder, self._start = checkpoints, memory_folder(), start
        saved = None
        if checkpoints is not None:
            newest = next(iter(checkpoints.whole_ones()), None)
            self._unread = newest is not None and self.remembered >= newest.iteration
            saved = newest.iteration if newest is not None and self._unread else checkpoints.load(self._state)
        self.note_destination()
        if saved is None or self._unread:
            self._check_untouched()
        return start if saved is None else saved

    def _check_untouched(self) -> None:
        """Refuse an optimizer state that the script has loaded: it belongs to a shard that this rank will not have."""
        if any(each.optimizer.state for each in elastic_buckets.distributed_optimizers(self._state.optimizer)):
            raise UnsupportedLayout(
                "unicron can't go on from an optimizer state that the script loaded: let unicron.Checkpoints do it"
            )

    @property
    def remembered(self) -> int:
        """The newest version that earlier processes left in this node's memory; -1 for none."""
        return max((version for _, version, _, _ in self.shards_to_give()), default=-1)

    def shards_to_give(self) -> list[tuple[int, int, int, list[int]]]:
        if self._came:
            self._came = False
            self.shards.claim(self._here, again=True)
        return self.shards.held_shards()

    # ------------------------------------------------------------ into a generation
    def enter_generation(self, plan: Plan, iteration: int) -> None:
        before = self.shards.base, self._version
        self._version_before = self._version
        self.wait_whole()
        self.shards.enter_generation(state_base(plan.generation, self._exchange.largest(secrets.randbits(MARK_BITS))))
        place = self._slot % self._size
        slots = [replica[place] for replica in replicas(plan.members, self._size)]
        nodes, blocks = ([str(slot // ranks) for slot in slots] for ranks in (self._per_node, self._per_block))
        self._shifts = sharding.partner_shifts(nodes, self._copies, blocks)
        if plan.boundary:  # first: an overlapped gather is not over at a boundary
            self.adopt(*self._exchange.furthest(before))
        if self._unread and plan.state is None and self._slot not in plan.joiners:
            assert self._checkpoints is not None
            # the state in memory was not used, and others get it from here
            self._checkpoints.load(self._state, iteration)

    def complete(self, plan: Plan, iteration: int) -> int:
        if not plan.boundary:
            iteration = self._take_shards(plan, iteration)
        self._trained, self._unread = True, False
        return iteration

    def _take_shards(self, plan: Plan, iteration: int) -> int:
        """Take the optimizer's state into the new layout: the plan's or, if no rank has trained, the parameters'."""
        if plan.state is not None:
            self.adopt(*plan.state, lacking=not self._trained or plan.state[1] < self._version_before)
            return plan.state[1]
        if self._checkpoints is not None and iteration > self._start:
            self._checkpoints.load(self._state, iteration)  # this rank has another shard now
        else:
            self._state.optimizer.reload_model_params()
        self.keep_step(iteration)
        return iteration

    def adopt(self, base: int, version: int, lacking: bool | None = None) -> None:
        """Take a state from the ranks that hold it, with the schedule, the biases of experts and the seed.

        lacking: whether this rank has not trained yet, so that it also needs the untrained tensors; None if these come
        in another way.
        """
        whole = functools.partial(self._is_whole, version, lacking)
        extra = msgpack.unpackb(self.shards.adopt(base, version, whole), strict_map_key=False)
        self._state.adopt_schedule(extra["scheduler"])
        auxiliary.adopt_biases(self._state.model, extra["biases"])
        self._state.seed, self._state.loss = int(extra["seed"]), extra["loss"]
        if lacking is not None:
            has = not lacking or self._untrained.restore(extra["untrained"])
            self._untrained.share(has, self._process.device, self._exchange.data_parallel)
        self._confirm(version)

    def _is_whole(self, version: int, lacking: bool | None, extra: bytes) -> bool:
        """Whether the untrained tensors for the shards of `version` exist in some rank; collective."""
        if lacking is None:
            return True
        mark, untrained = msgpack.unpackb(extra, strict_map_key=False)["untrained"], self._untrained
        has = not mark or not lacking or untrained.find(mark) is not None
        nowhere = not untrained.exists_somewhere(has, self._process.device, self._exchange.data_parallel)
        if nowhere:
            warn(
                f"training state in memory passed over: the untrained part of iteration {version} (parameters, "
                "buffers) is in no node's memory; an older state or a checkpoint is used"
            )
        return not self._exchange.largest(int(nowhere))

    # ------------------------------------------------------------ in an iteration
    def wait_whole(self) -> None:
        self.shards.pool.wait_whole()

    def keep_step(self, version: int) -> None:
        state, untrained = self._state, self._untrained.update_image(version)
        self.shards.pool.remove_unwanted_cuts()
        cut = self._cuts.is_due(version)
        if cut and untrained and self.shards.index == 0:  # one rank of the place is enough
            self.wait_whole()  # the thread must be done with the cuts
            cut = self._untrained.keep_cut(self._cuts, version)
        extra = {
            "scheduler": state.schedule(),
            "biases": auxiliary.biases(state.model),
            "seed": state.seed,
            "loss": state.loss,
            "untrained": untrained,
        }
        besides = self._untrained.offsets() if self._files_untrained else None
        can = besides is None or self._untrained.image is not None
        file = functools.partial(self._file_head, version, untrained if self._files_untrained else "") if can else None
        self.shards.export(version, msgpack.packb(extra), file, cut, besides)
        self._confirm(version)

    def _confirm(self, version: int) -> None:
        self.shards.send_copies(version, self._shifts)
        self._exchange.all_there()
        self.shards.confirm(version)
        self._version = version

    # ------------------------------------------------------------ what audits have found
    def _remove_images_after(self, iteration: int) -> None:
        self.wait_whole()
        self.shards.drop_after(iteration)
        if (folder := memory_folder()) is not None:
            try:
                checkpoint_file.remove_after(folder, iteration, self._cuts.forget)
            except OSError as error:
                warn(f"unsound training states after iteration {iteration} could not be removed from memory: {error}")

    # ------------------------------------------------------------ checkpoints' files
    @property
    def _files_untrained(self) -> bool:
        """Whether this rank's checkpoint file also has the untrained tensors of its place."""
        return self.shards.index == 0 and bool(self._untrained.bytes)

    def _file_head(self, version: int, untrained: str, about: bytes, step: float) -> bytes:
        """Return the head of this rank's shard for readers of a checkpoint's file."""
        return contents.head_of(self._state, about, version, self._process.layout.text, step, untrained)

    def set_aside(self, iteration: int, members: Sequence[int], generation: int, writer: Writer) -> bool:
        image = self._untrained.image if self._files_untrained else None
        return self.agent_makes_files and self.shards.set_aside(iteration, image)

    def file_writer(self, writer: Writer) -> Writer:
        return replace(writer, shards=self.shards.mark)

    def forget_asked(self) -> None:
        self.shards.pool.forget_missed()
        super().forget_asked()

    # ------------------------------------------------------------ memory
    @property
    def bytes(self) -> int:
        """Bytes of the states: two versions of the own shard and of each copy, and one that becomes a file."""
        filed = self._checkpoints is not None and self._checkpoints.destination is not None
        return (2 * (1 + len(self._shifts)) + filed) * self.shards.shard_bytes

    def memory_text(self, parameters: int) -> str:
        return f", {self.bytes / parameters:.1f} for the optimizer's states"
