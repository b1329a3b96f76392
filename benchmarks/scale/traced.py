"""The simulated agents under a trace of failures: nodes break, fall silent, are left and come back.

`LiveSlurm` decides which element runs on which node.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.scale.agents import JOB, Agent, address_of
from benchmarks.scale.lines import Sockets
from benchmarks.scale.simulation import ITERATION_SECONDS, REGISTER_RATE, Simulation
from benchmarks.scale.simulation import names as lines
from benchmarks.scale.slurm import names
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.reach import Reach
from unicron_detector.chaos import blackhole
from unicron_planner.simulate.trace import Trace

START_SECONDS = 1.0  # from Slurm's start of an element until its agent comes
LATER_SECONDS = 0.5  # before a failure that found no element to strike is tried again
LOOK_SECONDS = 0.1  # between two checks whether all train again
EXITS = 1  # status of a rank that ends by an exception


@dataclass(frozen=True)
class Look:
    """What the controller sees of a failure. With neither line the node falls silent, with all that is on it."""

    kernel: str = ""
    """A line of the node's kernel log."""
    error: str = ""
    """The last line of a rank whose process ends."""
    stops: bool = False
    """The error is that of ranks of two nodes, which stop in a collective."""

    @property
    def silent(self) -> bool:
        return not (self.kernel or self.error)


# The causes of unicron_planner.simulate.generate.LLAMA3_COUNTS; lines from public threads (tests/data/errors.jsonl).
LOOKS = {
    "gpu_lost": Look("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", "RuntimeError: CUDA error: unknown"),
    "ecc_error": Look(
        "NVRM: Xid (PCI:0000:07:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE)",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
    "nic_error": Look("mlx5_core 0000:5e:00.0: device's health compromised - reached miss count"),
    "host_hardware_error": Look(
        "EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2 slot:0)"
    ),
    "local_disk_error": Look("Buffer I/O error on device nvme0n1p1, logical block 1066386"),
    "node_failed": Look(),
    "other_software_error": Look(error="RuntimeError: NCCL communicator was aborted on rank 1."),
    "numerical_error": Look(error="AssertionError: Rank 3: found NaN in local grad norm in backward pass. Device: 3"),
    "nccl_timeout": Look(
        error="[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", stops=True
    ),
    "other_network_error": Look(
        error="NET/IB : Got completion from peer 10.0.0.1<48598> with error 12, opcode 0, len 0, vendor err 129",
        stops=True,
    ),
}


@dataclass
class Injected:
    """A failure that has happened."""

    at: float
    cause: str
    severity: int
    elements: list[int]
    slots: list[int]
    node: str
    generation: int
    """The job's generation at that time."""
    entered: float = 0.0
    """When a later generation began to train; 0.0 before."""
    whole: float = 0.0
    """When all ranks trained again; 0.0 before."""


@dataclass(frozen=True)
class Due:
    """A failure to come."""

    at: float
    """Seconds after the start."""
    index: int
    """The node's number."""
    cause: str
    severity: int
    away: float
    """Seconds until the node joins again; 0 if it does not leave."""


def schedule(trace: Trace, speed: float) -> list[Due]:
    """Return the failures of a trace of nodes `n0` ... `nN`, `speed` times as fast."""
    found, joins = [], {}
    for event in reversed(trace.events):
        if event.event == "join":
            joins[event.node] = event.seconds
            continue
        cause = event.failure
        back = joins.pop(event.node, trace.until) - event.seconds if cause.severity == 1 else 0.0
        found.append(Due(event.seconds / speed, int(event.node[1:]), cause.name, cause.severity, back / speed))
    return found[::-1]


class Hosts:
    """Sockets at which the nodes' slurmd and agents answer, all on one port. Raises OSError."""

    def __init__(self, count: int) -> None:
        self._listening: dict[str, socket.socket] = {}
        self.port = 0
        for index, name in enumerate(names(count)):
            one = socket.create_server((address_of(index), self.port))
            self.port = one.getsockname()[1]
            self._listening[name] = one

    def die(self, node: str) -> None:
        """Answer no more on a node."""
        blackhole.deafen(self._listening[node])

    def revive(self, node: str) -> None:
        """Answer again on a node."""
        blackhole.undeafen(self._listening[node])

    def close(self) -> None:
        for one in self._listening.values():
            one.close()


class Traced(Simulation):
    """`agents` elements on `nodes` nodes; `slurm` is the connection of :class:`benchmarks.scale.slurm.LiveSlurm`."""

    def __init__(
        self, endpoint: tuple[str, int], slurm: socket.socket, hosts: Hosts, nodes: int, agents: int, ranks: int
    ) -> None:
        self._sockets = Sockets(endpoint, lines(agents))
        super().__init__(self._sockets, agents, ranks)
        self._slurm, self._hosts = slurm, hosts
        self._slurm.setblocking(False)
        self._place = {name: index for index, name in enumerate(names(nodes))}
        self._half_line = b""
        self._fresh = set(range(agents))  # elements whose first agent has not registered
        self.absent = set(range(agents))  # elements without an agent
        self.dead: set[str] = set()
        self.injected: list[Injected] = []
        self.moved = 0  # starts of elements by Slurm after their first one
        self.iterations = 0
        self._next_state, self._events = 0.0, 0

    # ------------------------------------------------------------ time
    def fail_by(self, dues: Iterable[Due]) -> None:
        """Let the failures of a schedule happen from now on."""
        now = time.time()
        for due in dues:
            self._later(now + due.at, lambda due=due: self._strike(due))

    def _turn(self) -> None:
        self._hear_slurm()
        super()._turn()
        now = time.time()
        if now >= self._next_state:
            self._next_state = now + LOOK_SECONDS
            self._note(now)

    def _note(self, now: float) -> None:
        """Note which failures are over."""
        training = self.training
        waiting = [one for one in self.injected if not one.whole]
        if not waiting or training is None or not training.running:
            return
        whole = self.complete()
        for one in waiting:
            if training.generation > one.generation:
                one.entered = one.entered or training.began
                if whole and now > one.at:
                    one.whole = now

    def _iterate(self, now: float) -> None:
        before = self.training.iteration if self.training is not None else 0
        super()._iterate(now)
        if self.training is not None:
            self.iterations += max(0, self.training.iteration - before)

    # ------------------------------------------------------------ Slurm
    def _hear_slurm(self) -> None:
        try:
            data = self._half_line + self._slurm.recv(1 << 20)
        except BlockingIOError:
            return
        lines = data.split(b"\n")
        self._half_line = lines.pop()
        for line in lines:
            element, node = json.loads(line)
            now = time.time()
            if element not in self.absent:
                self._end(element, now)
            if node is not None:
                delay = element / REGISTER_RATE if element in self._fresh else START_SECONDS
                self.moved += element not in self._fresh
                self._later(now + delay, lambda element=element, node=node: self._begin(element, node))

    def _begin(self, element: int, node: str) -> None:
        address = address_of(self._place[node])
        if node in self.dead:
            return
        if element in self._fresh:
            self._fresh.discard(element)
        else:
            self._sockets.connect(element, f"{JOB}-{element}-{node}")
        door = f"{address}:{self._hosts.port}"
        self.agents[element] = Agent(element, self.ranks_per_agent, self.total, node, address, door)
        self.absent.discard(element)
        self._register(self.agents[element])

    def _end(self, element: int, now: float) -> None:
        """End an element as Slurm does: its agent announces it and leaves."""
        agent = self.agents[element]
        for slot in agent.ranks:
            agent.die(slot, now, -15)
        agent.status.leaving = "stopped by Slurm (SIGTERM)"
        self._say(agent)
        self._gone(agent, now)

    def _gone(self, agent: Agent, now: float) -> None:
        """Send nothing more from this agent."""
        for slot in agent.ranks:
            agent.die(slot, now)
            self.killed.add(slot)
        agent.welcomed = False
        self.absent.add(agent.element)
        self._stand_still(agent)
        self._sockets.drop(agent.element)
        breaking = self.breaking
        if breaking is not None and breaking.take(agent.element, time.time()):
            self._report_stopped(breaking.generation)

    def _stand_still(self, agent: Agent) -> None:
        """Stop the training if the agent has a member: the other members wait for it in their collectives."""
        training = self.training
        if training is not None and any(slot in training.layout.places for slot in agent.ranks):
            self._finish_reports()
            training.running = False

    def _restart(self, node: str) -> None:
        """Bring a repaired node back: its slurmd starts again."""
        self.dead.discard(node)
        self._hosts.revive(node)
        self._slurm.sendall((json.dumps([node, time.time()]) + "\n").encode())

    # ------------------------------------------------------------ failures
    def _strike(self, due: Due) -> None:
        """Let the failure happen at the element of its number, or at the next one that trains."""
        now, look, training = time.time(), LOOKS[due.cause], self.training
        count = len(self.agents)
        states = ("running",) if look.stops else ("running", "stopped", "entering")
        order = [self.agents[(due.index + step) % count] for step in range(count)]
        able = [one for one in order if self._at_work(one, states)]
        if training is None or len(able) < 2 or (look.stops and not training.running):
            self._later(now + LATER_SECONDS, lambda: self._strike(due))
            return
        agent = able[0]
        hit = [agent, able[len(able) // 2]] if look.stops else [agent]
        slots = [min(one.ranks) + due.index % self.ranks_per_agent for one in hit]
        elements = [one.element for one in hit]
        generation = training.generation
        self.injected.append(Injected(now, due.cause, due.severity, elements, slots, agent.node, generation))
        self._happen(look, due, hit, slots, now)

    def _at_work(self, agent: Agent, states: tuple[str, ...]) -> bool:
        return agent.element not in self.absent and all(rank.state in states for rank in agent.ranks.values())

    def _happen(self, look: Look, due: Due, hit: list[Agent], slots: list[int], now: float) -> None:
        agent = hit[0]
        if look.silent:
            node = agent.node
            self.dead.add(node)
            self._hosts.die(node)
            self._gone(agent, now)
            self._later(now + due.away, lambda: self._restart(node))
            return
        if look.kernel:
            self._events += 1
            event = wire.NodeEvent(
                job=JOB,
                element=agent.element,
                agent=agent.name,
                number=self._events,
                source="kernel",
                text=look.kernel,
                at=now,
            )
            self._send(agent.element, wire.encode(event))
        for one, slot in zip(hit, slots, strict=True) if look.error else ():
            self._stand_still(one)
            if look.stops:
                training = self.training
                if training is not None:  # a rank knows its iteration, its last heartbeat may not
                    one.progress(training.generation, training.iteration, 0.0, ITERATION_SECONDS, now)
                one.fail(slot, now, look.error)
            else:
                one.die(slot, now, EXITS, look.error)
                self.killed.add(slot)
            self._say(one)

    # ------------------------------------------------------------ agents that are gone send and receive nothing
    def _send(self, index: int, data: bytes) -> None:
        if index not in self.absent:
            super()._send(index, data)

    def _say(self, agent: Agent) -> None:
        if self.agents[agent.element] is agent:
            super()._say(agent)

    def _register(self, agent: Agent) -> None:
        if self.agents[agent.element] is agent and agent.element not in self.absent:
            super()._register(agent)

    def _ready(self, agent: Agent) -> None:
        if agent.element not in self.absent:
            super()._ready(agent)

    def _on_message(self, agent: Agent, data: bytes, at: float) -> None:
        message = wire.decode(data, wire.ToAgent)
        if isinstance(message, wire.Reach):
            silent = {address_of(self._place[node]) for node in self.dead}
            words = [
                Reach.SILENT if target.rpartition(":")[0] in silent else Reach.REACHED for target in message.targets
            ]
            reached = wire.ReachAnswer(
                job=JOB, element=agent.element, agent=agent.name, number=message.number, words=[str(w) for w in words]
            )
            self._later(time.time() + 0.7, lambda: self._answer(agent, reached))
        else:
            super()._on_message(agent, data, at)

    def _answer(self, agent: Agent, reached: wire.ReachAnswer) -> None:
        if self.agents[agent.element] is agent:
            self._send(agent.element, wire.encode(reached))
