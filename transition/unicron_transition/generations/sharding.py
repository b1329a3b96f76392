"""The shards of a distributed optimizer's states: their names, and the partners that keep copies of them. Pure, and
without torch: the controller uses it too."""

from __future__ import annotations

from collections.abc import Sequence

TRIED_FIRST = 8  # distances of whole nodes that are tried before all others
MARK_BITS = 20  # of a base that are chosen at random; above them is the number of the generation


def state_base(generation: int, mark: int) -> int:
    """Return the name of the states that a generation makes: its number, and a mark that tells it from another of that
    number. A controller that has lost its log begins to count anew."""
    return generation << MARK_BITS | mark % (1 << MARK_BITS)


def partner_shifts(nodes: Sequence[str], copies: int, blocks: Sequence[str] = ()) -> list[int]:
    """Choose how far from each shard's own rank its copies are: the partners of shard d are the ranks (d + shift) %
    count.

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
        for candidate in dict.fromkeys([*usual[:TRIED_FIRST], *range(1, count)][: count + TRIED_FIRST]):
            if candidate not in shifts and (found := elsewhere(candidate)) > best:
                best, shift = found, candidate
            if best[0] == count:  # no other can be better
                break
        shifts.append(shift)
    return shifts
