"""The generation that ranks can form which say with what they could begin: the newest of which there is all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.controller.replication.forming import formable, left_behind, states, taken_over
from unicron_ctl.shared.protocol.structs import RankStatus


def rank(*kept: tuple[int, str], iteration: int = 0, size: int = 1, state: str = "waiting") -> RankStatus:
    return RankStatus(state=state, iteration=iteration, replica=size, kept=list(kept), micro_batches=8)


def test_the_newest_that_any_rank_has_where_each_is_a_replica():
    reports = {0: rank((8, "b"), (7, "a")), 1: rank((0, "")), 2: rank((9, "c"), (8, "b"))}
    found = formable(reports, 1)
    assert (found.iteration, found.source, found.joiners) == (9, 2, [0, 1])
    assert left_behind(reports, found) == ""


def test_places_that_disagree_meet_at_the_iteration_before(snapshot):
    reports = {0: rank((9, "c"), (8, "b"), (0, "")), 1: rank((8, "b"), (7, "a"), (0, ""))}
    found = formable(reports, 2)
    assert (found.iteration, found.members, found.joiners) == (8, [0, 1], [])
    assert left_behind(reports, found) == snapshot


def test_states_of_two_pasts_are_no_whole_together():
    reports = {0: rank((9, "old"), (5, "f")), 1: rank((9, "new"), (5, "f"))}
    assert formable(reports, 2).iteration == 5


def test_a_rank_that_stands_by_and_one_that_starts_with_what_it_left():
    reports = {0: rank((9, "c"), state="standby"), 1: rank((9, "c"), (8, "b"))}
    assert formable(reports, 2).iteration == 9


def test_where_nothing_is_common_there_is_no_generation():
    assert formable({0: rank((9, "c")), 1: rank((8, "b"))}, 2) is None


def test_who_says_nothing_of_it_begins_where_it_stands():
    assert states(rank(iteration=4)) == [(4, "")]
    assert formable({0: rank(iteration=4), 1: rank(iteration=3)}, 1).iteration == 4


_KEPT = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ab")), min_size=1, max_size=3, unique=True)


@given(kept=st.lists(_KEPT, min_size=2, max_size=6), size=st.integers(1, 2))
def test_all_ranks_of_the_source_have_its_state_and_no_newer_one_is_whole(kept, size):
    reports = {slot: rank(*each, size=size) for slot, each in enumerate(kept)}
    found = formable(reports, size)
    whole = {
        state
        for state in {state for each in kept for state in each}
        if all(any(state in kept[slot] for slot in range(place, len(kept), size)) for place in range(size))
    }
    if found is None:
        assert not whole
        return
    assert found.iteration == max(iteration for iteration, _ in whole)
    source = [slot for slot in found.members if slot not in found.joiners]
    assert len(source) == size
    assert any(all((found.iteration, mark) in kept[slot] for slot in source) for mark in "ab")


def test_where_a_whole_replica_lives_nobody_goes_back_and_the_plan_says_so(snapshot):
    reports = {slot: rank((50, "m"), size=2, state="stopped") for slot in (0, 1)}
    reports |= {slot: rank((40, "m"), (0, ""), size=2) for slot in (2, 3)}
    found = formable(reports, 2)
    assert (found.iteration, found.source, found.joiners) == (50, 0, [2, 3])
    assert taken_over(reports, found) == snapshot
    reports[2] = reports[3] = rank((0, ""), size=2)
    assert taken_over(reports, formable(reports, 2)) == "", "who has nothing goes back to nothing"
