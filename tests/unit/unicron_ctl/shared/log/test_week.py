"""The weekly report: counted from the log, and told to those whom it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.questions import told
from tests.support.week_log import failure, healed, log
from tests.support.world import World
from unicron_ctl.controller.model.asker import NOBODY, Asker
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.log.week import week
from unicron_ctl.shared.protocol.answer_schema import Report


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "events.sqlite")
    yield made
    made.close()


def test_a_week_is_counted_by_cause_job_and_node() -> None:
    found = week(log(), 6.0, 70.0, spared=960.0)
    assert [(c.cause, c.severity, c.failures, c.jobs, c.nodes) for c in found.causes] == [
        ("oom", 2, 2, 1, 1),
        ("gpu_lost", 1, 1, 1, 1),
    ]
    assert (found.healed, found.needed_admin) == (1, 1)
    assert found.lost_node_hours == pytest.approx(1.0) and found.saved_node_hours == pytest.approx(8.6)
    assert [(job.job, job.failures, job.healed, job.ended_with) for job in found.jobs] == [
        ("7", 1, 1, 0),
        ("8", 2, 0, 1),
    ]
    assert [(n.node, n.failures, n.lost, n.out_of_service) for n in found.nodes] == [("n1", 1, 1, 1), ("n2", 2, 0, 0)]


def test_healing_that_cost_more_than_a_requeue_saves_nothing() -> None:
    events = [Event(1, 1.0, "7", 1, failure("oom", "n1")), Event(2, 2.0, "7", 1, healed(2000.0))]
    found = week(events, 0.0, 9.0, spared=960.0)
    assert found.saved_node_hours == 0.0 and found.lost_node_hours == pytest.approx(20.0)


def test_admins_are_told_of_all_and_an_owner_of_his_own_jobs(store: Store) -> None:
    world = World()
    world.start_job("7", 2)
    now = world.now
    store.append([msgspec.structs.replace(event, time=now - 100.0 + event.id) for event in log()])
    everything = msgspec.convert(told(world.core, "report", store=store, seconds=600.0), Report)
    assert {job.job for job in everything.jobs} == {"7", "8", "9"} and everything.needed_admin == 1
    ann = Asker(uid=1000, user="ann")
    world.job("7").uid = 1000
    own = msgspec.convert(told(world.core, "report", ann, store=store, seconds=600.0), Report)
    assert {job.job for job in own.jobs} == {"7"} and not own.nodes and not own.needed_admin and not own.observed
    nothing = msgspec.convert(told(world.core, "report", NOBODY, store=store, seconds=600.0), Report)
    assert not nothing.causes and not nothing.jobs


def test_a_look_back_takes_the_newest_in_order_and_says_where_it_was_cut(store: Store) -> None:
    store.append(log())
    kinds = (records.FailureDetected, records.JobEnded)
    found = store.since(kinds, 9.0)
    assert [event.time for event in found.events] == [10.0, 30.0, 31.0, 40.0, 99.0] and found.cut is None
    of_one = store.since(kinds, 9.0, {"7"}, limit=1)
    assert [event.id for event in of_one.events] == [2] and of_one.cut is None, "others' events do not count"
    found = store.since(kinds, 9.0, limit=2)
    assert [event.time for event in found.events] == [40.0, 99.0] and found.cut == (8, 31.0)


def test_a_part_of_a_failure_that_gets_another_cause_is_a_failure_of_its_own() -> None:
    part = records.FailureVerdict(failure=1, slots=[1], cause="oom")
    found = week([Event(1, 1.0, "7", 1, failure("unknown", "n1")), Event(2, 2.0, "7", 1, part)], 0.0, 9.0, 100.0)
    assert [(one.cause, one.failures) for one in found.causes] == [("oom", 1), ("unknown", 1)]
    assert found.jobs[0].failures == found.nodes[0].failures == 2
