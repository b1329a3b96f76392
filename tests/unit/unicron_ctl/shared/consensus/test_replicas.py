"""The decision after a Break where several ranks make a replica: complete ones go on, and nobody is thrown away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.consensus.survivors_plan import decide, newest_state
from unicron_ctl.shared.protocol.structs import RankStatus, Shards
from unicron_transition.generations import layout

TOTAL = 8


def stopped(iteration: int, phase: str = "computing", done: tuple[int, ...] = (), *shards: Shards) -> RankStatus:
    return RankStatus(state="stopped", iteration=iteration, phase=phase, done=list(done), shards=list(shards))


def is_partition(assignment: dict[int, list[int]], total: int = TOTAL) -> bool:
    return sorted(index for indices in assignment.values() for index in indices) == list(range(total))


def test_a_loss_takes_out_its_replica_and_its_living_rank_is_a_standby():
    reports = {0: stopped(7, done=(0, 2)), 1: stopped(7, done=(0, 2)), 2: stopped(7)}
    found = decide(reports, 4, lost_share=[1, 3], lost_iteration=7, size=2, former=[0, 1, 2, 3])
    assert (found.members, found.standbys, found.unusable) == ([0, 1], [2], {})
    assert (found.step, found.iteration, found.assignment) == (None, 7, {0: [0, 2, 1, 3]})
    assert (found.reused, found.redistributed) == (2, 2)
    assert "1 replica of 2 ranks goes on" in found.reason and "[2] complete none" in found.reason


def test_living_ranks_of_two_broken_replicas_compose_one_and_keep_nothing():
    """Slots 1 and 2 are lost. What 0 and 3 have is of different micro-batches: a mix that cannot be taken apart."""
    reports = {0: stopped(7, done=(0, 2)), 3: stopped(7, done=(1, 3))}
    found = decide(reports, 4, lost_iteration=7, size=2, former=[0, 1, 2, 3])
    assert (found.members, found.standbys) == ([0, 3], [])
    assert found.assignment == {0: [0, 1, 2, 3]} and found.reused == 0 and found.recomputed == 4


def test_a_replica_has_what_all_of_its_ranks_have():
    reports = {0: stopped(7, "reducing", (0, 2)), 1: stopped(7), 2: stopped(7, done=(1, 3)), 3: stopped(7, done=(1, 3))}
    found = decide(reports, 4, size=2, former=[0, 1, 2, 3])
    assert found.assignment == {0: [0], 2: [1, 3, 2]}
    assert found.reused == 2


def test_a_replica_keeps_the_order_of_its_head_and_nothing_of_another_iteration():
    reports = {0: stopped(7, done=(2, 0)), 1: stopped(7, done=(0, 2))}
    assert decide(reports, 3, size=2, former=[0, 1]).assignment == {0: [2, 0, 1]}
    reports = {slot: stopped(7, "synced", (2,)) for slot in (0, 1)} | {slot: stopped(8, done=(1,)) for slot in (2, 3)}
    assert decide(reports, 4, size=2, former=[0, 1, 2, 3]).assignment == {0: [0, 3], 2: [1, 2]}


def test_nobody_steps_unless_all_ranks_of_all_members_are_synced():
    reports = {slot: stopped(7, "synced", (0,)) for slot in (0, 1)} | {
        slot: stopped(7, "synced", (1,)) for slot in (2, 3)
    }
    assert decide(reports, 2, size=2, former=[0, 1, 2, 3]).step == 7
    found = decide({**reports, 3: stopped(7, "reducing", (1,))}, 2, size=2, former=[0, 1, 2, 3])
    assert found.step is None and found.assignment == {0: [0], 2: [1]}


def test_a_rank_that_has_stepped_proves_the_step_for_all_even_as_a_standby():
    reports = {0: stopped(7, "synced", (0,)), 1: stopped(7, "synced", (0,)), 2: stopped(7, "stepped", (1,))}
    found = decide(reports, 2, size=2, former=[0, 1, 2, 3])
    assert (found.members, found.standbys, found.step, found.iteration) == ([0, 1], [2], 7, 8)


def test_a_composed_replica_whose_ranks_are_synced_steps_with_the_others():
    """The reduce was complete at each place, whoever it was with."""
    reports = {slot: stopped(7, "synced", (slot // 2,)) for slot in (0, 3, 4, 5)}
    found = decide(reports, 3, size=2, former=[0, 1, 2, 3, 4, 5])
    assert (found.members, found.step) == ([0, 3, 4, 5], 7)


def test_without_a_rank_for_each_place_nobody_goes_on():
    reports = {0: stopped(7), 2: stopped(7)}
    assert decide(reports, 4, size=2, former=[0, 1, 2, 3]) is None


def test_a_composed_replica_of_the_broken_generation_is_one_replica():
    """Its slots have other homes: slot 2 is no mate of slot 3 any more."""
    reports = {0: stopped(7, done=(0,)), 3: stopped(7, done=(0,)), 4: stopped(7, done=(1,))}
    found = decide(reports, 2, size=2, former=[0, 3, 4, 5])
    assert (found.members, found.standbys, found.assignment) == ([0, 3], [4], {0: [0, 1]})


def test_where_the_replicas_are_not_known_those_at_home_are_taken():
    """A generation of which nobody could say what its plan was."""
    reports = {slot: stopped(7, done=(slot // 2,)) for slot in (0, 1, 2, 4)}
    for former in ((), (0, 1, 2), (0, 1, 2, 4)):
        found = decide(reports, 3, size=2, former=former)
        assert (found.members, found.standbys) == ([0, 1], [2, 4])
        assert found.reused == 1, "the first replica is whole"
    at_home = decide({slot: stopped(7, done=(slot // 2,)) for slot in (2, 3)}, 3, size=2)
    assert (at_home.members, at_home.reused) == ([2, 3], 1)


def test_two_replicas_with_the_same_micro_batch_do_not_both_go_on():
    reports = {slot: stopped(7, done=(0, 1)) for slot in range(4)}
    found = decide(reports, 4, size=2, former=[0, 1, 2, 3])
    assert found.members == [] and "has micro-batch 0" in found.unusable[2]
    assert (found.reused, found.recomputed, found.redistributed) == (0, 0, 0)


@st.composite
def broken_generations(draw):
    """Reports as the protocol can produce them, of replicas that may be composed of any slots."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    count = draw(st.integers(1, 4))
    places = [draw(st.permutations(range(count))) for _ in range(size)]
    former = layout.arrange([[places[p][d] * size + p for p in range(size)] for d in range(count)])
    top, stepped = draw(st.integers(1, 9)), draw(st.booleans())
    reports = {}
    for number, replica in enumerate(layout.replicas(former, size)):
        share = [index for index in range(TOTAL) if index % count == number]
        for slot in replica:
            if draw(st.integers(0, 3)) == 0:
                continue
            if stepped:
                phase = draw(st.sampled_from(["synced", "stepped"]))
                reports[slot] = stopped(top - 1, phase, tuple(share))
            else:
                phase = draw(st.sampled_from(["computing", "reducing", "synced"]))
                done = share if phase != "computing" or draw(st.booleans()) else []
                reports[slot] = stopped(top, phase, tuple(done))
    return size, former, reports


@given(broken_generations())
def test_members_are_complete_replicas_and_each_micro_batch_is_somebodys_once(case):
    size, former, reports = case
    found = decide(reports, TOTAL, size=size, former=former)
    living = [sum(slot % size == place for slot in reports) for place in range(size)]
    if found is None:
        assert min(living) == 0
        return
    assert found.unusable == {} and len(found.members) == size * min(living)
    assert sorted([*found.members, *found.standbys]) == sorted(reports)
    assert all([s % size for s in one] == list(range(size)) for one in layout.replicas(found.members, size))
    assert layout.heads(found.members, size) == sorted(layout.heads(found.members, size))
    assert is_partition(found.assignment) and list(found.assignment) == layout.heads(found.members, size)
    whole = [one for one in layout.replicas(former, size) if set(one) <= reports.keys()]
    after = layout.replicas(found.members, size)
    assert all(one in after for one in whole), "a healthy replica stays as it is"
    if found.step is None:
        for one in whole:
            common = set.intersection(*(set(reports[slot].done) for slot in one))
            kept = common if all(reports[slot].phase != "stepped" for slot in one) else set()
            assert kept <= set(found.assignment[one[0]])
    else:
        assert all(reports[s].phase == "stepped" or reports[s].phase == "synced" for s in found.members)


def test_the_first_iteration_of_replicas_is_like_any_other():
    found = decide({slot: stopped(0, done=(slot // 2,)) for slot in range(4)}, 2, size=2, former=[0, 1, 2, 3])
    assert (found.members, found.iteration, found.assignment) == ([0, 1, 2, 3], 0, {0: [0], 2: [1]})


# ---------------------------------------------------------------- distributed optimizer
def test_a_shard_beyond_the_count_is_none():
    reports = {0: stopped(7, "computing", (), shards(7, (0, 1, 2, 3)))}
    assert newest_state(reports, reports, 1) == ((1, 7), {0})
    reports = {0: stopped(7, "computing", (), shards(7, (0, 1, 3)))}
    assert newest_state(reports, reports, 1) == (None, set())


def shards(version: int, held: tuple[int, ...], base: int = 1, count: int = 3) -> Shards:
    return Shards(base, version, count, list(held))


def test_all_go_on_from_the_newest_state_of_which_every_shard_lives():
    """Three replicas of one rank, copies in a ring; slot 1 is lost. Slot 0 has not got the copies of version 8 yet."""
    old = {0: shards(7, (0, 2)), 2: shards(7, (2, 1))}
    reports = {
        0: stopped(7, "stepped", (0, 3), old[0], shards(8, (0,))),
        2: stopped(7, "stepped", (2, 5), old[2], shards(8, (2, 1))),
    }
    found = decide(reports, 6, former=[0, 1, 2])
    assert (found.state, found.iteration, found.step) == ((1, 8), 8, None)
    reports[2] = stopped(7, "synced", (2, 5), old[2])
    found = decide(reports, 6, former=[0, 1, 2])
    assert (found.state, found.iteration) == ((1, 7), 7), "the step of slot 0 proves nothing: version 8 is not complete"
    assert found.assignment == {0: [0, 3], 2: [2, 5, 1, 4]}, "what slot 0 had is in its step"
    assert "state after 7 steps" in found.reason


def test_without_a_complete_state_nobody_goes_on():
    reports = {0: stopped(7, "computing", (), shards(7, (0,))), 2: stopped(7, "computing", (), shards(7, (2,)))}
    assert decide(reports, 6, former=[0, 1, 2]) is None


def test_the_shards_must_cover_every_place():
    one = {0: stopped(7, "computing", (), shards(7, (0, 1), count=2))}
    both = one | {1: stopped(7, "computing", (), shards(7, (0,), count=2), shards(6, (0, 1), count=2))}
    assert newest_state(both, both, 2)[0] is None, "place 0 has no state 6, place 1 has not all of state 7"
    both[0].shards.append(shards(6, (0, 1), count=2))
    assert newest_state(both, both, 2) == ((1, 6), {0, 1})
    assert decide(both, 4, size=2, former=[0, 1, 2, 3]) is None, (
        "they are in iteration 7: others may have the rest of it"
    )
    for status in both.values():
        status.iteration = 6
    assert decide(both, 4, size=2, former=[0, 1, 2, 3]).state == (1, 6)
