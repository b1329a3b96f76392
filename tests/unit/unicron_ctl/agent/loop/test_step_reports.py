"""What the ranks of a node report of an iteration leaves the agent as one message, and always before a rank's end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.agent.loop.step_reports import MOST_HELD, StepReports
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.structs import MERGE_SECONDS
from unicron_detector.processes.rank_messages import Step

PHASES = {name: float(number) for number, name in enumerate(structs.PHASES)}


def report(slot: int, iteration: int, generation: int = 1, **more: Any) -> tuple[int, Step]:
    """As a rank says it: its slot, and the step."""
    said = {"micro_batches": [slot], "computed": [slot], "total": 8, "seconds": 0.5}
    said |= {"loss": 2.0, "phases": PHASES, "at": 1000.0 + slot} | more
    return slot, Step(generation=generation, iteration=iteration, **said)


def running(*slots: int, generation: int = 1) -> dict[int, int]:
    return dict.fromkeys(slots, generation)


def told(messages: list[structs.StepTable]) -> list[tuple[int, int, list[int]]]:
    """(generation, iteration, slots) of each."""
    return [(each.generation, each.iteration, each.slots) for each in messages]


@pytest.fixture
def steps() -> StepReports:
    return StepReports()


def test_an_iteration_of_all_running_ranks_is_one_message(steps):
    steps.add(*report(5, 3), 10.0)
    assert steps.due_reports(10.0, running(4, 5)) == []
    steps.add(*report(4, 3, computed=[4, 4], phases={}), 10.01)
    (message,) = steps.due_reports(10.01, running(4, 5))
    assert message.report() == structs.StepReport(
        generation=1,
        iteration=3,
        total=8,
        at=1005.0,
        ranks=[
            structs.RankStep(slot=4, micro_batches=[4], seconds=0.5, loss=2.0, computed=[4, 4]),
            structs.RankStep(slot=5, micro_batches=[5], seconds=0.5, loss=2.0, phases=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        ],
        number=1,
    )
    assert steps.due_reports(99.0, running(4, 5)) == [] and steps.timeout(99.0) == float("inf"), "nothing is said twice"


def test_messages_are_numbered_so_that_a_lost_one_shows(steps):
    steps.add(*report(4, 3), 10.0)
    steps.add(*report(4, 4), 10.1)
    assert [message.number for message in steps.due_reports(10.1, running(4))] == [1, 2]
    steps.add(*report(4, 5), 10.2)
    assert [message.number for message in steps.due_reports(10.2, running(4))] == [3]


def test_only_ranks_of_the_same_generation_are_waited_for(steps):
    steps.add(*report(0, 3, generation=2), 10.0)
    assert told(steps.due_reports(10.0, {0: 2, 1: 1})) == [(2, 3, [0])]


def test_an_incomplete_iteration_waits_no_longer_than_its_time(steps):
    steps.add(*report(0, 3), 10.0)
    assert steps.timeout(10.0) == pytest.approx(MERGE_SECONDS)
    assert steps.due_reports(10.0 + MERGE_SECONDS * 0.9, running(0, 1)) == []
    assert told(steps.due_reports(10.0 + MERGE_SECONDS * 1.01, running(0, 1))) == [(1, 3, [0])]


def test_who_is_late_is_a_message_of_its_own_that_waits_for_nobody_who_has_reported(steps):
    everyone = running(0, 1, 2)
    steps.add(*report(0, 3), 10.0)
    assert told(steps.due_reports(11.0, everyone)) == [(1, 3, [0])]
    steps.add(*report(1, 3), 11.0)
    assert steps.due_reports(11.0, everyone) == []
    steps.add(*report(2, 3), 11.01)
    assert told(steps.due_reports(11.01, everyone)) == [(1, 3, [1, 2])]


def test_a_later_iteration_ends_the_wait_for_an_earlier_one(steps):
    steps.add(*report(0, 3), 10.0)
    steps.add(*report(0, 4), 10.01)
    assert told(steps.due_reports(10.01, running(0, 1))) == [(1, 3, [0])]
    steps.add(*report(1, 3), 10.02)
    steps.add(*report(1, 4), 10.02)
    assert told(steps.due_reports(10.02, running(0, 1))) == [(1, 3, [1]), (1, 4, [0, 1])]
    steps.add(*report(0, 5), 10.03)
    steps.add(*report(1, 4, generation=2), 10.03)
    assert told(steps.due_reports(10.03, {0: 1, 1: 1})) == [(1, 5, [0]), (2, 4, [1])], (
        "generations count before iterations"
    )


@pytest.mark.parametrize("after", [running(1), running(1) | {0: 2}, {}])
def test_a_rank_that_runs_no_more_has_proved_its_step_first(steps, after):
    steps.add(*report(0, 3), 10.0)
    assert steps.due_reports(10.0, running(0, 1)) == []
    assert told(steps.due_reports(10.0, after)) == [(1, 3, [0])]


def test_the_end_of_a_rank_that_did_not_report_ends_the_wait_for_it(steps):
    steps.add(*report(0, 3), 10.0)
    assert told(steps.due_reports(10.0, running(0))) == [(1, 3, [0])]


def test_a_rank_that_reports_an_iteration_again_is_not_merged_with_itself(steps):
    for loss in (1.0, 2.0):
        steps.add(*report(0, 3, loss=loss), 10.0)
    messages = steps.due_reports(11.0, running(0, 1))
    assert [each.losses[0] for each in messages] == [1.0, 2.0]


def test_different_totals_stay_apart(steps):
    steps.add(*report(0, 3, total=8), 10.0)
    steps.add(*report(1, 3, total=9), 10.0)
    messages = steps.due_reports(10.0, running(0, 1))
    assert [(each.total, len(each.slots)) for each in messages] == [(8, 1), (9, 1)]


@pytest.mark.parametrize("missing", structs.PHASES)
def test_incomplete_phases_are_none(steps, missing):
    steps.add(*report(0, 3, phases={name: 1.0 for name in PHASES if name != missing}), 10.0)
    assert steps.due_reports(10.0, running(0))[0].rows()[0].phases == []


REPORTS = st.tuples(st.just("report"), st.integers(0, 2), st.integers(1, 2), st.integers(0, 3))
STATES = st.tuples(st.just("running"), st.dictionaries(st.integers(0, 2), st.integers(1, 2)))
WAITS = st.tuples(st.just("wait"), st.sampled_from([0.0, 0.4 * MERGE_SECONDS, 1.2 * MERGE_SECONDS, 1.0]))


def test_short_iterations_leave_together_and_longer_ones_at_once(steps):
    steps.add(*report(0, 3), 10.0)
    assert told(steps.due_reports(10.0, running(0), hold=True)) == [(1, 3, [0])], "nothing was sent just before"
    steps.add(*report(0, 4), 10.0 + 0.7 * MERGE_SECONDS)
    assert steps.due_reports(10.0 + 0.7 * MERGE_SECONDS, running(0), hold=True) == [] and steps.held
    steps.add(*report(0, 5), 10.0 + 1.4 * MERGE_SECONDS)
    assert told(steps.due_reports(10.0 + 1.4 * MERGE_SECONDS, running(0), hold=True)) == [(1, 4, [0]), (1, 5, [0])]
    assert not steps.held


def test_what_is_held_goes_in_time_before_any_status_and_before_there_are_many(steps):
    steps.add(*report(0, 3), 10.0)
    assert steps.due_reports(10.0, running(0), hold=True)
    for iteration in range(4, 4 + MOST_HELD):
        assert steps.due_reports(10.01, running(0), hold=True) == []
        steps.add(*report(0, iteration), 10.01)
    assert len(steps.due_reports(10.01, running(0), hold=True)) == MOST_HELD
    steps.add(*report(0, 20), 10.02)
    assert steps.timeout(10.02) == pytest.approx(MERGE_SECONDS)
    assert told(steps.due_reports(10.02 + 1.01 * MERGE_SECONDS, running(0), hold=True)) == [(1, 20, [0])], (
        "no later one came"
    )
    steps.add(*report(0, 21), 10.3)
    assert told(steps.due_reports(10.3, running(0))) == [(1, 21, [0])], "a status asks for what there is"
    steps.add(*report(0, 22), 10.31)
    assert told(steps.due_reports(10.31, {}, hold=True)) == [(1, 22, [0])], "its rank has ended"


def test_in_a_large_job_reports_wait_for_the_next_status(steps):
    steps.configure(1.0, 1.0)
    steps.add(*report(0, 3), 10.0)
    assert steps.due_reports(10.0, running(0), hold=True) == [], "though nothing was sent before"
    assert steps.timeout(10.0) == pytest.approx(1.0 + MERGE_SECONDS)
    assert steps.due_reports(11.0, running(0), hold=True) == []
    assert told(steps.due_reports(11.0, running(0))) == [(1, 3, [0])], "the status"
    steps.add(*report(0, 4), 12.0)
    assert told(steps.due_reports(13.3, running(0), hold=True)) == [(1, 4, [0])], "no status came"
    for iteration in range(5, 5 + MOST_HELD):
        assert steps.timeout(13.4) > 0.0
        steps.add(*report(0, iteration), 13.4)
    assert steps.timeout(13.4) == 0.0, "the agent wakes, whoever it waits for"
    assert len(steps.due_reports(13.4, running(0), hold=True)) == MOST_HELD
    steps.add(*report(0, 20), 13.5)
    assert told(steps.due_reports(13.5, {}, hold=True)) == [(1, 20, [0])], "its rank has ended"


@pytest.mark.parametrize("period", [None, 1.0])
@pytest.mark.parametrize("hold", [False, True])
@given(story=st.lists(st.one_of(REPORTS, STATES, WAITS), max_size=40))
def test_whatever_happens_each_report_leaves_once_and_in_time(hold, period, story):
    steps, now, state = StepReports(), 0.0, running(0, 1, 2)
    if period is not None:
        steps.configure(period, period)
    most = MERGE_SECONDS + (period or 0.0) * hold
    said: list[tuple[int, int, int]] = []  # (slot, generation, iteration)
    heard: list[tuple[int, int, int]] = []
    since: dict[tuple[int, int], float] = {}
    for what, *more in story:
        if what == "report":
            slot, generation, iteration = more
            steps.add(*report(slot, iteration, generation), now)
            said.append((slot, generation, iteration))
            since.setdefault((generation, iteration), now)
        elif what == "running":
            state = more[0]
        else:
            now += more[0]
        for message in steps.due_reports(now, state, hold):
            assert len({rank.slot for rank in message.rows()}) == len(message.slots)
            heard += [(rank.slot, message.generation, message.iteration) for rank in message.rows()]
            since.pop((message.generation, message.iteration), None)
        assert all(now - began < most for began in since.values())
        assert all(state.get(slot) == generation for slot, generation, _ in set(said) - set(heard))
    heard += [(r.slot, m.generation, m.iteration) for m in steps.due_reports(now, {}) for r in m.rows()]
    assert sorted(heard) == sorted(said)


def test_a_controller_that_comes_back_hears_the_last_steps_once_more(steps):
    for slot in (4, 5):
        steps.add(*report(slot, 3), 10.0)
    assert told(steps.due_reports(10.0, running(4, 5))) == [(1, 3, [4, 5])]
    steps.add(*report(4, 4), 11.0)
    steps.repeat(11.0)
    assert told(steps.due_reports(11.0, {})) == [(1, 3, [5]), (1, 4, [4])]
    assert steps.due_reports(99.0, {}) == []
