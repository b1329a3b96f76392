"""What an agent and its controller say to each other: a real agent, with a controller in the test's hands."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import zmq

from tests.support.jobs import SLEEPS, Agent, Job, scripted
from tests.support.processes import wait_for
from tests.support.scripted import FakeController
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_detector.chaos import blackhole

pytestmark = pytest.mark.process


@pytest.fixture
def fake():
    made = FakeController()
    yield made
    made.close()


class TwoRanks:
    """The two ranks of an agent, for both of which the test speaks."""

    def __init__(self, fake: FakeController, agent: Agent):
        self.agent = agent
        self._socket = fake.context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{agent.socket}")

    def say(self, kind: str, slot: int, **fields: Any) -> None:
        """One message of a rank."""
        rank = {"v": 1, "kind": kind, "slot": slot, "incarnation": 0}
        self._socket.send(msgpack.packb(rank | fields))

    def step(self, slot: int, iteration: int) -> None:
        """It has stepped in generation 1."""
        done = {"micro_batches": [slot], "computed": [slot], "total": 2, "loss": 2.0}
        self.say("step", slot, generation=1, iteration=iteration, seconds=0.1, at=time.time(), **done)

    def hear(self) -> dict[str, Any]:
        """What one of them is told next."""
        assert self._socket.poll(30_000), self.agent.log
        return msgpack.unpackb(self._socket.recv(), strict_map_key=False)


@pytest.fixture
def two(fake, tmp_path):
    """Two ranks that run in generation 1, under a controller that asks for little by itself."""
    command = scripted(tmp_path, SLEEPS)
    job = Job(tmp_path, fake.address, "27", 1, command, UNICRON_MODE="session", UNICRON_RANKS_PER_NODE="2")
    try:
        assert fake.welcome(heartbeat_period=30.0).number == 1
        ranks = TwoRanks(fake, job.agents[0])
        for slot in (0, 1):
            ranks.say("rank", slot, state="running", generation=1)
        fake.status(
            lambda status: bool(status.store) and all(rank.state == "running" for rank in status.ranks.values()),
            "both run, and nothing else is to come",
        )
        yield ranks
    finally:
        job.close()


def test_the_steps_of_a_node_are_one_message_and_come_before_the_death_of_who_made_them(fake, two):
    for iteration in range(20):
        two.step(0, iteration)
        two.step(1, iteration)
    two.step(1, 20)
    two.say("fault", 1, type="ValueError", text="no", at=1.0)
    heard: list[structs.StepReport] = []
    failed = False
    while not failed:
        message = fake.hear(lambda message: isinstance(message, wire.Steps | wire.Status), "all steps, and the fault")
        heard += message.reports if isinstance(message, wire.Steps) else message.steps
        failed = isinstance(message, wire.Status) and message.ranks[1].fault is not None
    said = [(each.iteration, rank.slot) for each in heard for rank in each.ranks]
    assert sorted(said) == [(iteration, slot) for iteration in range(20) for slot in (0, 1)] + [(20, 1)]
    assert said == sorted(said, key=lambda pair: pair[0])
    assert any(len(each.ranks) == 2 for each in heard), "on a busy machine not all of them"
    assert {(each.generation, each.total) for each in heard} == {(1, 2)}


def test_each_rank_is_told_the_plan_with_its_agents_share_of_the_work(fake, two):
    """And a plan that is none is dropped."""
    work = {slot: [slot, slot + 4] for slot in range(4)}
    plan = wire.Plan(generation=2, members=[0, 1, 2, 3], store="h:1", prefix="p", iteration=7, assignment=work)
    told = {"v": 1, "kind": "plan", "generation": 2, "members": [0, 1, 2, 3], "store": "h:1", "prefix": "p"}
    fake.plan(plan, [0, 1])
    for _ in range(2):
        assert two.hear() == told | {"iteration": 7, "assignment": {0: [0, 4], 1: [1, 5]}}
    good = msgspec.msgpack.decode(shared_plans.common(plan))
    for bad in (b"\xc1", b"", msgpack.packb(good | {"members": [[3, 0]]}), msgpack.packb({"generation": 3})):
        fake.send(wire.PlanShare(common=msgspec.Raw(bad)))
    fake.plan(msgspec.structs.replace(plan, generation=4), [0, 1])
    assert two.hear()["generation"] == 4, "nothing else has reached them"
    said = "dropped a bad message of the controller"
    wait_for(lambda: two.agent.log.count(said) >= 4, lambda: two.agent.log)
    assert two.agent.log.count(said) == 4


def test_a_plain_program_starts_in_the_world_of_its_plan(fake, tmp_path):
    show = "import os, time; print(os.environ['RANK'], os.environ['MASTER_PORT'], flush=True); time.sleep(600)"
    job = Job(tmp_path, fake.address, "28", 1, [sys.executable, "-c", show], UNICRON_MODE="restart")
    try:
        fake.welcome()
        fake.rank(lambda rank: rank.state == "waiting", "its slot waits")
        fake.plan(wire.Plan(generation=1, members=[0], store="nowhere", prefix=""), [0])
        fake.plan(wire.Plan(generation=2, members=[0], store="127.0.0.1:20123", prefix=""), [0])
        assert fake.rank(lambda rank: rank.state == "running", "its program runs").generation == 2
        agent = job.agents[0]
        wait_for(lambda: "0 20123" in agent.log, lambda: agent.log)
        said = "dropped a bad message of the controller: the plan's world meets at 'nowhere'"
        wait_for(lambda: said in agent.log, lambda: agent.log)
    finally:
        job.close()


def test_progress_waits_as_long_as_the_controller_wants(fake, two):
    two.say("rank", 0, state="running", generation=1, iteration=4)
    before = fake.rank(lambda rank: rank.iteration == 4, "long before its heartbeat is due")
    assert before.state == "running"
    fake.send(wire.Welcome(heartbeat_period=30.0, controller="test", progress_seconds=30.0))
    number = fake.status().number
    two.say("rank", 0, state="running", generation=1, iteration=5)
    time.sleep(0.5)
    fake.send(wire.Ping())
    after = fake.status()
    assert (after.ranks[0].iteration, after.number) == (5, number + 1), "the controller had to ask for it"


def test_a_controller_that_vanished_without_a_word_is_found_again(fake, two):
    """The old connection stays dead; TCP alone would try it for a quarter of an hour."""
    fake.send(wire.Welcome(heartbeat_period=0.5, controller="test"))
    fake.status()
    cut = blackhole.dig(pace=False)
    try:
        blackhole.fill(listening(cut))
        two.say("rank", 0, state="finished", generation=1)
        assert fake.rank(lambda rank: rank.state == "finished", "its news, over a new connection")
    finally:
        blackhole.fill(cut)


def listening(inodes: set[int]) -> set[int]:
    """Those of them that wait for connections."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[9]) for row in rows if row[3] == "0A"} & inodes


def test_hostile_bytes_are_dropped_on_both_sides(fake, two):
    agent = two.agent
    fake.send(wire.Welcome(heartbeat_period=0.5, controller="test"))
    hostile = [b"", b"\xc1", os.urandom(300), b"\x81" * 3000, msgpack.packb([1]), msgpack.packb({"kind": "rank"})]
    rank = {"v": 1, "kind": "rank", "slot": 0, "incarnation": 0}
    hostile += [
        msgpack.packb(rank | more)
        for more in (
            {"slot": 9},
            {"slot": []},
            {"kind": "nothing"},
            {"kind": []},
            {"state": "exited"},
            {"state": "no state"},
            {"iteration": "three"},
            {"done": [[]]},
            {"kind": "fault"},
            {"kind": "step"},
            {"kind": "step", "slot": 0, "loss": {}},
            {"incarnation": 5, "state": "finished"},
            {"kind": "fault", "type": 1, "text": 2, "at": "now"},
        )
    ]
    peer = fake.context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(f"ipc://{agent.socket}")
    for data in hostile:
        peer.send(data)
    peer.send_multipart([b"more", b"than", b"one", b"frame"])
    for data in hostile:
        fake.send(data)
    for period in (0.0, -1.0, float("nan"), float("inf")):
        fake.send(wire.Welcome(heartbeat_period=period, controller="evil"))
        fake.send(wire.Welcome(heartbeat_period=0.5, controller="evil", progress_seconds=period))
    fake.send(wire.encode(wire.Ping(v=99)))
    fake.send(wire.StartRank(slot=77, incarnation=1, reason=""))
    fake.send(wire.StopRank(slot=0, incarnation=77, reason=""))
    fake.send(wire.StartRank(slot=0, incarnation=1, reason="but it runs"))
    wait_for(lambda: "protocol 99" in agent.log or agent.log.count("of the controller") >= 5, lambda: agent.log)
    fake.send(wire.Ping())
    for _ in range(3):  # the heart beats on, and no status has changed
        assert fake.rank(lambda rank: True, "a status").state == "running"
    assert agent.process.poll() is None
    assert 2 <= agent.log.count("dropped a bad message") <= 10, "a few lines, not one for each"
    peer.close()
