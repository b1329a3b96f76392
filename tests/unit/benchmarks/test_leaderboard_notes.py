"""What the leaderboard makes of the notes of its training processes."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec
import pytest

from benchmarks.leaderboard import notes
from benchmarks.leaderboard.notes import Note

RANKS, MICRO = 4, 8
STRUCK = 10.0


def trained(
    iterations: Iterable[int], begin: float, ranks: Iterable[int] = range(RANKS), more: str = "", each: float = 1.0
) -> list[Note]:
    """So many ranks step these iterations, one each `each` seconds from `begin` on, and share the micro-batches."""
    found, ranks = [], list(ranks)
    for number, iteration in enumerate(iterations):
        at = begin + (number + 1) * each
        for place, rank in enumerate(ranks):
            mine = tuple(range(place, MICRO, len(ranks)))
            who = {"process": f"{rank}{more}", "iteration": iteration}
            found += [Note("micro", at - each / 2, index=index, **who) for index in mine]
            found.append(Note("step", at, loss=100.0 - iteration, world=len(ranks), rank=place, micro=mine, **who))
    return found


def started(at: float, ranks: Iterable[int], more: str = "") -> list[Note]:
    return [Note("start", at, process=f"{rank}{more}", node=rank, rank=rank) for rank in ranks]


def figures(*parts: list[Note]) -> notes.Figures:
    return notes.figures([note for part in parts for note in part], STRUCK, RANKS, MICRO)


def test_lines_are_read_up_to_the_last_whole_one() -> None:
    lines = [{"what": "start", "time": 1.5, "node": 2, "pid": 7, "rank": 2}]
    lines.append({"what": "step", "time": 2.5, "iteration": 0, "loss": 4.0, "world": 4, "rank": 2, "micro": [2, 6]})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    found = notes.parse(text + '{"what": "micro", "ti', "notes.2.7")
    assert [note.what for note in found] == ["start", "step"]
    assert found[1] == Note("step", 2.5, "notes.2.7", 0, -1, 4.0, 4, 2, micro=(2, 6))


def test_survivors_that_go_on_in_the_same_iteration_lose_nothing() -> None:
    cut = [Note("micro", 9.6, "3", 10, 3), Note("micro", 9.7, "0", 10, 0)]  # iteration 10 has begun
    alone = trained([10], 10.5, [0, 1, 2])
    whole = trained([11, 12], 11.5) + started(11.0, [3], "new")
    found = figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), cut, alone, whole)
    assert (found.next_step_seconds, found.full_strength_seconds) == (1.5, 2.5)
    assert (found.iterations_lost, found.micro_batches_again, found.micro_batches_dropped) == (0, 2, 0)


def test_a_restart_from_a_checkpoint_loses_what_came_after_it() -> None:
    back = trained([7, 8, 9, 10], 20.0, more="again")
    found = figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), started(15.0, range(RANKS), "again"), back)
    assert (found.next_step_seconds, found.full_strength_seconds) == (11.0, 11.0)
    assert (found.iterations_lost, found.micro_batches_again) == (3, 3 * MICRO)


def test_a_peers_late_note_of_the_last_step_is_no_further_step() -> None:
    before = trained(range(10), 0.0)
    late = [Note("step", 10.01, "3late", iteration=9, loss=1.0, world=RANKS)]
    assert figures(started(-1.0, range(RANKS)), before, late).next_step_seconds is None
    same_process_again = [Note("step", 12.0, "0", iteration=9, loss=91.0, world=RANKS)]
    assert figures(started(-1.0, range(RANKS)), before, late, same_process_again).next_step_seconds == 2.0


def test_a_job_that_stays_smaller_is_never_whole() -> None:
    found = figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), trained([10, 11], 12.0, [0, 1, 2]))
    assert (found.next_step_seconds, found.full_strength_seconds, found.ranks_at_end) == (3.0, None, 3)


def test_what_no_rank_had_in_its_step_was_dropped() -> None:
    thin = [note for note in trained([10, 11], 10.5) if not (note.what == "step" and note.process == "3")]
    assert figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), thin).micro_batches_dropped == MICRO // RANKS


def test_the_losses_that_count_are_those_after_the_last_rollback() -> None:
    wrong = [Note("step", note.time, note.process, note.iteration, loss=1.0) for note in trained([8, 9], 8.0)]
    found = notes.losses([*trained(range(8), 0.0), *wrong, *trained([8, 9, 10], 20.0, [0, 1], "again")])
    assert found[8] == [92.0, 92.0] and len(found[7]) == RANKS and found[10] == [90.0, 90.0]
    late_joiner = notes.losses([*trained(range(5), 0.0), *trained([5, 6], 5.0, [0, 1, 2, 9])])
    assert late_joiner[4] == [96.0] * 4 and late_joiner[5] == [95.0] * 4


def test_a_process_that_goes_back_by_itself_takes_its_losses_back() -> None:
    again = [Note("step", note.time, note.process, note.iteration, loss=note.loss + 1) for note in trained([3, 4], 9.0)]
    found = notes.losses([*trained(range(6), 0.0), *again])
    assert found[3] == [98.0] * 4 and found[4] == [97.0] * 4 and 5 not in found and found[2] == [98.0] * 4


def staggered(found: list[Note], apart: float = 0.01) -> list[Note]:
    """The ranks say so one after the other, as they do."""
    return [msgspec.structs.replace(note, time=note.time + apart * note.rank) for note in found]


def test_every_rollback_until_the_end_counts() -> None:
    """A node is lost, and three ranks go on from the same iteration; it returns, and four start from a checkpoint."""
    three = [*started(11.0, [0, 1, 3], "b"), *staggered(trained([10, 11, 12], 12.0, [0, 1, 3], "b"))]
    for first, lost in ((13, 0), (12, 1), (11, 2), (9, 4)):
        four = [*started(20.0, range(RANKS), "c"), *staggered(trained(range(first, 16), 21.0, more="c"))]
        found = figures(started(-1.0, range(RANKS)), staggered(trained(range(10), -0.5)), three, four)
        assert (found.iterations_lost, found.micro_batches_dropped) == (lost, 0)


def test_a_newcomer_that_takes_a_step_with_the_others_takes_none_again() -> None:
    joined = [*started(11.0, [2], "new"), *staggered(trained([12, 13], 13.0, [0, 1, 3]))]
    joined += [Note("step", 14.02, "2new", 12, loss=88.0, world=4), Note("step", 15.02, "2new", 13, loss=87.0, world=4)]
    late = [Note("step", 12.5, "2", 10, loss=90.0, world=4)]  # after others' step of 11: its own note alone is late
    alone = trained([10, 11], 10.2, [0, 1, 3])
    assert figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), alone, late, joined).iterations_lost == 0


def test_ranks_that_live_on_and_go_back_drop_nothing_whoever_says_so_first() -> None:
    run = [*started(-1.0, range(RANKS)), *staggered(trained(range(10), -0.5))]
    run += [*staggered(trained([8, 9, 10], 12.0)), *staggered(trained([9, 10, 11], 16.0))]
    found = figures(run)
    assert (found.iterations_lost, found.micro_batches_dropped) == (4, 0)
    assert {len(each) for each in notes.losses(run).values()} == {RANKS}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)], ids=["who had noted it", "who had not"])
def test_an_iteration_that_few_had_noted_is_held_by_all_who_take_it_again(order) -> None:
    """Rank 0 alone has noted iteration 10 when the others break off; all go back to it."""
    run = [*started(-1.0, range(RANKS)), *staggered(trained(range(10), -0.5))]
    run += [note for note in trained([10], 8.9) if note.process == "0"]
    run += staggered(trained([10], 12.0, order))
    run += staggered(trained([11, 12], 13.0))
    found = figures(run)
    assert (found.iterations_lost, found.micro_batches_dropped, found.next_step_seconds) == (1, 0, 3.0)
    assert {len(each) for each in notes.losses(run).values()} == {RANKS}
    assert notes.useful(run, 9.95, 20.0, MICRO) == 2 * MICRO and notes.useful(run, 9.7, 20.0, MICRO) == 3 * MICRO


def test_a_peers_late_note_does_not_outlive_what_is_undone() -> None:
    """Rank 3 notes iteration 10 after rank 0 and is killed; the others and a new one take it again."""
    run = [*started(-1.0, range(RANKS)), *staggered(trained(range(10), -0.5))]
    run += [msgspec.structs.replace(n, loss=1.0) for n in staggered(trained([10], 8.9)) if n.process in ("0", "3")]
    run += [*started(11.0, [3], "new"), *staggered(trained([10, 11], 12.0, [1, 2, 0]))]
    assert notes.losses(run)[10] == [90.0] * 3


def test_the_longest_pause_counts_wherever_it_comes() -> None:
    """The iteration under way ends, and then they wait."""
    run = [*started(-1.0, range(RANKS)), *trained(range(10), 0.0), *trained([10], 9.2), *trained([11, 12], 14.0)]
    found = figures(run)
    assert (found.next_step_seconds, found.longest_pause_seconds) == pytest.approx((0.2, 4.8))
    assert figures(started(-1.0, range(RANKS)), trained(range(10), 0.0)).longest_pause_seconds is None
    once = figures(started(-1.0, range(RANKS)), trained(range(10), 0.0), trained([10, 11], 12.0))
    assert once.longest_pause_seconds == once.next_step_seconds == 3.0


def test_losses_are_compared_where_both_have_them() -> None:
    assert notes.compared({0: [2.0], 1: [3.0], 9: [7.0]}, {0: 2.0, 1: 3.0, 2: 4.0}) == 2
    assert notes.difference({0: [2.0], 1: [3.0, 3.3], 9: [7.0]}, {0: 2.0, 1: 3.0}) == pytest.approx(0.1)
    assert notes.difference({0: [2.0]}, {0: 2.0}) == 0.0
    assert notes.difference({5: [2.0]}, {0: 2.0}) is None


def test_work_that_is_done_twice_or_undone_is_of_no_use() -> None:
    run = trained(range(10), 0.0)
    assert notes.useful(run, 2.0, 10.0, MICRO) == 8 * MICRO
    assert notes.useful([*run, *trained([5, 6], 12.0, more="again")], 2.0, 20.0, MICRO) == 5 * MICRO
    assert notes.useful(run, 30.0, 40.0, MICRO) == 0


def test_what_is_of_use_does_not_depend_on_when_one_begins_to_count() -> None:
    """Ranks note a step one after the other, and whoever begins between them has seen the step."""
    survived = [*staggered(trained(range(10), 0.0)), *staggered(trained(range(10, 20), 11.0, [0, 1, 2]))]
    lived_on = [*staggered(trained(range(10), 0.0)), *staggered(trained(range(7, 20), 12.0))]
    replaced = [*staggered(trained(range(10), 0.0)), *staggered(trained(range(7, 20), 12.0, more="again"))]
    for run in (survived, lived_on, replaced):
        for note in notes.steps(run):
            assert notes.useful(run, note.time + 0.005, 40.0, MICRO) == (19 - note.iteration) * MICRO
        assert notes.useful(run, 0.0, 40.0, MICRO) == 20 * MICRO
    thin = [note for note in survived if (note.what, note.process, note.iteration) != ("step", "1", 15)]
    assert notes.useful(thin, 5.005, 40.0, MICRO) == notes.useful(survived, 5.005, 40.0, MICRO) - 3


def test_a_spell_tells_the_usual_rate_only_where_all_ranks_trained_all_the_time() -> None:
    run = trained(range(10), 0.0)  # one a second
    short = [Note("step", 10.0 + n, "a", 10 + n, world=3) for n in range(3)]
    assert notes.steady(run, 2.0, 9.5, RANKS, 2.0) and not notes.steady([*run, *short], 2.0, 12.0, RANKS, 2.0)
    assert not notes.steady(run, 2.0, 20.0, RANKS, 2.0), "it stood still at the end"
    assert not notes.steady(run, -5.0, 9.5, RANKS, 2.0), "it stood still at the beginning"
    assert not notes.steady([], 2.0, 3.0, RANKS, 2.0)
