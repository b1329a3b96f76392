"""The decision after a Break: exact partition, nothing of a survivor's thrown away, the commit rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.consensus.survivors_plan import deal, decide
from unicron_ctl.shared.protocol.structs import RankStatus


def stopped(iteration: int, phase: str = "computing", done: list[int] | None = None) -> RankStatus:
    return RankStatus(state="stopped", iteration=iteration, phase=phase, done=done or [])


def is_partition(assignment: dict[int, list[int]], total: int) -> bool:
    return sorted(index for indices in assignment.values() for index in indices) == list(range(total))


@st.composite
def consistent_survivors(draw):
    """Reports as the protocol can produce them: at most one iteration apart, everyone behind the first is synced."""
    total = draw(st.integers(1, 40))
    slots = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True))
    top = draw(st.integers(1, 50))
    some_stepped = draw(st.booleans())
    owner = {index: draw(st.sampled_from([*slots, None])) for index in range(total)}
    reports = {}
    for slot in slots:
        done = [index for index in range(total) if owner[index] == slot]
        if some_stepped and draw(st.booleans()):
            reports[slot] = stopped(top - 1, "synced", done)
        elif some_stepped and draw(st.booleans()):
            reports[slot] = stopped(top - 1, "stepped", done)
        else:
            reports[slot] = stopped(top, draw(st.sampled_from(["computing", "reducing", "synced"])), done)
    return total, top, reports


@given(consistent_survivors())
def test_the_assignment_is_a_partition_and_keeps_what_survivors_have(case):
    total, _, reports = case
    decision = decide(reports, total)
    assert decision is not None and decision.unusable == {}
    assert decision.members == sorted(reports)
    assert is_partition(decision.assignment, total)
    for slot, report in reports.items():
        if report.iteration == decision.iteration and report.phase != "stepped":
            assert set(report.done) <= set(decision.assignment[slot])
        elif report.phase == "synced":
            assert report.iteration == decision.step
        else:
            assert report.phase == "stepped" and report.iteration + 1 == decision.iteration
    remaining = [
        len(set(decision.assignment[slot]) - (set(r.done) if r.iteration == decision.iteration else set()))
        for slot, r in reports.items()
    ]
    assert max(remaining) - min(remaining) <= 1


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.builds(
            stopped,
            st.integers(0, 3),
            st.sampled_from(["computing", "reducing", "synced", "stepped"]),
            st.lists(st.integers(-2, 9), max_size=6),
        ),
        max_size=6,
    ),
    st.integers(1, 8),
)
def test_reports_that_cannot_be_degrade_and_never_crash(reports, total):
    decision = decide(reports, total)
    if decision is None:
        return
    assert is_partition(decision.assignment, total)
    assert set(decision.members) | set(decision.unusable) == set(reports)
    assert not set(decision.members) & set(decision.unusable)
    for slot in decision.members:
        if reports[slot].iteration == decision.iteration and reports[slot].phase != "stepped":
            assert set(reports[slot].done) <= set(decision.assignment[slot])


def test_before_the_reduce_the_dead_ranks_share_is_dealt_round_robin():
    reports = {0: stopped(7, done=[0, 4]), 1: stopped(7, "reducing", [1, 5]), 3: stopped(7, done=[3])}
    decision = decide(reports, 8, lost_done={2: [2]}, lost_share=[2, 6], lost_iteration=7)
    assert decision.step is None and decision.iteration == 7
    assert decision.assignment == {0: [0, 4, 2], 1: [1, 5, 6], 3: [3, 7]}
    assert (decision.reused, decision.recomputed, decision.redistributed) == (5, 1, 2)
    assert decision.reason.startswith("3 ranks go on with iteration 7: 5 of 8 micro-batches are kept")


def test_all_synced_step_and_nothing_is_computed_again():
    decision = decide(
        {0: stopped(7, "synced", [0, 2]), 2: stopped(7, "synced", [1])}, 4, lost_done={1: [3]}, lost_iteration=7
    )
    assert (decision.step, decision.iteration) == (7, 8)
    assert decision.assignment == deal(range(4), [0, 2])
    assert (decision.reused, decision.recomputed) == (4, 0)


def test_who_is_synced_follows_those_who_have_stepped():
    reports = {0: stopped(7, "stepped", [0]), 1: stopped(7, "synced", [1]), 2: stopped(8, done=[2])}
    decision = decide(reports, 3)
    assert (decision.step, decision.iteration) == (7, 8)
    assert decision.assignment[2][0] == 2 and is_partition(decision.assignment, 3)


def test_one_synced_and_another_not_means_that_nobody_steps():
    decision = decide({0: stopped(7, "synced", [0, 2]), 1: stopped(7, "reducing", [1, 3])}, 4)
    assert decision.step is None
    assert decision.assignment == {0: [0, 2], 1: [1, 3]}


def test_a_finished_member_proves_that_the_last_iteration_was_committed():
    decision = decide({1: stopped(99, "synced", [1])}, 2, finished_at=100)
    assert (decision.step, decision.iteration) == (99, 100)


def test_a_rank_too_far_behind_counts_as_lost():
    decision = decide({0: stopped(7), 1: stopped(5, "synced")}, 4)
    assert decision.members == [0] and "iteration 5" in decision.unusable[1]


def test_nobody_left_means_formed_anew():
    assert decide({}, 4) is None
    assert decide({0: stopped(3, done=[0, 0])}, 4) is None


def test_what_another_iteration_lost_is_not_counted():
    decision = decide({0: stopped(7, done=[0]), 1: stopped(7)}, 4, lost_done={2: [2]}, lost_share=[2], lost_iteration=6)
    assert (decision.reused, decision.recomputed, decision.redistributed) == (1, 0, 0)


def test_micro_batches_must_be_of_the_iteration():
    for wrong in ([4], [-1], [1, 1]):
        decision = decide({0: stopped(7, done=wrong), 1: stopped(7, done=[3])}, 4)
        assert decision.members == [1] and "not a set of valid indices" in decision.unusable[0]
    assert decide({0: stopped(7, done=[0, 3])}, 4).unusable == {}


def test_of_two_ranks_with_one_micro_batch_the_first_goes_on():
    """The third rank's report makes it count, whatever its own iteration is."""
    reports = {
        0: stopped(8, done=[0, 1]),
        1: stopped(8, done=[2]),
        2: stopped(8, done=[1]),
        3: stopped(7, "stepped", [1]),
        4: stopped(7, "synced", [0]),
    }
    decision = decide(reports, 3)
    assert decision.members == [0, 1, 3, 4] and list(decision.unusable) == [2]
    assert "micro-batch 1 in its gradient, which slot 0 has too" in decision.unusable[2]
    assert (decision.step, decision.iteration) == (7, 8)
    only = decide({slot: reports[slot] for slot in (0, 1, 2)}, 3)
    assert only.assignment == {0: [0, 1], 1: [2]} and only.step is None


def test_the_first_iteration_is_like_any_other():
    decision = decide({0: stopped(0, "reducing", [0]), 1: stopped(0, "synced", [1])}, 2)
    assert decision.members == [0, 1] and decision.iteration == 0 and decision.reused == 2


def test_iterations_that_end_the_training_count():
    assert decide({0: stopped(99, "reducing", [0])}, 2, finished_at=99).members == [0]
    assert decide({0: stopped(99, "reducing", [0])}, 2, finished_at=100) is None


def test_a_rank_that_has_stepped_has_nothing_of_the_next_iteration():
    """Beside a report that cannot be used, too."""
    decision = decide({0: stopped(7, "stepped", [0]), 1: stopped(8, done=[1, 1])}, 3)
    assert decision.members == [0] and list(decision.unusable) == [1]
    assert (decision.step, decision.iteration, decision.reused) == (None, 8, 0)
