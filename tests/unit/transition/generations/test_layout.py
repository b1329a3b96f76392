"""Places, replicas, and the composition of new ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_transition.generations import layout
from unicron_transition.generations.layout import Layout

SIZES = st.integers(1, 4)
LAYOUTS = st.builds(Layout, SIZES, SIZES, SIZES, SIZES, SIZES)


@given(LAYOUTS)
def test_a_place_and_its_coordinate_are_each_others_inverse(shape):
    coordinates = [(*shape.coordinate(place), shape.lane(place)) for place in range(shape.size)]
    assert [shape.place(*coordinate) for coordinate in coordinates] == list(range(shape.size))
    assert len(set(coordinates)) == shape.size


def test_tensor_is_fastest_then_context_then_lane_then_pipeline():
    shape = Layout(tensor=2, context=3, pipeline=2, shard=5)
    assert [shape.place(tensor=1), shape.place(context=1), shape.place(lane=1), shape.place(pipeline=1)] == [
        1,
        2,
        6,
        30,
    ]


@given(LAYOUTS, st.integers(1, 5))
def test_every_rank_of_megatron_is_one_place_of_one_replica(shape, replicas):
    pairs = [(replica, place) for replica in range(replicas) for place in range(shape.size)]
    ranks = [shape.megatron_rank(replica, place, replicas) for replica, place in pairs]
    assert sorted(ranks) == list(range(len(pairs)))
    assert [shape.from_megatron_rank(rank, replicas) for rank in ranks] == pairs


def test_megatrons_order_has_the_replicas_between_tensor_and_pipeline():
    """`parallel_state.initialize_model_parallel` builds these groups for TP2 PP2 over 8 ranks."""
    shape = Layout(tensor=2, pipeline=2)
    assert [shape.megatron_rank(0, place, 2) for place in range(4)] == [0, 1, 4, 5]
    assert [shape.megatron_rank(1, place, 2) for place in range(4)] == [2, 3, 6, 7]


def test_megatrons_order_has_the_lanes_of_a_replica_side_by_side():
    """Its expert groups over 4 ranks with EP2 are (0, 1) and (2, 3)."""
    shape = Layout(expert=2)
    assert [[shape.megatron_rank(replica, place, 2) for place in range(2)] for replica in range(2)] == [[0, 1], [2, 3]]


def test_replicas_take_turns_with_as_many_micro_batches_as_they_have_lanes():
    assert [layout.deal(7, 2, replica, lanes=2) for replica in range(2)] == [[0, 1, 4, 5], [2, 3, 6]]


def test_a_replica_leaves_out_its_turns_after_its_share():
    dealt = [layout.deal(11, 3, replica, lanes=2, shares=[1, 3, 2]) for replica in range(3)]
    assert dealt == [[0, 1], [2, 3, 6, 7, 10], [4, 5, 8, 9]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_any_shares_deal_each_micro_batch_once(shares, lanes, data):
    """The first round of each replica is that of an equal deal: an auditor computes it without knowing the shares."""
    total = sum(shares) * lanes - data.draw(st.integers(0, lanes - 1))
    replicas = len(shares)
    dealt = [layout.deal(total, replicas, replica, lanes, shares) for replica in range(replicas)]
    assert sorted(index for own in dealt for index in own) == list(range(total))
    assert [-(-len(own) // lanes) for own in dealt] == shares
    assert all(own[:lanes] == layout.deal(total, replicas, place, lanes)[:lanes] for place, own in enumerate(dealt))


def test_equal_shares_are_the_equal_deal():
    for replica in range(3):
        assert layout.deal(8, 3, replica, shares=[3, 3, 2]) == layout.deal(8, 3, replica)


@pytest.mark.parametrize("shares", [[4, 4, 1], [4, 4]])
def test_shares_that_are_not_all_rounds_are_refused(shares):
    with pytest.raises(ValueError, match="8 micro-batches in rounds of 1"):
        layout.deal(8, 3, 0, shares=shares)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (Layout(), ""),
        (Layout(2, 1, 2), "TP2 PP2"),
        (Layout(context=4), "CP4"),
        (Layout(8, 2, 4), "TP8 CP2 PP4"),
        (Layout(2, shard=4), "TP2 F4"),
    ],
)
def test_a_layout_for_people(shape, text):
    assert shape.text == text


def test_a_layout_without_ranks_is_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        Layout(tensor=0)


def test_replicas_of_members_and_their_heads():
    members = [0, 5, 2, 3]
    assert layout.replicas(members, 2) == [[0, 5], [2, 3]] and layout.heads(members, 2) == [0, 2]
    assert layout.heads_of(members, 2) == {0: 0, 5: 0, 2: 2, 3: 2}
    assert [layout.replica_of(members, 2, slot) for slot in members] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="no multiple"):
        layout.replicas([0, 1, 2], 2)


def test_home_replicas_come_first_then_those_that_other_slots_make():
    assert layout.compose([0, 1, 2, 5, 8, 7], 2) == ([[0, 1], [2, 5], [8, 7]], [])
    assert layout.compose([0, 3, 5], 2) == ([[0, 3]], [5])


def test_the_fullest_homes_stay_together():
    """Slot 11 completes 4 to 6, which are together; slot 0 waits alone."""
    assert layout.compose([0, 4, 5, 6, 11], 4) == ([[4, 5, 6, 11]], [0])


@given(st.sets(st.integers(0, 40)), st.integers(1, 5))
def test_nothing_is_lost_and_as_many_as_can_be_are_complete(slots, size):
    complete, rest = layout.compose(slots, size)
    used = [slot for replica in complete for slot in replica]
    assert sorted([*used, *rest]) == sorted(slots)
    assert all([slot % size for slot in replica] == list(range(size)) for replica in complete)
    assert len(complete) == min(sum(slot % size == place for slot in slots) for place in range(size))
    homes = [home for home in range(41) if slots >= set(range(home * size, (home + 1) * size))]
    assert all(list(range(home * size, (home + 1) * size)) in complete for home in homes)
    members = layout.arrange(complete)
    assert layout.heads(members, size) == sorted(layout.heads(members, size))


@given(SIZES, SIZES, SIZES, SIZES)
def test_a_stated_layout_is_read_as_it_is_written(tensor, pipeline, shard, virtual):
    one = layout.StatedLayout(Layout(tensor, 1, pipeline, shard), virtual if pipeline > 1 else 1)
    assert layout.parse_layout(one.text) == one


@given(SIZES, SIZES, SIZES, SIZES)
def test_the_lanes_of_a_layout_are_known_by_its_text(tensor, pipeline, shard, expert):
    shape = Layout(tensor, 1, pipeline, shard, expert)
    assert layout.lanes_of(shape.text) == shape.lanes


@pytest.mark.parametrize("text", ["", "F", "F0", "FF2", "F2x", "VPP2", "F123456", "words of an older release"])
def test_a_text_that_is_no_layout_has_one_lane(text):
    assert layout.lanes_of(text) == 1
