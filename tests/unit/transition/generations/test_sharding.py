"""The cut of buckets into shards, the moves when their number changes, and the places of copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_transition.generations.sharding import partner_shifts
from unicron_transition.seams.elastic_buckets import capacity, padded_size
from unicron_transition.sharded.shard_exchange import Buckets, LaneBuckets, MissingShard

COUNTS = st.integers(1, 9)
SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(tuple)


@given(st.integers(1, 10**6), st.integers(1, 40), st.sampled_from([128, 2**16]))
def test_a_bucket_has_room_for_every_number_of_parts(elements, most, quantum):
    room = capacity(elements, most, quantum)
    assert room % padded_size(1, most, quantum) == 0  # what Megatron asserts of a bucket that is cut into `most`
    assert room <= elements + 2 * most * quantum
    for count in range(1, most + 1):
        assert elements <= padded_size(elements, count, quantum) <= room
        assert padded_size(elements, count, quantum) % count == 0 == padded_size(elements, count, quantum) % quantum


@st.composite
def changes(draw):
    """Draw buckets, the old number of shards, and the shards of each rank of the new group, at least one copy of
    each."""
    buckets, count, ranks = Buckets(draw(SIZES)), draw(COUNTS), draw(COUNTS)
    held = [draw(st.sets(st.integers(0, count - 1), max_size=2)) for _ in range(ranks)]
    for shard in range(count):
        if not any(shard in has for has in held):
            held[draw(st.integers(0, ranks - 1))].add(shard)
    return buckets, count, held


def contents(buckets: Buckets, count: int) -> list[list[int | None]]:
    """Return every shard's elements, each a different number; None is padding."""
    shards: list[list[int | None]] = [[] for _ in range(count)]
    number = 0
    for elements, part in zip(buckets.elements, buckets.parts(count), strict=True):
        names: list[int | None] = [*range(number, number + elements)]
        names += [None] * (part * count - elements)
        for index, shard in enumerate(shards):
            shard += names[index * part : (index + 1) * part]
        number += elements
    return shards


@given(changes())
def test_moves_write_every_element_once_and_move_only_what_changes_hands(change):
    buckets, count, held = change
    old, wanted = contents(buckets, count), contents(buckets, len(held))
    new: list[list[int | None]] = [[None] * buckets.length(len(held)) for _ in held]
    for move in buckets.moves(held, count):
        assert move.old in held[move.source]
        assert move.source == move.target or move.old not in held[move.target]
        there = slice(move.write, move.write + move.size)
        assert set(new[move.target][there]) == {None}
        new[move.target][there] = old[move.old][move.read : move.read + move.size]
    assert new == wanted


@st.composite
def lane_changes(draw):
    """The same with lanes that share experts. Each rank of the new group holds shards of its own lane."""
    sizes, lanes, count, replicas = draw(SIZES), draw(st.integers(2, 3)), draw(COUNTS), draw(COUNTS)
    own = tuple(draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    held = [draw(st.sets(st.integers(0, count - 1), max_size=2)) for _ in range(replicas * lanes)]
    for lane in range(lanes):
        for shard in range(count):
            if not any(shard in has for has in held[lane::lanes]):
                held[lanes * draw(st.integers(0, replicas - 1)) + lane].add(shard)
    return LaneBuckets(sizes, lanes=lanes, own=own), count, held


def lane_contents(buckets: LaneBuckets, count: int) -> list[list[tuple[int, int, int] | None]]:
    """Return every shard's elements: (bucket, lane whose own it is, number); None is padding."""
    ranks = count * buckets.lanes
    shards: list[list[tuple[int, int, int] | None]] = [[] for _ in range(ranks)]
    for bucket, elements in enumerate(buckets.elements):
        part = buckets.parts(count)[bucket]
        for rank, shard in enumerate(shards):
            own = buckets.own[bucket]
            lane, number = (rank % buckets.lanes, rank // buckets.lanes) if own else (-1, rank)
            places = range(number * part, (number + 1) * part)
            shard += [(bucket, lane, place) if place < elements else None for place in places]
    return shards


@given(lane_changes())
def test_moves_among_lanes_bring_each_lane_its_own_experts(change):
    buckets, count, held = change
    old, wanted = lane_contents(buckets, count), lane_contents(buckets, len(held) // buckets.lanes)
    new: list[list[tuple[int, int, int] | None]] = [[None] * len(shard) for shard in wanted]
    for move in buckets.moves(held, count):
        assert move.old // buckets.lanes in held[move.source], "it holds it"
        assert move.old % buckets.lanes == move.source % buckets.lanes, "of its own lane"
        there = slice(move.write, move.write + move.size)
        assert set(new[move.target][there]) == {None}
        new[move.target][there] = old[move.old][move.read : move.read + move.size]
    assert new == wanted


@given(changes())
def test_senders_share_the_work(change):
    """No holder sends more than another one of the same shards by more than the largest piece."""
    buckets, count, held = change
    moves = [move for move in buckets.moves(held, count) if move.source != move.target]
    sent = {rank: sum(move.size for move in moves if move.source == rank) for rank in range(len(held))}
    largest = max((move.size for move in moves), default=0)
    for one in sent:
        for other in sent:
            if held[one] == held[other] == set(range(count)):
                assert abs(sent[one] - sent[other]) <= largest


@given(changes(), st.data())
def test_a_shard_without_a_holder_is_named(change, data):
    buckets, count, held = change
    lost = data.draw(st.integers(0, count - 1))
    with pytest.raises(MissingShard, match=rf"\b{lost}\b.* of {count}"):
        buckets.moves([has - {lost} for has in held], count)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=8), st.integers(0, 3))
def test_partners_are_other_ranks(nodes, copies):
    shifts = partner_shifts(nodes, copies)
    assert len(shifts) == len(set(shifts)) == min(copies, len(nodes) - 1)
    assert all(1 <= shift < len(nodes) for shift in shifts)


@pytest.mark.parametrize(
    ("nodes", "blocks", "copies", "shifts"),
    [
        ("ab", "", 1, [1]),
        ("aa", "", 1, [1]),
        ("aabb", "", 1, [2]),
        ("abab", "", 1, [1]),
        ("aaaabbbb", "", 1, [4]),
        ("aabbcc", "", 2, [2, 4]),
        ("abc", "", 2, [1, 2]),
        ("a", "", 2, []),
        ("abcd", "xxyy", 1, [2]),
        ("aabbccdd", "xxxxyyyy", 2, [4, 2]),
        ("abcdef", "xxyyzz", 2, [2, 4]),
        ("ab", "xx", 1, [1]),
    ],
)
def test_copies_are_in_other_blocks_and_on_other_nodes(nodes, blocks, copies, shifts):
    assert partner_shifts(nodes, copies, blocks) == shifts
