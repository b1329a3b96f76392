"""Every sensor of the table: the same arguments give the same result, and nothing changes but the memory it names."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support.training import hang, train
from tests.support.world import World
from tests.unit.unicron_ctl.controller.failure_detector import test_leases, test_network_partitions
from tests.unit.unicron_ctl.controller.job import test_replicas
from tests.unit.unicron_ctl.controller.nodes import test_node_events
from tests.unit.unicron_ctl.controller.sense import test_late, test_overdue, test_peers
from unicron_ctl.controller.core import turn
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense.sensors import SENSORS, Sensor, SensorMemory

CHECKED = 1  # calls with findings of a scenario's own sensors that are checked, beside the first and the middle one
CACHES = {"counted", "planned"}  # fields that follow from others, and are computed when they are needed


def frozen(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """The value as something that can be compared, down to its last field."""
    if isinstance(value, enum.Enum | str | bytes | int | float | bool | type(None)):
        return repr(value)  # NaN equals itself so
    if id(value) in seen:
        return "again"
    seen |= {id(value)}
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return [(frozen(key, seen), frozen(item, seen)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(str(frozen(item, seen)) for item in value)
    if isinstance(value, list | tuple | deque):
        return [frozen(item, seen) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.name not in CACHES]
        return type(value).__name__, [(name, frozen(getattr(value, name), seen)) for name in names]
    if hasattr(value, "__struct_fields__"):
        return type(value).__name__, [(name, frozen(getattr(value, name), seen)) for name in value.__struct_fields__]
    if hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__, frozen(vars(value), seen)
    return type(value).__name__


def test_what_is_compared_sees_a_change_anywhere():
    world = World()
    world.start_job()
    view, memory = world.core.view, world.core.runtime(world.job()).sensors
    before = frozen(view), frozen(memory)
    view.live.agent("1", 1).repeated["x"] = 1.0
    memory.times.phases.shares = np.ones(3)
    assert frozen(view) != before[0] and frozen(memory) != before[1]


def copied(view: View, job: JobView, memory: SensorMemory) -> tuple[View, JobView, SensorMemory]:
    """Copies that share nothing with the originals, and whose memory is apart from the job."""
    keep = {id(one): one for one in (view.config, view.classifier, view.slurm.seen, view.unread)}
    new_view, new_job = copy.deepcopy((view, job), dict(keep))
    return new_view, new_job, copy.deepcopy(memory, dict(keep))


def check(sensor: Sensor, view: View, job: JobView, memory: SensorMemory) -> None:
    """Asserts what the table says about this sensor."""
    first, second = copied(view, job, memory), copied(view, job, memory)
    before = [frozen(argument) for argument in first]
    outcomes = [sensor.sense(*first), sensor.sense(*second)]
    assert frozen(outcomes[0]) == frozen(outcomes[1]), f"{sensor.name}: equal arguments, another result"
    assert frozen(first[2]) == frozen(second[2]), f"{sensor.name}: equal arguments, another memory"
    assert frozen(first[0]) == before[0], f"{sensor.name} changes the view"
    assert frozen(first[1]) == before[1], f"{sensor.name} changes the job"
    for field in dataclasses.fields(SensorMemory):
        if field.name not in sensor.changes:
            same = frozen(getattr(first[2], field.name)) == frozen(getattr(memory, field.name))
            assert same, f"{sensor.name} changes {field.name}"


class Watched:
    """Stands in the table for a sensor. Notes at which calls it finds something, and checks those that it is told."""

    def __init__(self, sensor: Sensor, at: Collection[int]) -> None:
        self.sensor, self.at, self.calls = sensor, at, 0
        self.news: list[int] = []
        self.problems: list[Exception] = []

    def __call__(self, view: View, job: JobView, memory: SensorMemory) -> Outcome:
        self.calls += 1
        if self.calls in self.at:
            try:
                check(self.sensor, view, job, memory)
            except Exception as error:  # which the core would contain
                self.problems.append(error)
        before = copy.copy(memory.progress)
        outcome = self.sensor.sense(view, job, memory)
        if outcome or outcome.orders or memory.progress != before:
            self.news.append(self.calls)
        return outcome


def run(
    scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch, at: Mapping[str, Collection[int]]
) -> list[Watched]:
    watched = [Watched(sensor, at.get(sensor.name, ())) for sensor in SENSORS]
    rows = zip(SENSORS, watched, strict=True)
    monkeypatch.setattr(turn, "SENSORS", tuple(sensor._replace(sense=one) for sensor, one in rows))
    scenario()
    problems = [problem for one in watched for problem in one.problems]
    assert not problems, problems
    return watched


def hanging_rank() -> None:
    world = World(hang_floor_seconds=0.5)
    world.start_job()
    train(world, 20)
    hang(world, [1])
    world.run(6.0)
    assert any(event.kind == "hang" for event in world.log)


def stopped_rank() -> None:
    world = World()
    world.start_job()
    train(world, 3)
    world.agents[1].set(1, state="stopped", broken=1)
    world.agents[2].silent = True
    world.run(0.5)
    world.agents[2].silent = False
    world.run(4.5)


def odd_node() -> None:
    world = World(hang_floor_seconds=1000.0, first_iteration_seconds=1e6, metrics_seconds=2.0)
    world.start_job(nodes=6)
    test_peers.rounds(world, 1)
    test_peers.test_a_node_that_stands_out_is_said_shown_and_over_again_and_nothing_is_done(world)


SCENARIOS: dict[Callable[[], None], tuple[str, ...]] = {
    hanging_rank: ("members", "iterations"),
    stopped_rank: ("stopped", "unheard agents"),
    odd_node: ("peers",),
    test_late.test_who_holds_the_last_copy_is_never_banished_by_time: ("late to stop",),
    test_late.test_one_that_stands_still_is_tried_again_and_in_the_end_who_never_got_in_is_left_out: ("late to enter",),
    test_replicas.test_a_rank_that_stopped_half_way_releases_those_of_its_replica_who_wait_for_it: ("blocked",),
    test_leases.test_an_agent_without_a_rank_gives_its_vote_up_before_the_others_go_on: ("free votes",),
    test_overdue.test_a_started_process_that_never_gets_ready_is_killed_and_the_next_severity_follows: ("actions",),
    test_network_partitions.test_a_node_that_was_left_out_comes_back_when_it_is_reached: ("network partitions",),
    lambda: test_node_events.test_a_lost_agents_failure_tells_what_slurm_says_of_its_element(
        "TIMEOUT", "killed_from_outside"
    ): ("Slurm's states",),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: ", ".join(SCENARIOS[scenario]))
def test_a_sensor_changes_only_the_memory_that_it_names(scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch):
    """The scenario runs twice: the first time shows at which calls a sensor finds something, and these are checked."""
    first = run(scenario, monkeypatch, {})
    own = [one for one in first if one.sensor.name in SCENARIOS[scenario]]
    at = {one.sensor.name: {1, one.calls // 2, *one.news[:CHECKED]} for one in own}
    again = run(scenario, monkeypatch, at)
    assert [one.news for one in again] == [one.news for one in first], "the scenario is the same each time"
    assert {one.sensor.name for one in again if one.news} >= set(SCENARIOS[scenario])


def test_each_sensor_has_its_scenario():
    assert sorted(sensor.name for sensor in SENSORS) == sorted({name for names in SCENARIOS.values() for name in names})
