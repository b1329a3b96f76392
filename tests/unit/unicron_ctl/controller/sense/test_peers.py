"""Metrics of nodes and ranks against the job's own peers: who stands out is said, and nothing else happens."""

from __future__ import annotations

import random
import struct

import pytest
from msgspec import structs

from tests.support.depth import cases
from tests.support.training import events, sent, train
from tests.support.world import World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.api.job_answers import job_answer
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.sense.outliers import Group, JobPeers, PeerWatch, Sample, node_rows, rank_rows
from unicron_ctl.controller.sense.timing import PhaseTimes, Times
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.protocol import wire

NODE = {
    "cpu_busy": 0.4,
    "cpu_pressure": 0.02,
    "memory_used": 0.3,
    "nic_receive": 4e8,
    "nic_transmit": 4e8,
    "nic_errors": 0.0,
    "file_latency": 0.01,
    "gpu_temperature": 62.0,
    "gpu_clock": 1700.0,
}
RANK = {"rank_cpu": 1.0, "rank_memory": 6e9}


def metrics(
    world: World, rng: random.Random, change: dict[str, dict[str, float]] | None = None, host: str = ""
) -> None:
    """Every agent sends what it measured; change: node -> metric -> factor."""
    for agent in world.agents:
        factors = (change or {}).get(agent.node, {})
        node = {name: value * rng.gauss(1.0, 0.05) * factors.get(name, 1.0) for name, value in NODE.items()}
        ranks = {slot: {name: value * rng.gauss(1.0, 0.05) for name, value in RANK.items()} for slot in agent.slots}
        world.to_core(
            agent,
            wire.Metrics(
                job="1",
                element=agent.element,
                agent=agent.agent,
                host=host or f"boot-{agent.node}",
                node=node,
                ranks=ranks,
            ),
        )


def rounds(world: World, count: int, change: dict[str, dict[str, float]] | None = None, host: str = "") -> None:
    rng = random.Random(len(world.log))
    for _ in range(count):
        metrics(world, rng, change, host)
        world.run(2.0)


@pytest.fixture
def world():
    made = World(hang_floor_seconds=1000.0, first_iteration_seconds=1e6, metrics_seconds=2.0)
    made.start_job(nodes=6)
    rounds(made, 1)
    return made


def test_agents_are_told_how_often(world):
    assert [m.metrics_seconds for m in sent(world, wire.Welcome)] == [2.0] * 6


def test_a_node_that_stands_out_is_said_shown_and_over_again_and_nothing_is_done(world):
    rounds(world, 8)
    orders = len(world.sent)
    rounds(world, 2, {"n3": {"file_latency": 400.0}})
    assert not events(world, "anomaly"), "two rounds prove nothing"
    rounds(world, 3, {"n3": {"file_latency": 400.0}})
    (anomaly,) = [event.record for event in events(world, "anomaly")]
    assert anomaly.node == "n3" and anomaly.slot is None and anomaly.metric == "file_latency"
    assert anomaly.metrics["file_latency"] > 3.0 and anomaly.scores["file_latency"] > 8.0
    assert "only reported" in anomaly.reason and "n3: file_latency is" in anomaly.reason
    status = job_answer(world.core, world.job("1"), EVERYBODY)
    assert status.anomalies[0].peer == "n3"
    assert "odd: n3 file_latency" in status_tables._slow(status)
    shown = {node.node: node for node in answers.answer(world.core, None, "nodes", {}, EVERYBODY)}
    assert "file_latency" in status_tables._remarks(shown["n3"]) and not shown["n2"].anomalies
    rounds(world, 4)
    assert [event.record.node for event in events(world, "anomaly_over")] == ["n3"]
    assert not job_answer(world.core, world.job("1"), EVERYBODY).anomalies
    assert {type(m) for _, m in world.sent[orders:]} <= {wire.Ping}


def test_a_failure_on_that_node_says_what_was_odd_before(world, snapshot):
    rounds(world, 8)
    rounds(world, 4, {"n3": {"gpu_temperature": 1.5}})
    world.agents[2].die(2)
    world.agents[1].die(1)
    reasons = {f.record.node: f.record.reason for f in events(world, "failure_detected")}
    assert reasons["n3"] == snapshot
    assert "stood out" not in reasons["n2"]


def test_nodes_of_one_machine_are_one_peer_and_never_odd(world):
    """Virtual nodes: whatever their samples show, it is the same machine at other moments."""
    rounds(world, 20, {"n2": {"cpu_pressure": 40.0, "nic_receive": 0.0}}, host="one-machine")
    assert not events(world, "anomaly")
    samples = {e: Sample(0.0, f"n{e}", "a" if e < 2 else f"h{e}", {"cpu_busy": float(e)}, {}) for e in range(4)}
    rows, names = node_rows(samples)
    assert rows == {"n0+n1": {"cpu_busy": 0.5}, "n2": {"cpu_busy": 2.0}, "n3": {"cpu_busy": 3.0}}
    assert names["n0+n1"] == ["n0", "n1"]


def test_what_the_layout_explains_is_no_anomaly_but_a_change_is(world):
    """The first node's ranks write the checkpoints and load the data."""
    layout = {"n1": {"nic_transmit": 3.0, "memory_used": 2.0, "cpu_busy": 2.2}}
    rounds(world, 30, layout)
    assert not events(world, "anomaly")
    rounds(world, 4, layout | {"n4": {"nic_receive": 0.2}})
    assert [(e.record.node, e.record.metric) for e in events(world, "anomaly")] == [("n4", "nic_receive")]


def test_a_rank_whose_memory_grows_is_named_by_slot(world):
    rounds(world, 10)
    rng = random.Random(3)
    for turn in range(12):
        metrics(world, rng)
        agent = world.agents[4]
        ranks = {4: {"rank_cpu": 1.0, "rank_memory": 6e9 + 1e9 * turn}}
        world.to_core(agent, wire.Metrics(job="1", element=4, agent=agent.agent, host="x", ranks=ranks))
        world.run(2.0)
    (anomaly,) = [event.record for event in events(world, "anomaly")]
    assert anomaly.slot == 4 and anomaly.node == "n5" and anomaly.metric == "rank_memory"


def test_phases_count_as_shares_of_the_iteration(world):
    train(world, 20)
    rows = rank_rows({}, world.job("1").members, world.core.runtimes["1"].sensors.times.phases.comparable())
    assert len(rows) == 6 and 0.5 < sum(rows["slot 2"].values()) < 1.0
    assert rank_rows({}, [0, 1], {}) == {}


def test_times_of_an_earlier_share_are_not_compared_with_those_of_the_present_one():
    """A rank of half the speed has the same time with half the share; its work takes twice as long all the same."""

    def step(iteration: int, slow: int) -> Times:
        each = [[0.0, 0.1 * 8, 0.0, 0.0, 0.0, 0.0]] * 2 + [[0.0, 0.1 * 2 * slow, 0.0, 0.0, 0.0, 0.0]]
        data = struct.pack("<18d", *(time for row in each for time in row))
        return Times(iteration, [0, 1, 2], data, [8, 8, slow], True, True)

    phases = PhaseTimes()
    for iteration in range(10):
        phases.take_in([step(iteration, 8)])
    for iteration in range(10, 12):
        phases.take_in([step(iteration, 4)])
    row = phases.comparable()
    assert row[2]["forward"] / row[0]["forward"] == pytest.approx(2.0)


def test_a_member_that_leaves_is_no_longer_odd(world, snapshot):
    rounds(world, 8)
    rounds(world, 4, {"n3": {"gpu_temperature": 1.5}})
    world.agents[2].die(2)
    rounds(world, 4)
    assert events(world, "anomaly_over")[0].record.reason == snapshot


def test_old_samples_strange_names_and_strangers_take_no_part(world):
    for nonsense in ({"x" * 1000: 1.0}, {"cpu_busy": float("nan")}, {"cpu_busy": 1e300}):
        agent = world.agents[0]
        world.to_core(agent, wire.Metrics(job="1", element=0, agent=agent.agent, node=nonsense, ranks={77: {}, 0: {}}))
        assert world.core.runtimes["1"].sensors.peers.samples[0].values == {} and list(
            world.core.runtimes["1"].sensors.peers.samples[0].ranks
        ) == [0]
    world.core.receive((b"stranger",), wire.Metrics(job="1", element=1, agent="x", node={"cpu_busy": 9.0}), world.now)
    assert world.core.runtimes["1"].sensors.peers.samples[1].values != {"cpu_busy": 9.0}
    world.run(60)
    assert not events(world, "anomaly")


def test_it_can_be_switched_off(world):
    rounds(world, 8)
    rounds(world, 4, {"n3": {"gpu_temperature": 1.5}})
    assert job_answer(world.core, world.job("1"), EVERYBODY).anomalies
    world.core.configure(structs.replace(world.config, metrics_seconds=0.0), world.core.classifier)
    assert not job_answer(world.core, world.job("1"), EVERYBODY).anomalies
    rounds(world, 2, {"n3": {"gpu_temperature": 1.5}})
    assert world.core.runtimes["1"].sensors.peers == JobPeers()


@pytest.mark.parametrize(("peers", "noise"), [(4, 0.05), (4, 0.2), (16, 0.2), (32, 0.1)])
def test_no_false_alarms_over_many_rounds(peers, noise):
    rng = random.Random(5)
    group = Group(PeerWatch())
    for _ in range(cases(500)):
        values = {
            f"n{i}": {name: value * max(0.0, rng.gauss(1.0, noise)) for name, value in (NODE | RANK).items()}
            for i in range(peers)
        }
        assert group.judge_round(values, ()) == []
