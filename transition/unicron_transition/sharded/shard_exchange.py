"""The traffic between the ranks that have a distributed optimizer's shards: the elements that move, the holders of
shards, headers, and flat pieces with their checksums.

A bucket is a run of parameters whose gradients are reduced together. Megatron cuts each bucket into one equal part for
each data-parallel rank; a rank's **shard** is its parts of all buckets, one after the other. The cut follows from the
sizes of the buckets and the number of shards alone, so the shards of an earlier generation can still be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unicron_detector.chaos.inject import injector
from unicron_transition.seams.elastic_buckets import QUANTUM, padded_size
from unicron_transition.snapshot import tensor_transfer
from unicron_transition.snapshot.tensor_transfer import broadcast_bytes

TRIES = 3  # to move the shards, before the generation is given up


class MissingShard(RuntimeError):
    """No rank here holds some shard of the state that is needed."""


@dataclass(frozen=True)
class Move:
    """One run of elements that moves from an old shard to a new one. A rank that has what it needs moves it to
    itself."""

    source: int  # the rank that reads
    target: int  # the rank that writes
    old: int  # the old shard
    read: int  # place in the old shard
    write: int  # place in the target's new shard
    size: int


@dataclass(frozen=True)
class Buckets:
    """The sizes of all buckets of one rank's place in a replica, in elements without padding."""

    elements: tuple[int, ...]
    quantum: int = QUANTUM

    def parts(self, count: int) -> list[int]:
        """Return the size of one part of each bucket if there are `count` shards."""
        return [padded_size(elements, count, self.quantum) // count for elements in self.elements]

    def length(self, count: int) -> int:
        """Return the size of one of `count` shards."""
        return sum(self.parts(count))

    def moves(self, held: Sequence[Collection[int]], count: int) -> list[Move]:
        """Return the moves that bring the state from `count` shards to one for each rank.

        held: for each rank of the new group, in order, the old shards of which it has a copy. A rank takes from itself
        what it has, and everything else from the holder that has sent the least so far. All ranks compute the same
        moves. Raises :class:`MissingShard` for a shard without a holder.
        """
        holders = self.holders(held, count)
        if missing := [shard for shard, ranks in enumerate(holders) if not ranks]:
            raise MissingShard(f"no copy is left of shard {', '.join(map(str, missing))} of {len(holders)}")
        sent: Counter[int] = Counter()
        moves = []
        for old, target, read, write, size in self._pieces(count, len(held)):
            ranks = holders[old]
            source = target if target in ranks else min(ranks, key=lambda rank: (sent[rank], rank))
            sent[source] += size if source != target else 0
            moves.append(Move(source, target, old, read, write, size))
        return moves

    def holders(self, held: Sequence[Collection[int]], count: int) -> list[list[int]]:
        """Return the ranks that hold each of the old shards."""
        holders: list[list[int]] = [[] for _ in range(count)]
        for rank, has in enumerate(held):
            for shard in has:
                holders[shard].append(rank)
        return holders

    def _pieces(self, before: int, after: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (old shard, new shard, place in the old one, place in the new one, size) of all elements, in order. The
        old state has `before` shards of a place, and the new group has `after` ranks."""
        read_base = write_base = 0
        for elements, old_part, new_part in zip(self.elements, self.parts(before), self.parts(after), strict=True):
            for old, new, read, write, size in self.pieces_of(elements, old_part, new_part):
                yield old, new, read_base + read, write_base + write, size
            read_base, write_base = read_base + old_part, write_base + new_part

    @staticmethod
    def pieces_of(elements: int, old_part: int, new_part: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (old part, new part, place in the old one, place in the new one, size) of a bucket, in order."""
        position = 0
        while position < elements:
            old, new = position // old_part, position // new_part
            stop = min((old + 1) * old_part, (new + 1) * new_part, elements)
            yield old, new, position - old * old_part, position - new * new_part, stop - position
            position = stop


@dataclass(frozen=True)
class LaneBuckets(Buckets):
    """Buckets of a replica whose lanes share experts. All lanes are sharded together but for the experts, of
    which each lane has others. A place has a shard for each replica; that of replica r in lane f is number r * lanes +
    f of all lanes' shards, by which the moves are named."""

    lanes: int = 1
    own: tuple[bool, ...] = ()
    """Whether a bucket is of the lane's own experts."""

    def parts(self, count: int) -> list[int]:
        return [
            padded_size(elements, ranks, self.quantum) // ranks
            for elements, ranks in zip(self.elements, self._ranks(count), strict=True)
        ]

    def _ranks(self, count: int) -> list[int]:
        """Return the number of ranks that share each bucket if there are `count` shards of a place."""
        return [count if own else count * self.lanes for own in self.own]

    def _pieces(self, before: int, after: int) -> Iterator[tuple[int, int, int, int, int]]:
        read_base = write_base = 0
        after //= self.lanes
        parts = zip(self.elements, self.own, self.parts(before), self.parts(after), strict=True)
        for elements, own, old_part, new_part in parts:
            for old, new, read, write, size in Buckets.pieces_of(elements, old_part, new_part):
                for lane in range(self.lanes) if own else (None,):
                    names = (old, new) if lane is None else (old * self.lanes + lane, new * self.lanes + lane)
                    yield *names, read_base + read, write_base + write, size
            read_base, write_base = read_base + old_part, write_base + new_part

    def holders(self, held: Sequence[Collection[int]], count: int) -> list[list[int]]:
        numbered = ({each * self.lanes + rank % self.lanes for each in has} for rank, has in enumerate(held))
        return super().holders(list(numbered), count * self.lanes)


class CopyFailed(RuntimeError):
    """A part of the state did not reach another rank."""


class ShardExchange:
    """The exchange of one rank. All methods but :meth:`check_alive` are collective over the group, and raise
    RuntimeError if a peer is lost."""

    def __init__(self, group: Callable[[], Any], wire: torch.device, lost: Callable[[], bool]):
        self._group = group
        """Returns the group over which the optimizer is sharded in the present generation."""
        self._wire = wire  # the device on which the backend wants its tensors
        self._lost = lost  # whether the generation is over

    def who_holds(self, count: int, step: float, shards: Sequence[int]) -> tuple[int, float, list[set[int]]]:
        """Return the number of shards of a set, Adam's step, and the shards that each rank holds, from what this rank
        knows: 0, 0 and none if it has no part."""
        group = self._group()
        numbers = torch.tensor([count, step, len(shards)], dtype=torch.float64, device=self._wire)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        self.check_alive()
        most = max(int(numbers[2]), 1)
        mine = torch.tensor([*shards, *[-1] * (most - len(shards))], dtype=torch.int64)
        table = torch.empty(group.size() * mine.numel(), dtype=torch.int64, device=self._wire)
        # gloo's all-reduce would take a sixth of the time, but ranks of release 0.2 gather
        dist.all_gather_into_tensor(table, mine.to(self._wire), group=group)
        self.check_alive()
        rows = table.view(group.size(), -1).tolist()
        return int(numbers[0]), float(numbers[1]), [{shard for shard in row if shard >= 0} for row in rows]

    def header(self, mine: bytes, source: int) -> bytes:
        """Get the header of rank `source` of the group. Raises :class:`CopyFailed` if it was corrupted in transit."""
        group = self._group()
        header, sound = broadcast_bytes(mine if group.rank() == source else None, source, self._wire, group)
        if not sound:
            raise CopyFailed("the header of the optimizer's state was spoiled on its way")
        return header

    def send(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], incoming: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Send flat pieces to ranks of the group, and receive others (:func:`tensor_transfer.send`)."""
        tensor_transfer.send(outgoing, incoming, self._wire, self._group(), self.check_alive)

    def send_soundly(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], incoming: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Send, and again if bytes were corrupted in transit. Raises :class:`CopyFailed` after the last try."""
        group = self._group()
        for _ in range(TRIES):
            spoil = bool(outgoing) and injector.spoils_transfer()
            wrong = tensor_transfer.send_checked(outgoing, incoming, self._wire, group, self.check_alive, spoil)
            if not any(tensor_transfer.gather(len(wrong), self._wire, group)):
                return
        raise CopyFailed(f"parts of the optimizer's state were spoiled on their way {TRIES} times")

    def check_alive(self) -> None:
        """Raise :class:`CopyFailed` if the generation is over. Received data count only after this check: an aborted
        NCCL collective returns garbage and raises nothing."""
        if self._wire.type == "cuda":
            torch.cuda.current_stream().synchronize()
        if self._lost():
            raise CopyFailed("a member was lost while the state was sent")
