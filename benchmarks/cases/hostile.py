"""Corrupt and hostile messages to a controller with a job that trains, and to an agent: neither crashes."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from benchmarks.report import Report
from tests.support.jobs import AGENT, FOREVER, World
from tests.support.processes import outside_slurm
from tests.support.scripted import FakeController
from unicron_ctl.shared.protocol import shared_plans, structs, wire


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    messages: int = 1000
    """To each of the two."""


SMALLEST = Sizes(50)
PLACE = {
    "SLURM_JOB_ID": "7",
    "SLURMD_NODENAME": "n0",
    "UNICRON_NODE_ADDRESS": "127.0.0.1",
    "UNICRON_REGISTER_TIMEOUT": "60",
    "UNICRON_MODE": "session",
}


@dataclass(frozen=True)
class Outcome:
    """State of both sides after the attack."""

    controller_alive: bool
    same_generation: bool
    failures: int
    agent_alive: bool
    statuses: int
    """What the agent sent afterwards, within two seconds."""


def measure(sizes: Sizes, report: Report) -> None:
    """Attack both."""
    outcome = attack(sizes.messages)
    report.details = {"outcome": outcome}
    survivors = outcome.controller_alive + outcome.agent_alive
    report.figure("controller and agent that live on", survivors, least=2)
    report.figure("failures on record, and generations lost", outcome.failures + (not outcome.same_generation), most=0)
    report.figure("statuses of the agent afterwards", outcome.statuses, least=3)


def attack(count: int) -> Outcome:
    """Send so many messages to a controller with a job that trains, and to an agent with a rank that lives."""
    settings = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02"}
    with tempfile.TemporaryDirectory() as folder, World(Path(folder), 1, **settings) as job:
        job.wait(lambda: job.trains([0], 3), "training")
        before = job.job()
        attack_controller(job.address, count, seed=1)
        job.wait(lambda: job.job()["iteration"] > before["iteration"] + 3, "training under attack")
        after, alive = job.job(), job.alive
    attacker = HostileController()
    environment = outside_slurm() | PLACE | {"UNICRON_CONTROLLER": attacker.address}
    agent = subprocess.Popen([*AGENT, "run", "--", "sleep", "600"], env=environment, stderr=subprocess.DEVNULL)
    try:
        statuses = attacker.attack(count, seed=2)
        same = after["generation"] == before["generation"]
        return Outcome(alive, same, after["failures"], agent.poll() is None, statuses)
    finally:
        agent.terminate()
        agent.wait(10)
        attacker.close()


def valid_messages(rng: random.Random) -> list[bytes]:
    """Return messages as the two sides send them, to be corrupted."""
    settings = structs.Settings(name="x", user="y")
    slot = rng.randrange(-2, 5)
    ranks = {slot: structs.RankStatus(state="running", done=[1, 2])}
    plan = wire.Plan(generation=-1, members=[], store="x", prefix="y", assignment={1: [-1]})
    endless = shared_plans.PlanCommon(generation=2**62, members=[(0, 2**60)], store="x", prefix="y")
    messages: list[msgspec.Struct] = [
        # Not of the running job: without munge a well-formed registration for it is a restarted agent's, and obeyed.
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
    """Return noise, a valid message cut or changed in places, or one that is valid and makes no sense."""
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
    """A controller that welcomes an agent and then sends it nonsense.

    Destructive orders that are well formed are left out, since obeying them is right.
    """

    def attack(self, count: int, seed: int) -> int:
        """Return how many statuses the agent sent afterwards, within two seconds."""
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
        heard, until = 0, time.monotonic() + 2.0
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(AssertionError):
                self.status(limit=left)
                heard += 1
        return heard


def ends_something(data: bytes) -> bool:
    """Return whether the order rightly ends the agent or a rank of it."""
    try:
        message = wire.decode(data, wire.ToAgent)
    except wire.BadMessage:
        return False
    return isinstance(message, wire.End | wire.Refusal | wire.StopRank | wire.Inject | wire.Welcome)
