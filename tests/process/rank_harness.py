"""Real ranks over real ZeroMQ and gloo, with a minimal agent and controller in one loop: proves `transition` without Slurm.

The decisions are the controller's own (`unicron_ctl.controller.resume`); only their transport is shortened.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgpack
import zmq

from detector.supervise import Child
from unicron_ctl import wire
from unicron_ctl.agent.place import Place
from unicron_ctl.agent.ranks import Rank, rank_environment, stop_all
from unicron_ctl.controller import resume

HERE = Path(__file__).resolve().parent
LIMIT = 100.0


class Ranks:
    """`size` ranks of tiny_gpt; `drive()` runs them to the end and heals what breaks."""

    def __init__(self, out: Path, size: int, faults: list[dict], restart: bool = False, hang_limit: float | None = None, **settings: str):
        self.folder = tempfile.TemporaryDirectory(prefix="unicron-test-")
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        endpoint = f"ipc://{self.folder.name}/ranks"
        self.socket.bind(endpoint)
        place = Place(job="1", element=0, node="n1", address="127.0.0.1",
                      settings=wire.Settings(name="tiny", user="nobody", ranks_per_node=size))
        base = {**os.environ, "TINY_OUT": str(out), "TINY_FAULT": json.dumps(faults), "UNICRON_PLAN_TIMEOUT": "60", **settings}
        self.ranks = {slot: Rank(slot, slot, [sys.executable, str(HERE / "tiny_gpt.py")], rank_environment(place, endpoint, base)) for slot in range(size)}
        self.environment = rank_environment(place, endpoint, base)(0, 0, 0)
        self.restart, self.hang_limit = restart, hang_limit
        self.identities: dict[int, bytes] = {}
        self.generation = 0
        self.members: list[int] = []
        self.steps: list[dict] = []
        self.timings: list[dict] = []
        self.plans: list[wire.Plan] = []
        self.breaks: list[tuple[int, list[int], float]] = []

    def drive(self) -> None:
        """Until every rank that is to live has finished."""
        store = subprocess.Popen([sys.executable, "-m", "transition.store_host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment)
        try:
            for rank in self.ranks.values():
                rank.start(0)
            self.store = f"127.0.0.1:{int(store.stdout.readline().split()[1])}"
            self._loop()
        finally:
            stop_all(list(self.ranks.values()))
            store.kill()
            store.wait()
            self.socket.close(0)
            self.context.term()
            self.folder.cleanup()

    def _loop(self) -> None:
        deadline = time.monotonic() + LIMIT
        while any(rank.alive for rank in self.ranks.values()):
            assert time.monotonic() < deadline, {slot: rank.status for slot, rank in self.ranks.items()}
            self._hear(10)
            self._kill_hanging()
            lost = self._collect()
            if lost and self.members:
                self._break(lost)
            elif self._self_stopped():
                self._break([])
            elif not self.members or self._newcomers():
                self._admit()

    def _hear(self, milliseconds: int) -> None:
        while self.socket.poll(milliseconds):
            identity, data = self.socket.recv_multipart()
            message = msgpack.unpackb(data)
            self.identities[message["slot"]] = identity
            if message["kind"] == "step":
                self.steps.append(message)
            elif message["kind"] == "timing":
                self.timings.append(message)
            else:
                self.ranks[message["slot"]].heard(message)
            milliseconds = 0

    def _kill_hanging(self) -> None:
        if self.hang_limit is None:
            return
        for rank in self.ranks.values():
            child: Child | None = rank.child
            if child and rank.status.state == "running" and time.time() - rank.status.changed > self.hang_limit and self._stopped(child.pid):
                rank.kill()

    @staticmethod
    def _stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def _collect(self) -> list[int]:
        lost = []
        for slot, rank in self.ranks.items():
            if rank.child is not None and rank.child.poll() is not None:
                incarnation = rank.status.incarnation
                self._hear(0)
                rank.collect()
                if rank.status.state == "exited":
                    if slot in self.members:
                        lost.append(slot)
                    if self.restart:
                        rank.start(incarnation + 1)
        return lost

    def _self_stopped(self) -> bool:
        return any(self.ranks[slot].status.state == "stopped" and self.ranks[slot].status.broken >= self.generation for slot in self.members)

    def _newcomers(self) -> list[int]:
        return [slot for slot, rank in self.ranks.items() if rank.alive and rank.status.state == "waiting" and slot not in self.members]

    def _send(self, message: wire.Message, slots: list[int]) -> None:
        import msgspec

        data = msgpack.packb(msgspec.to_builtins(message, str_keys=False) | {"v": 1})
        for slot in slots:
            if slot in self.identities and self.ranks[slot].alive:
                self.socket.send_multipart([self.identities[slot], data])

    def _admit(self) -> None:
        """The first generation, or an offer for newcomers; waits until all members run in it."""
        waiting = self._newcomers()
        if not waiting or (not self.members and len(waiting) < len(self.ranks)):
            return
        self.generation += 1
        members = sorted([*self.members, *waiting])
        source = self.members[0] if self.members else members[0]
        plan = wire.Plan(generation=self.generation, members=members, store=self.store, prefix=f"t/{self.generation}", boundary=bool(self.members),
                         joiners=[slot for slot in waiting if slot != source], source=source)
        self._announce(plan)

    def _announce(self, plan: wire.Plan) -> None:
        self.plans.append(plan)
        self._send(plan, sorted(set(plan.members) | set(self.members)))
        before, self.members = self.members, plan.members
        deadline = time.monotonic() + 40
        while not all(self.ranks[s].status.state in ("finished",) or (self.ranks[s].status.state == "running" and self.ranks[s].status.generation == plan.generation)
                      for s in plan.members):
            assert time.monotonic() < deadline, {s: r.status for s, r in self.ranks.items()}
            self._hear(10)
            lost = self._collect()
            if lost or self._self_stopped():
                self.members = before or plan.members
                return self._break(lost)

    def _break(self, lost: list[int]) -> None:
        self.breaks.append((self.generation, lost, time.time()))
        survivors = [slot for slot in self.members if slot not in lost]
        self._send(wire.Break(generation=self.generation, lost=lost, reason="test"), list(self.ranks))
        deadline = time.monotonic() + 40
        while not all(self.ranks[s].status.state in ("stopped", "waiting") and self.ranks[s].status.broken >= self.generation for s in survivors):
            assert time.monotonic() < deadline, {s: r.status for s, r in self.ranks.items()}
            self._hear(10)
            more = self._collect()
            if more:
                self.members = survivors
                return self._break(more)
        stopped = {slot: self.ranks[slot].status for slot in survivors if self.ranks[slot].status.state == "stopped"}
        self.members = sorted(stopped)
        decision = resume.decide(stopped, next(iter(stopped.values())).micro_batches) if stopped else None
        if decision is None:
            return
        self.generation += 1
        self._announce(wire.Plan(generation=self.generation, members=decision.members, store=self.store, prefix=f"t/{self.generation}",
                                 step=decision.step, iteration=decision.iteration, assignment=decision.assignment, reason=decision.reason))
