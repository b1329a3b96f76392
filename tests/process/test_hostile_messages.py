"""Corrupt and hostile messages to a controller with a job that trains, and to an agent: neither dies."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.jobs import AGENT, FOREVER, World
from tests.support.processes import outside_slurm
from tests.support.scripted import FakeController
from unicron_ctl.shared.protocol import shared_plans, structs, wire

pytestmark = pytest.mark.process
COUNT = 200  # messages to each of the two
PLACE = {
    "SLURM_JOB_ID": "7",
    "SLURMD_NODENAME": "n0",
    "UNICRON_NODE_ADDRESS": "127.0.0.1",
    "UNICRON_REGISTER_TIMEOUT": "60",
    "UNICRON_MODE": "session",
}


def test_hostile_messages_change_nothing(tmp_path: Path):
    settings = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02"}
    with World(tmp_path, 1, **settings) as job:
        job.wait(lambda: job.trains([0], 3), "training")
        before = job.job()
        attack_controller(job.address, COUNT, seed=1)
        job.wait(lambda: job.job()["iteration"] > before["iteration"] + 3, "training under attack")
        after = job.job()
        assert job.alive and after["generation"] == before["generation"] and after["failures"] == 0


def test_hostile_messages_change_nothing_for_an_agent():
    attacker = HostileController()
    environment = outside_slurm() | PLACE | {"UNICRON_CONTROLLER": attacker.address}
    agent = subprocess.Popen([*AGENT, "run", "--", "sleep", "600"], env=environment, stderr=subprocess.DEVNULL)
    try:
        assert attacker.attack(COUNT, seed=2) >= 3, "statuses within two seconds afterwards"
        assert agent.poll() is None
    finally:
        agent.terminate()
        agent.wait(10)
        attacker.close()


def valid_messages(rng: random.Random) -> list[bytes]:
    """Return messages of both sides, to be corrupted."""
    settings = structs.Settings(name="x", user="y")
    slot = rng.randrange(-2, 5)
    ranks = {slot: structs.RankStatus(state="running", done=[1, 2])}
    plan = wire.Plan(generation=-1, members=[], store="x", prefix="y", assignment={1: [-1]})
    endless = shared_plans.PlanCommon(generation=2**62, members=[(0, 2**60)], store="x", prefix="y")
    messages: list[msgspec.Struct] = [
        # Of another job: without munge a well-formed registration for this one is a restarted agent's, and obeyed.
        wire.Register(job="99", element=slot, agent="x", node="n", address="a", slots=[slot], settings=settings),
        wire.Status(job="7", element=slot, agent="x", sent=1.0, ranks=ranks),
        wire.Steps(job="7", element=slot, agent="x", reports=[structs.StepReport(1, 2**40, total=-5, at=-1.0, ranks=[
            structs.RankStep(slot=slot, micro_batches=[-1, 2**40], seconds=float("nan"), loss=float("inf"), computed=[],
                          phases=[float("nan")] * rng.randrange(9))])]),
        wire.StackTrace(job="7", slot=slot, incarnation=0, how="x", state="y" * 10_000, text="z" * 100_000),
        wire.Metrics(job="7", element=slot, agent="x", node={"cpu_busy": float("nan"), "x" * 500: 1e308},
                     ranks={slot: {"rank_cpu": -1.0}}),
        wire.Timing(job="7", slot=slot, generation=1, at=1.0, seconds={"x": float("inf")}),
        wire.Ask(what="events", args={"after": -(2**60), "limit": "x"}),
        wire.Ask(what="inject", args={"fault": "rank-kill", "job": "7", "slot": 0}),
        wire.Ask(what="x" * 1000, args={"a": [1] * 1000}),
        wire.Break(generation=2**62, lost=[-1], reason=""),
        shared_plans.share(plan, shared_plans.common(plan), [1]),
        wire.PlanShare(common=msgspec.Raw(wire.encode(endless)), assignment={1: [-1]}),
        wire.StartRank(slot=99, incarnation=2**40, reason=""),
        wire.StopRank(slot=-1, incarnation=0, reason=""),
        wire.Stacks(slot=99, incarnation=0),
        wire.Inject(fault="typo", slot=0, incarnation=0),
    ]  # fmt: skip
    return [wire.encode(message) for message in messages]


def hostile_message(rng: random.Random) -> bytes:
    """Return noise, a valid message that is cut or changed, or a valid one without sense."""
    choice = rng.random()
    if choice < 0.15:
        return rng.randbytes(rng.randrange(0, 2000))
    if choice < 0.2:
        return bytes([rng.choice([0x81, 0x91, 0xDC, 0xDF, 0xC1])]) * rng.randrange(1, 20_000)
    data = bytearray(rng.choice(valid_messages(rng)))
    if choice < 0.4:
        return bytes(data[: rng.randrange(len(data))])
    if choice < 0.85:
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def attack_controller(address: str, count: int, seed: int) -> None:
    """Send messages over ZeroMQ from peers that come and go, as many datagrams, and some raw TCP."""
    rng = random.Random(seed)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    context = zmq.Context()
    try:
        for start in range(0, count, 50):
            with context.socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.LINGER, 1000)
                peer.connect(address)
                for _ in range(min(50, count - start)):
                    frames = [hostile_message(rng) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
                    peer.send_multipart(frames)
                while peer.poll(20):
                    peer.recv_multipart()
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as raw:
                raw.connect((host, int(port)))
                raw.sendall(rng.randbytes(300))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            for _ in range(count):
                datagrams.sendto(hostile_message(rng)[:60_000], (host, int(port)))
    finally:
        context.destroy(linger=0)


class HostileController(FakeController):
    """A controller that welcomes an agent and then sends it nonsense, but no well-formed order to end."""

    def attack(self, count: int, seed: int) -> int:
        """Count the statuses of the agent within two seconds after the attack."""
        rng = random.Random(seed)
        self.welcome(heartbeat_period=0.2)
        sent = 0
        while sent < count:
            data = hostile_message(rng)
            if not ends_something(data):
                self.send(data)
                sent += 1
        return self._count_statuses()

    def _count_statuses(self) -> int:
        count, until = 0, time.monotonic() + 2.0
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(AssertionError):
                self.status(limit=left)
                count += 1
        return count


def ends_something(data: bytes) -> bool:
    """Return whether an agent that obeys the order ends, or one of its ranks."""
    try:
        message = wire.decode(data, wire.ToAgent)
    except wire.BadMessage:
        return False
    return isinstance(message, wire.End | wire.Refusal | wire.StopRank | wire.Inject | wire.Welcome)
