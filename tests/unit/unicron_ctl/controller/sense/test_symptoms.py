"""Symptoms are compared as they come, and name a node within ten seconds."""

from __future__ import annotations

import random

import pytest

from tests.support.depth import cases
from tests.support.training import events
from tests.support.world import World
from unicron_ctl.controller.sense.symptoms import Symptoms
from unicron_ctl.shared.protocol import wire

NODES = [f"n{number + 1}" for number in range(6)]
PERIOD = 2.0


def address(node: str) -> str:
    return f"10.0.0.{node[1:]}"


def tell(world: World, node: str, losses=None, whole: bool = False, **symptoms: float) -> None:
    agent = next(agent for agent in world.agents if agent.node == node)
    message = wire.Metrics(job="1", element=agent.element, agent=agent.agent, host=node, whole=whole)
    message.symptoms, message.losses, message.addresses = symptoms, losses or {}, [address(node)]
    world.to_core(agent, message)


@pytest.fixture
def world():
    made = World(hang_floor_seconds=1000.0, first_iteration_seconds=1e6, metrics_seconds=5 * PERIOD)
    made.start_job(nodes=6)
    for node in NODES:
        tell(made, node, whole=True, file_latency=0.01, cpu_throttled=0.0)
    made.run(1.0)
    return made


def named(world: World) -> list[tuple[str, str]]:
    return [(event.record.node, event.record.metric) for event in events(world, "anomaly")]


def seconds_until(world: World, told) -> float:
    began = world.now
    while not named(world) and world.now - began < 60.0:
        told()
        world.run(PERIOD)
    return world.now - began


@pytest.mark.parametrize("symptom", [{"file_latency": 2.0}, {"cpu_throttled": 0.9}])
def test_a_symptom_names_its_node_within_ten_seconds(world, symptom):
    assert seconds_until(world, lambda: tell(world, "n4", **symptom)) < 10.0
    assert named(world) == [("n4", *symptom)]
    for _ in range(4):
        tell(world, "n4", whole=True, file_latency=0.01, cpu_throttled=0.0)
        world.run(PERIOD)
    assert [event.record.node for event in events(world, "anomaly_over")] == ["n4"]


def test_lost_packets_name_the_node_in_the_middle_and_not_its_neighbours(world):
    def told() -> None:
        tell(world, "n2", {address("n3"): (100.0, 20.0)})
        tell(world, "n3", {address("n4"): (100.0, 20.0), "10.9.9.9": (3.0, 0.5)})

    assert seconds_until(world, told) < 10.0 and named(world) == [("n3", "packet_loss")]


def test_the_same_report_counts_once_however_often_it_is_looked_at(world):
    for _ in range(15):
        tell(world, "n4", file_latency=2.0)
        world.run(0.2)
    assert not named(world), "reports within one period are one"


def test_a_disk_that_all_wait_for_is_nobodys_fault(world):
    for _ in range(10):
        for node in NODES:
            tell(world, node, file_latency=2.0)
        world.run(PERIOD)
    assert not named(world)


def test_healthy_nodes_raise_no_alarm_in_many_rounds():
    """Single stutters, a burst of losses on one link, and disks that stutter together."""
    draw = random.Random(11)
    symptoms, now, found = Symptoms(), 0.0, []
    for _ in range(cases(3000)):
        now += PERIOD
        together = draw.random() < 0.05
        for element, node in enumerate(NODES):
            slow = together or draw.random() < 0.01
            values = {"file_latency": draw.lognormvariate(-4.6, 1.0) + 2.0 * slow, "cpu_throttled": 0.0}
            losses = {address(draw.choice(NODES)): (500.0, 40.0)} if draw.random() < 0.005 else {}
            message = wire.Metrics("1", element, "a", losses=losses, addresses=[address(node)])
            symptoms.on_metrics(node, message, values, now)
        found += symptoms.judge(range(len(NODES)), PERIOD, now)[0]
    assert found == []
