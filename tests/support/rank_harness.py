"""Real ranks over real ZeroMQ and gloo, with a minimal agent and controller in one loop: `transition` without Slurm.

The decisions are the controller's own (`unicron_ctl.shared.consensus.survivors_plan`); their transport is shortened.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from tests.support import lent
from tests.support.jobs import UNCHECKED
from tests.support.processes import outside_slurm, state_of
from tests.support.warm import warm
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.connections.rank_socket import for_rank, from_rank
from unicron_ctl.agent.ranks.ranks import Rank, rank_environment, stop_all
from unicron_ctl.controller.replication.forming import formable
from unicron_ctl.shared.consensus import survivors_plan
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_detector.processes.rank_messages import Step, Timing
from unicron_transition.generations import layout

HERE = Path(__file__).resolve().parent
LIMIT = 240.0  # a busy machine may need minutes for the imports
STOP_LIMIT = 40.0  # for all survivors to stop, and for all members to enter


@functools.cache
def store_address() -> str:
    """The rendezvous store of all runs of this process."""
    process = lent.Fork(["-m", "unicron_transition.generations.store_host", "forked"])
    atexit.register(process.kill)
    assert process.stdout is not None
    return f"127.0.0.1:{int(process.stdout.readline().split()[1])}"


class ForkedRank(Rank):
    """A rank whose process is a fork of the zygote, from the first one on."""

    def start(self, incarnation: int) -> None:
        self.starter = warm()
        super().start(incarnation)
        if self.coming is not None:
            self.arrive()
        assert not self.cold, self.cold  # it would work all the same, and take the tests three times as long


class Ranks:
    """`size` ranks of tiny_gpt; `drive()` runs them to the end and heals what breaks.

    restart: dead ranks are started again and rejoin. hang_limit: seconds after which a stopped process is killed.
    replica: ranks of one. leave: slot -> the iteration after which it is offered to go. comeback: a rank that left
    is offered to come back. fork: ranks without their imports. kills: (seconds after the first plan, slot) pairs:
    SIGKILL at any point. pauses: iterations after which all stop and go on, though nobody is lost. settings:
    environment of the ranks; TINY_SCRIPT is what they run in place of tiny_gpt.
    """

    def __init__(
        self,
        out: Path,
        size: int,
        faults: list[dict],
        restart: bool = False,
        hang_limit: float | None = None,
        leave: dict[int, int] | None = None,
        comeback: bool = False,
        fork: bool = False,
        kills: list[tuple[float, int]] | None = None,
        pauses: list[int] | None = None,
        replica: int = 1,
        most: int | None = None,
        **settings: str,
    ):
        self.out, self.size, self.replica = out, size, replica
        self.former: list[int] = []  # members of the generation that its ranks were in last, replica by replica
        self.folder = tempfile.TemporaryDirectory(prefix="unicron-test-")
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.endpoint = f"ipc://{self.folder.name}/ranks"
        self.socket.bind(self.endpoint)
        place = Place(
            job="1",
            element=0,
            node="n1",
            address="127.0.0.1",
            settings=structs.Settings(name="tiny", user="nobody", ranks_per_node=most or size),
        )
        base = {
            **outside_slurm(),
            "TINY_OUT": str(out),
            "TINY_FAULT": json.dumps(faults),
            "UNICRON_PLAN_TIMEOUT": "60",
            **UNCHECKED,
            **({"TINY_QUICK": "1"} if fork else {}),
            **settings,
        }
        kind = ForkedRank if fork else Rank
        environment = rank_environment(place, self.endpoint, base)
        script = settings.get("TINY_SCRIPT", str(HERE / "tiny_gpt.py"))
        self.ranks = {slot: kind(slot, slot, [sys.executable, script], environment) for slot in range(size)}
        self.environment = environment(0, 0, 0)
        self.restart, self.hang_limit, self.leave, self.comeback = restart, hang_limit, dict(leave or {}), comeback
        self.kills, self.born = sorted(kills or []), 0.0
        self.pauses = sorted(pauses or [])
        self.identities: dict[int, bytes] = {}
        self.generation = 0
        self.broken = 0
        self.members: list[int] = []
        self.steps: list[dict] = []
        self.timings: list[dict] = []
        self.plans: list[wire.Plan] = []
        self.breaks: list[tuple[int, list[int], float]] = []
        self.reports: list[dict[int, structs.RankStatus]] = []  # what the survivors of each Break reported
        self.rests: list[float] = []  # seconds from a Break to the plan that answered it
        self.stuck: set[int] = set()  # slots that were killed since gloo had lost them
        self.reformed = False  # nobody was left, and new ranks began anew
        self.ended: dict[int, float] = {}  # slot -> when its pidfd told of an end
        self.exits: dict[int, list[int]] = {}
        self.faults: list[tuple[int, str, str]] = []

    def drive(self) -> None:
        """Until every rank that is to live has finished."""
        try:
            for rank in self.ranks.values():
                rank.start(0)
            self.store = store_address()
            self._loop()
        finally:
            stop_all(list(self.ranks.values()))
            self.socket.close(0)
            self.context.term()
            self.folder.cleanup()

    def _loop(self) -> None:
        deadline = time.monotonic() + LIMIT
        while any(rank.alive for rank in self.ranks.values()):
            assert time.monotonic() < deadline, self._where()
            self._hear(10)
            lost = self._collect()
            if lost:
                self._break(lost)
            elif self._self_stopped() or self._pause_due():
                self._break([])
            elif not self.members or self._newcomers():
                self._admit()
            else:
                self._let_go()

    def _prefix(self) -> str:
        """Runs share a store, so the prefix tells them apart too."""
        return f"{self.folder.name}/{self.generation}"

    def _where(self) -> dict:
        return {slot: (rank.alive, rank.status) for slot, rank in self.ranks.items()} | {
            "plans": self.plans,
            "breaks": self.breaks,
        }

    # ------------------------------------------------------------ the agent's part
    def _hear(self, milliseconds: int) -> None:
        """Wait for a message or for the end of a process, then take in all messages."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        for rank in self.ranks.values():
            if rank.child is not None:
                poller.register(rank.child.pidfd, zmq.POLLIN)
                rank.child.pass_stderr()
        ready = dict(poller.poll(milliseconds))
        for slot, rank in self.ranks.items():
            if rank.child is not None and rank.child.pidfd in ready:
                self.ended.setdefault(slot, time.time())
        while self.socket.poll(0):
            identity, data = self.socket.recv_multipart()
            head, message = from_rank(data)
            if isinstance(message, Step):
                self.steps.append({**vars(message), "slot": head.slot, "incarnation": head.incarnation})
                if message.status is None:  # the rank was long between two iterations
                    continue
                message = message.status
            if isinstance(message, Timing):
                self.timings.append({**vars(message), "slot": head.slot})
            else:
                rank = self.ranks[head.slot]
                if head.incarnation != rank.status.incarnation:
                    continue
                self.identities[rank.slot] = identity
                before = rank.status.fault
                rank.on_message(message)
                if rank.status.fault is not None and rank.status.fault != before:
                    self.faults.append((rank.slot, rank.status.fault.type, rank.status.fault.text))
        self._disturb()

    def _disturb(self) -> None:
        """Kill what hangs, and whom the test wants dead by now."""
        for rank in self.ranks.values():
            child = rank.child
            if (
                self.hang_limit
                and child
                and child.poll() is None
                and time.time() - rank.status.changed > self.hang_limit
                and state_of(child.pid) == "T"
            ):
                rank.kill()
        while self.kills and self.plans and time.monotonic() - self.born > self.kills[0][0]:
            self.ranks[self.kills.pop(0)[1]].kill()

    def _collect(self) -> list[int]:
        """The members whose processes ended unfinished."""
        lost = []
        for slot, rank in self.ranks.items():
            if rank.child is not None and rank.child.poll() is not None:
                incarnation = rank.status.incarnation
                self.exits.setdefault(slot, []).append(rank.child.poll())
                self._hear(0)
                rank.collect()
                self.identities.pop(slot, None)
                if rank.status.state == "exited":
                    if slot in self.members:
                        lost.append(slot)
                    if self.restart:
                        rank.start(incarnation + 1)
        return lost

    # ------------------------------------------------------------ the controller's part
    def _self_stopped(self, slots: list[int] | None = None) -> bool:
        """A member stopped although nobody is gone; not one that obeys an earlier Break and waits for its plan."""
        statuses = [self.ranks[slot].status for slot in (self.members if slots is None else slots)]
        return any(status.state in ("stopped", "waiting") and status.broken > self.broken for status in statuses)

    def _pause_due(self) -> bool:
        """All members are over the next iteration that the test wants a Break after."""
        if not self.pauses or not self.members:
            return False
        over = {step["slot"] for step in self.steps if step["iteration"] >= self.pauses[0]}
        due = over.issuperset(self.members)
        self.pauses = self.pauses[1:] if due else self.pauses
        return due

    def _newcomers(self) -> list[int]:
        states = {"waiting", "standby", *(["left"] if self.comeback else []), *([] if self.members else ["stopped"])}
        return [
            slot
            for slot, rank in self.ranks.items()
            if rank.alive and rank.status.state in states and slot not in self.members
        ]

    def _send(self, message: wire.Message, slots: list[int]) -> None:
        common = shared_plans.common(message) if isinstance(message, wire.Plan) else None
        for slot in slots:
            if slot in self.identities and self.ranks[slot].alive:
                told = message if common is None else shared_plans.whole(shared_plans.share(message, common, [slot]))
                self.socket.send_multipart([self.identities[slot], for_rank(told)])

    def _admit(self) -> None:
        """The first generation, or an offer for newcomers; waits until all members run in it."""
        waiting = self._newcomers()
        if self.members and all(self.ranks[slot].status.state == "finished" for slot in self.members):
            for slot in waiting:  # too late: the training is over
                self.ranks[slot].kill()
                self.restart = False
            return
        if not waiting or (not self.members and len(waiting) < sum(rank.alive for rank in self.ranks.values())):
            return
        self.reformed = self.reformed or (not self.members and bool(self.steps))
        made = self._grown(waiting) if self.members else self._formed(waiting)
        if made is None:
            return
        self.generation += 1
        plan = msgspec.structs.replace(
            made, generation=self.generation, replica=self.replica, store=self.store, prefix=self._prefix()
        )
        self._announce(plan)

    def _grown(self, waiting: list[int]) -> wire.Plan | None:
        """With those who join because they compose replicas."""
        inside = layout.replicas(self.members, self.replica)
        new, _ = layout.compose(waiting, self.replica)
        members, joiners = layout.arrange([*inside, *new]), [slot for slots in new for slot in slots]
        grown = wire.Plan(
            generation=0, members=members, store="", prefix="", boundary=True, joiners=joiners, source=inside[0][0]
        )
        return grown if new else None

    def _formed(self, waiting: list[int]) -> wire.Plan | None:
        """Of those who are there, as the controller forms it."""
        reports = {slot: self.ranks[slot].status for slot in waiting}
        if len({slot % self.replica for slot in waiting}) < self.replica:
            return None
        found = formable(reports, self.replica)
        assert found is not None, "no common state is left"
        total = max(reports[slot].micro_batches for slot in found.members)
        return wire.Plan(
            generation=0,
            members=found.members,
            store="",
            prefix="",
            joiners=found.joiners,
            source=found.source,
            iteration=found.iteration,
            assignment=survivors_plan.deal(
                range(total), layout.heads(found.members, self.replica), reports[found.members[0]].lanes
            ),
            state=found.state,
            reason=found.why,
        )

    def _let_go(self) -> None:
        """Offer to go on without a rank that is to leave."""
        due = [
            slot
            for slot, iteration in self.leave.items()
            if slot in self.members and self.ranks[slot].status.iteration > iteration
        ]
        if due and len(self.members) > self.replica:
            self.generation += 1
            self.leave.pop(due[0])
            kept = [slots for slots in layout.replicas(self.members, self.replica) if due[0] not in slots]
            staying = layout.arrange(kept)
            self._announce(
                wire.Plan(
                    generation=self.generation,
                    members=staying,
                    replica=self.replica,
                    store=self.store,
                    prefix=self._prefix(),
                    boundary=True,
                    source=staying[0],
                )
            )

    def _announce(self, plan: wire.Plan) -> None:
        self.plans.append(plan)
        offers = sum(plan.boundary for plan in self.plans)
        self.born = self.born or time.monotonic()
        before = self.members or plan.members
        everyone = sorted(set(plan.members) | set(before))
        # Joiners that have trained already, before all were in, stop as members do.
        outside = [slot for slot, rank in self.ranks.items() if slot not in everyone and rank.status.state == "stopped"]
        self._send(plan, [*everyone, *outside])
        if plan.boundary:
            (self.out / f"gate.{offers}").touch()  # training may wait until an offer is out
        deadline = time.monotonic() + STOP_LIMIT
        while not all(self._in(slot, plan) for slot in everyone):
            assert time.monotonic() < deadline, self._where()
            self._hear(10)
            self.members = everyone
            lost = self._collect()
            self.members = before
            if lost or self._self_stopped(everyone):
                return self._break(lost)
            if plan.boundary and all(self.ranks[slot].status.state == "finished" for slot in before):
                for slot in plan.joiners:  # offered too late: the training is over
                    self.ranks[slot].kill()
                self.restart = False
                return
        self.members = self.former = plan.members
        for slot in set(everyone) - set(plan.members):
            if not self.comeback and self.ranks[slot].status.state != "standby":
                self.ranks[slot].kill()

    def _in(self, slot: int, plan: wire.Plan) -> bool:
        status = self.ranks[slot].status
        if slot not in plan.members:
            return status.state in ("left", "standby", "finished", "exited")
        return status.state == "finished" or (status.state == "running" and status.generation == plan.generation)

    def _resting(self, slot: int) -> bool:
        return self.ranks[slot].status.state in ("left", "standby")

    def _break(self, lost: list[int]) -> None:
        self.broken = self.generation
        self.breaks.append((self.generation, lost, time.time()))
        self.members = [slot for slot in self.members if slot not in lost]
        self._send(wire.Break(generation=self.generation, lost=lost, reason="test"), list(self.ranks))
        deadline = time.monotonic() + STOP_LIMIT
        late = deadline - STOP_LIMIT / 2
        joiners = [slot for slot in (self.plans[-1].joiners if self.plans else ()) if slot not in lost]
        inside = [slot for slot in joiners if self.ranks[slot].status.state in ("running", "stopped")]
        involved = {*self.members, *inside}
        while stuck := [slot for slot in sorted(involved) if not (self._resting(slot) or self._at_rest(slot))]:
            assert time.monotonic() < deadline, self._where()
            if time.monotonic() > late:  # as the controller does: gloo sometimes loses one that waits
                late = deadline
                self.stuck |= set(stuck)
                for slot in stuck:
                    self.ranks[slot].kill()
            self._hear(10)
            more = self._collect()
            if more:
                return self._break(more)
            involved -= {slot for slot in involved if self.ranks[slot].status.state == "exited"}
        stopped = {slot: self.ranks[slot].status for slot in self.members if self.ranks[slot].status.state == "stopped"}
        self.reports.append({slot: msgspec.structs.replace(status) for slot, status in stopped.items()})
        self.members = sorted(stopped)
        ends = [rank.status.train_iterations for rank in self.ranks.values() if rank.status.state == "finished"]
        decision = (
            survivors_plan.decide(
                stopped,
                next(iter(stopped.values())).micro_batches,
                max(ends, default=None),
                size=self.replica,
                former=self.former,
            )
            if stopped
            else None
        )
        if decision is None:
            self.members = []  # those who have stopped wait for what completes a replica, or the state
            if not any(status.shards for status in stopped.values()):
                self._stand_by(sorted(stopped))
            return
        self.generation += 1
        self.rests.append(time.time() - self.breaks[-1][2])
        self._announce(
            wire.Plan(
                generation=self.generation,
                members=decision.members,
                replica=self.replica,
                state=decision.state,
                store=self.store,
                prefix=self._prefix(),
                step=decision.step,
                iteration=decision.iteration,
                assignment=decision.assignment,
                reason=decision.reason,
            )
        )

    def _stand_by(self, slots: list[int]) -> None:
        """Tell the living ranks of broken replicas that the job waits for more: a plan without members."""
        self.generation += 1
        plan = wire.Plan(generation=self.generation, members=[], replica=self.replica, store="", prefix="")
        self._send(plan, slots)

    def _at_rest(self, slot: int) -> bool:
        status = self.ranks[slot].status
        return status.state == "finished" or (
            status.state in ("stopped", "waiting") and status.broken >= self.generation
        )
