"""The savings that acting would have brought, by the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.api import answers
from unicron_ctl.shared.log import records, savings
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.savings import observed_week
from unicron_ctl.shared.log.store import Store

HOUR = 3600.0


def _events(*story: tuple[float, str, records.Record]) -> list[Event]:
    return [Event(number, hour * HOUR, job, 1, record) for number, (hour, job, record) in enumerate(story, start=1)]


def _plan(nodes: int) -> records.ActionObserved:
    return records.ActionObserved(would=f"give it {nodes}", action="plan", nodes=nodes)


STORY = (
    (0.0, "1", _plan(4)),
    (1.0, "1", records.GenerationEntered(members=[0, 1, 2, 3, 4, 5, 6, 7])),  # four nodes
    (3.0, "1", records.ActionObserved(would="down n2", action="down", node="n2")),
    (3.0, "1", records.GenerationEntered(members=[0, 1, 4, 5, 6, 7])),  # one is lost
    (4.0, "1", records.ActionObserved(would="pin 1_1 to n5", action="pin", node="n5", element=1)),
    (13.0, "1", records.JobEnded(code=0)),
)


def test_the_nodes_that_a_job_lacked_are_summed_up(snapshot) -> None:
    week = observed_week(_events(*STORY), 0.0, 20 * HOUR, {"1": 2})
    assert week.node_hours == pytest.approx(10.0) and week.calls == {"down": 1, "pin": 1}
    assert week.reason == snapshot


def test_nothing_is_lacking_where_nothing_was_planned() -> None:
    week = observed_week(_events((0.0, "1", records.GenerationEntered(members=[0]))), 0.0, HOUR, {})
    assert week.node_hours == 0.0 and "not made: none" in week.reason


@given(st.floats(0.0, 20.0))
def test_two_sums_one_after_the_other_are_as_much_as_one(cut: float) -> None:
    events = _events(*STORY)
    whole = observed_week(events, 0.0, 20 * HOUR, {"1": 2})
    first = observed_week([e for e in events if e.time <= cut * HOUR], 0.0, cut * HOUR, {"1": 2})
    rest = observed_week([e for e in events if e.time > cut * HOUR], cut * HOUR, 20 * HOUR, {"1": 2}, first)
    assert first.node_hours + rest.node_hours == pytest.approx(whole.node_hours)


def test_a_job_that_is_only_observed_is_summed_up_in_status(tmp_path: Path) -> None:
    slurm = FakeSlurm(4)
    world = World(slurm, observe=None)
    slurm.submit("1", 3)
    world.start_job(nodes=3)
    world.run(3.0)
    world.dead_nodes.add("n2")
    world.agents[1].silent = True
    world.run(5.0)
    assert world.job().plan.members == [0, 2]
    store = Store(tmp_path / "events.sqlite")
    store.append(world.log)
    world.core.now = world.now + 2 * HOUR
    (line,) = answers.observed_lines(world.core, store)
    assert "up to 2.0 more node-hours" in line and "1 down" in line
    week = answers.observed_since(world.core, store)
    assert week is not None
    world.core.append("", 0, week)
    assert world.core.state.observed_week == week and world.core.state.observed_since == world.core.now
    assert {type(e.record) for e in store.of_kinds(savings.KINDS)} <= set(savings.KINDS)
    store.close()


def test_a_short_pause_in_which_nothing_was_left_undone_is_no_line(tmp_path: Path) -> None:
    world = World()
    world.core.append(
        "1", 0, records.ActionObserved(would="give 2 nodes to job 1", action=savings.PLAN, nodes=2, reason="a test")
    )
    store = Store(tmp_path / "events.sqlite")
    store.append(world.core.events)
    world.core.now = world.core.state.observed_since + 10.0
    assert answers.observed_lines(world.core, store) == []
    world.core.now += 2 * HOUR
    assert len(answers.observed_lines(world.core, store)) == 1
    store.close()


def test_a_weekly_sum_that_fails_ends_nothing_and_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: whatever it raised ended the controller, at the next start as well."""
    world = World()
    world.core.append("1", 0, records.ActionObserved(would="down n1", action="down", reason="a test"))
    store = Store(tmp_path / "events.sqlite")
    store.append(world.core.events)
    monkeypatch.setattr(savings, "observed_week", lambda *given: 1 / 0)
    weekly, then = answers.WeeklySum(world.core, store), world.now + savings.WEEK_SECONDS
    assert not weekly.is_due(world.now + 1.0) and weekly.is_due(then)
    weekly.record_sum(then)
    assert not weekly.is_due(then + 1.0) and world.core.state.observed_since
    monkeypatch.undo()
    assert weekly.is_due(then + answers.RETRY_SUM_SECONDS)
    weekly.record_sum(then + answers.RETRY_SUM_SECONDS)
    assert isinstance(world.core.events[-1].record, records.ObservedWeek) and not world.core.state.observed_since
    store.close()
