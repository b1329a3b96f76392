"""The shards of a sharded optimizer: their sizes, their partners, and what moves when their number changes. Pure.

A bucket is a run of parameters whose gradients are reduced together. Megatron cuts each bucket into one equal part for
each data-parallel rank; a rank's **shard** is its parts of all buckets, one after the other. The cut follows from the
buckets' sizes and the number of shards alone, so shards of a generation that is gone can still be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from unicron_transition.seams.bucket_cut import QUANTUM, padded

TRIED = 8  # distances of whole nodes that are tried before all others
MARK_BITS = 20  # of a base that are chosen at random; above them is the number of the generation


def named(generation: int, mark: int) -> int:
    """The name of the states that a generation makes: its number, and what tells it from another of that number. A
    controller that has lost its log begins to count anew."""
    return generation << MARK_BITS | mark % (1 << MARK_BITS)


class Uncovered(RuntimeError):
    """Nobody here holds some shard of the state that is asked for."""


@dataclass(frozen=True)
class Move:
    """One run of elements on its way from an old shard to a new one.

    The old shard is `old`, read at `read` by the rank `source`; the new shard is that of the rank `target`, which
    writes at `write`. A rank that has what it needs moves it to itself.
    """

    source: int
    target: int
    old: int
    read: int
    write: int
    size: int


@dataclass(frozen=True)
class Buckets:
    """The sizes of all buckets of one rank's place in a replica, in elements without padding."""

    elements: tuple[int, ...]
    quantum: int = QUANTUM

    def parts(self, count: int) -> list[int]:
        """The size of one part of each bucket when there are `count` shards."""
        return [padded(elements, count, self.quantum) // count for elements in self.elements]

    def length(self, count: int) -> int:
        """The size of one of `count` shards."""
        return sum(self.parts(count))

    def moves(self, held: Sequence[Collection[int]], count: int) -> list[Move]:
        """What brings the state from `count` shards to as many as there are ranks.

        held: for each rank of the new group, in order, the old shards of which it has a copy. What a rank has itself it
        takes from there; everything else comes from the holder that has least to send so far. Deterministic: all ranks
        compute the same. Raises :class:`Uncovered` when a shard has no holder.
        """
        holders: list[list[int]] = [[] for _ in range(count)]
        for rank, has in enumerate(held):
            for shard in has:
                holders[shard].append(rank)
        if missing := [shard for shard, ranks in enumerate(holders) if not ranks]:
            raise Uncovered(f"no copy is left of shard {', '.join(map(str, missing))} of {count}")
        sent: Counter[int] = Counter()
        found = []
        for old, target, read, write, size in self._pieces(count, len(held)):
            ranks = holders[old]
            source = target if target in ranks else min(ranks, key=lambda rank: (sent[rank], rank))
            sent[source] += size if source != target else 0
            found.append(Move(source, target, old, read, write, size))
        return found

    def _pieces(self, before: int, after: int) -> Iterator[tuple[int, int, int, int, int]]:
        """(old shard, new shard, place in the old one, place in the new one, size) of all elements, in order."""
        read_base = write_base = 0
        for elements, old_part, new_part in zip(self.elements, self.parts(before), self.parts(after), strict=True):
            position = 0
            while position < elements:
                old, new = position // old_part, position // new_part
                stop = min((old + 1) * old_part, (new + 1) * new_part, elements)
                read, write = position - old * old_part, position - new * new_part
                yield old, new, read_base + read, write_base + write, stop - position
                position = stop
            read_base, write_base = read_base + old_part, write_base + new_part


def partner_shifts(nodes: Sequence[str], copies: int, blocks: Sequence[str] = ()) -> list[int]:
    """How far from each shard's own rank its copies are: the partners of shard d are the ranks (d + shift) % count.

    nodes: the node of each data-parallel rank; blocks: the block that comes and goes as a whole, where nodes do so
    together. One shift for all, so that each rank sends and receives the same. The shifts are those for which most
    shards have copies in other blocks, then on nodes other than their own, and on different ones. Fewer than `copies`
    where there are not so many other ranks.
    """
    count, blocks = len(nodes), blocks or nodes
    shifts: list[int] = []

    def elsewhere(shift: int) -> tuple[int, int, int, int]:
        outside = fresh = apart = 0
        for rank, node in enumerate(nodes):
            partner, having = (rank + shift) % count, [(rank + earlier) % count for earlier in (0, *shifts)]
            outside += blocks[partner] not in {blocks[other] for other in having}
            fresh += nodes[partner] not in {nodes[other] for other in having}
            apart += nodes[partner] != node
        return outside, fresh, apart, -shift

    beside = next((rank for rank, block in enumerate(blocks) if block != blocks[0]), 1)  # ranks of the first block
    usual = [shift for shift in range(beside, count, beside)]
    while len(shifts) < min(copies, count - 1):
        best, shift = (-1, -1, -1, 0), 0
        for candidate in dict.fromkeys([*usual[:TRIED], *range(1, count)][: count + TRIED]):
            if candidate not in shifts and (found := elsewhere(candidate)) > best:
                best, shift = found, candidate
            if best[0] == count:  # no other can be better
                break
        shifts.append(shift)
    return shifts
