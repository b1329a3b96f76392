"""Every sensor of the table: the same arguments give the same result, and nothing changes but the memory it names."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.scenarios import replica_that_waits, trained
from tests.support.training import hang, train, trained_world
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.core import turn
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense.sensors import SENSORS, Sensor, SensorMemory
from unicron_ctl.shared.protocol import wire

CHECKS = 1  # calls with findings of a scenario's own sensors that are checked, beside the first and the middle one
CACHES = {"counted", "planned"}  # fields that follow from others, and are computed when they are needed


def flat(value: Any, above: tuple[int, ...] = ()) -> Any:
    """The value as something that can be compared, down to its last field. above: what it is a part of."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is float or issubclass(kind, enum.Enum | str | bytes | int):
        return repr(value)  # NaN equals itself so
    if id(value) in above:
        return "again"
    above = (*above, id(value))
    if kind is np.ndarray:
        return value.shape, value.tobytes()
    if issubclass(kind, Mapping):
        return [(flat(key, above), flat(item, above)) for key, item in value.items()]
    if issubclass(kind, set | frozenset):
        return sorted(str(flat(item, above)) for item in value)
    if issubclass(kind, list | tuple | deque):
        return [flat(item, above) for item in value]
    names = fields_of(kind)
    if names is not None:
        return kind.__name__, [flat(getattr(value, name), above) for name in names]
    if hasattr(value, "__dict__") and not callable(value):
        return kind.__name__, flat(vars(value), above)
    return kind.__name__


PLAIN = {str, bytes, int, bool, type(None)}


@cache
def fields_of(kind: type) -> tuple[str, ...] | None:
    """The names of the fields that count, of a dataclass or a struct."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.name not in CACHES)
    return getattr(kind, "__struct_fields__", None)


def test_what_is_compared_sees_a_change_anywhere():
    world = World()
    world.start_job()
    view, memory = world.core.view, world.core.runtime(world.job()).sensors
    before = flat(view), flat(memory)
    view.live.agent("1", 1).repeated["x"] = 1.0
    memory.times.phases.shares = np.ones(3)
    assert flat(view) != before[0] and flat(memory) != before[1]


def copies_of(view: View, job: JobView, memory: SensorMemory) -> tuple[View, JobView, SensorMemory]:
    """Copies that share nothing with the originals, and whose memory is apart from the job."""
    keep = {id(one): one for one in (view.config, view.classifier, view.slurm.seen, view.unread)}
    new_view, new_job = copy.deepcopy((view, job), dict(keep))
    return new_view, new_job, copy.deepcopy(memory, dict(keep))


def check(sensor: Sensor, view: View, job: JobView, memory: SensorMemory) -> None:
    """Asserts what the table says about this sensor."""
    first, second = copies_of(view, job, memory), copies_of(view, job, memory)
    before = [flat(argument) for argument in first]
    outcomes = [sensor.sense(*first), sensor.sense(*second)]
    assert flat(outcomes[0]) == flat(outcomes[1]), f"{sensor.name}: equal arguments, another result"
    assert flat(first[2]) == flat(second[2]), f"{sensor.name}: equal arguments, another memory"
    assert flat(first[0]) == before[0], f"{sensor.name} changes the view"
    assert flat(first[1]) == before[1], f"{sensor.name} changes the job"
    for field in dataclasses.fields(SensorMemory):
        if field.name not in sensor.changes:
            same = flat(getattr(first[2], field.name)) == flat(getattr(memory, field.name))
            assert same, f"{sensor.name} changes {field.name}"


class Watch:
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
    scenario: Callable[[], object], monkeypatch: pytest.MonkeyPatch, at: Mapping[str, Collection[int]]
) -> list[Watch]:
    watched = [Watch(sensor, at.get(sensor.name, ())) for sensor in SENSORS]
    rows = zip(SENSORS, watched, strict=True)
    monkeypatch.setattr(turn, "SENSORS", tuple(sensor._replace(sense=one) for sensor, one in rows))
    scenario()
    problems = [problem for one in watched for problem in one.problems]
    assert not problems, problems
    return watched


# ---------------------------------------------------------------- a scenario for each sensor
def on_slurm(count: int) -> World:
    return trained(count, 1, seconds=3.0)[0]


def hanging_rank() -> None:
    world = trained_world()
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
    for number in range(18):
        for agent in world.agents:
            odd = agent.node == "n3" and 9 <= number < 14
            node = {"file_latency": 4.0 if odd else 0.01 + 1e-4 * agent.element, "gpu_temperature": 62.0}
            sample = {"host": f"boot-{agent.node}", "node": node, "ranks": {}}
            world.to_core(agent, wire.Metrics(job="1", element=agent.element, agent=agent.agent, **sample))
        world.run(2.0)
    kinds = [event.kind for event in world.log]
    assert kinds.count("anomaly") == kinds.count("anomaly_over") == 1


def last_copies() -> None:
    world = trained_world(report_timeout=5.0)
    for slot in (0, 1):
        world.agents[slot].obedient = False
    world.agents[2].die(2)
    world.run(60)
    assert any(event.kind == "last_copy" for event in world.log)


def never_entered() -> None:
    world = trained_world(enter_timeout=10.0)
    world.agents[0].set(0, state="stopped", broken=world.job().generation)
    agent = world.agents[1]
    agent.obedient = False
    world.run(0.5)
    agent.set(1, state="stopped", broken=world.job().broken)
    agent.set(1, state="entering", entering=world.job().generation)
    world.run(12)
    assert [event.kind for event in world.log].count("break") == 2


def voter_without_rank() -> None:
    """Two of four are cut off, and the rank of the third has died."""
    world = on_slurm(4)
    for agent in world.agents[:2]:
        agent.silent = agent.cut = True
        world.cuts |= {frozenset((agent.node, other)) for other in ("", "n3", "n4")}
    world.agents[2].gives_up = False
    world.agents[2].die(2)
    world.run(20.0)
    world.agents[2].gives_up = True
    world.run(3.0)
    assert world.agents[2].over == 1


def slow_start() -> None:
    world = World(restart_seconds=60.0, isolate_seconds=40.0)
    world.start_job()[1].die(1)
    world.run(62)
    assert any(event.kind == "action_failed" for event in world.log)


def cut_link() -> None:
    """Elements 0 and 1 do not reach each other, so that a collective that builds a generation never ends."""
    world = on_slurm(4)
    world.cuts.add(frozenset(("n1", "n2")))
    for agent in world.agents:
        agent.obedient = False
    world.agents[3].die(3)
    world.run(0.5)
    for state, number in (("stopped", "broken"), ("entering", "generation")):
        for agent in world.agents[:3]:
            field = "broken" if state == "stopped" else "entering"
            agent.set(agent.element, state=state, **{field: getattr(world.job(), number)})
        world.run(0.3)
    world.run(6.0)
    assert list(world.job().parted) == [1]
    world.cuts.clear()
    world.run(7.0)
    assert not world.job().parted


def timed_out_element() -> None:
    world = on_slurm(4)
    world.agents[1].silent = True
    world.slurm.queue["1", 1].update(state="TIMEOUT", node=None)
    world.run(4)
    assert world.job().failures[0].slurm == "TIMEOUT"


def leaving_agent() -> None:
    world = on_slurm(4)
    world.agents[1].status(leaving="stopped by SIGTERM")
    world.agents[1].silent = True
    world.run(1)
    assert world.job().agents[1].gone == "stopped by SIGTERM"


def missed_member() -> None:
    """Others have gone on without slot 1, whose agent was to tell why; another agent comes in its place."""
    world = on_slurm(4)
    lost = world.agents[1]
    lost.silent = lost.cut = True
    world.core.view.live.jobs["1"].missed = {1: (lost.agent, world.now)}
    fresh = FakeAgent(world, "1", 1, "n2", nodes=4)
    fresh.register()
    world.run(0.3)
    assert [f.record.slots for f in world.job().failures if f.record.detected_by == "agreement"] == [[1]]
    assert not world.core.view.live.jobs["1"].missed


SCENARIOS: dict[Callable[[], object], tuple[str, ...]] = {
    hanging_rank: ("members", "iterations"),
    stopped_rank: ("stopped", "unheard agents"),
    odd_node: ("peers",),
    last_copies: ("late to stop",),
    never_entered: ("late to enter",),
    replica_that_waits: ("blocked",),
    voter_without_rank: ("free votes",),
    slow_start: ("actions",),
    cut_link: ("network partitions",),
    timed_out_element: ("Slurm's states", "ended elements"),
    leaving_agent: ("leaving agents",),
    missed_member: ("missed members",),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: ", ".join(SCENARIOS[scenario]))
def test_a_sensor_changes_only_the_memory_that_it_names(
    scenario: Callable[[], object], monkeypatch: pytest.MonkeyPatch
):
    """The scenario runs twice: the first time shows at which calls a sensor finds something, and these are checked."""
    first = run(scenario, monkeypatch, {})
    own = [one for one in first if one.sensor.name in SCENARIOS[scenario]]
    at = {one.sensor.name: {1, one.calls // 2, *one.news[:CHECKS]} for one in own}
    again = run(scenario, monkeypatch, at)
    assert [one.news for one in again] == [one.news for one in first], "the scenario is the same each time"
    assert {one.sensor.name for one in again if one.news} >= set(SCENARIOS[scenario])


def test_each_sensor_has_its_scenario():
    assert sorted(sensor.name for sensor in SENSORS) == sorted({name for names in SCENARIOS.values() for name in names})
