"""The shards of a distributed optimizer's states: their names, and the partners that keep copies of them. Pure and
without torch, because the controller uses it too."""

from __future__ import annotations

from collections.abc import Sequence

TRIED_FIRST = 8  # multiples of a node, which are tried before all other distances
MARK_BITS = 20  # random bits of a base; the number of the generation is above them


def state_base(generation: int, mark: int) -> int:
    """Return the name of the states that a generation makes: its number, and a mark that distinguishes it from another
    generation of that number. (A controller that has lost its log counts from the start again.)"""
    return generation << MARK_BITS | mark % (1 << MARK_BITS)


def partner_shifts(nodes: Sequence[str], copies: int, blocks: Sequence[str] = ()) -> list[int]:
    """Choose how far the copies of each shard are from its own rank: the partners of shard d are the ranks (d + shift)
    % count.

    nodes: the node of each data-parallel rank. blocks: the group of nodes that comes and goes together, if there are
    such. All shards have the same shifts, so that each rank sends and receives equally much. The chosen shifts give
    most shards copies in other blocks, then on nodes other than their own, then on different nodes. There are fewer
    than `copies` if there are not that many other ranks.
    """
    count, blocks = len(nodes), blocks or nodes
    shifts: list[int] = []

    def elsewhere(shift: int) -> tuple[int, int, int, int]:
        outside = fresh = apart = 0
        for rank, node in enumerate(nodes):
            partner, holders = (rank + shift) % count, [(rank + chosen) % count for chosen in (0, *shifts)]
            outside += blocks[partner] not in {blocks[other] for other in holders}
            fresh += nodes[partner] not in {nodes[other] for other in holders}
            apart += nodes[partner] != node
        return outside, fresh, apart, -shift

    beside = next((rank for rank, block in enumerate(blocks) if block != blocks[0]), 1)  # ranks of the first block
    usual = [shift for shift in range(beside, count, beside)]
    while len(shifts) < min(copies, count - 1):
        best, shift = (-1, -1, -1, 0), 0
        for candidate in dict.fromkeys([*usual[:TRIED_FIRST], *range(1, count)][: count + TRIED_FIRST]):
            if candidate not in shifts and (score := elsewhere(candidate)) > best:
                best, shift = score, candidate
            if best[0] == count:  # nothing can be better
                break
        shifts.append(shift)
    return shifts
