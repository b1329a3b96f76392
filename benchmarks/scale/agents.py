"""One simulated agent and the statuses of its ranks, without a clock or a socket."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_ctl.agent.loop.heartbeats import Heartbeats
from unicron_ctl.shared.protocol import shared_plans, structs, wire

JOB = "1"
ITERATIONS = 1_000_000  # more than any run trains
FLOPS = 1e18  # of one iteration
LIVED = 3600.0  # seconds that a rank has lived before it dies: its start was not the cause
PHASE_SHARES = (0.02, 0.25, 0.5, 0.2, 0.02, 0.01)  # of an iteration, in the order of structs.PHASES
COMPUTED_SHARE = 0.5  # of an iteration, after which a rank's micro-batch is in its gradient
ADDRESS_ROOM = 250  # addresses 127.1.X.Y, X and Y from 1 on
METRICS = {"cpu_busy": 0.4, "memory_used": 0.5, "nic_receive": 1e8, "nic_transmit": 1e8, "file_latency": 0.01}


def address_of(index: int) -> str:
    """Return the address of node `index`, one of this machine's own."""
    return f"127.1.{1 + index // ADDRESS_ROOM}.{1 + index % ADDRESS_ROOM}"


@dataclass(frozen=True)
class Layout:
    """A plan, with each member's place among the members."""

    plan: wire.Plan
    places: dict[int, int]

    @classmethod
    def of(cls, part: wire.PlanShare) -> Layout:
        """Return the layout of a plan of which an agent has a share. Raises wire.BadMessage."""
        plan = shared_plans.whole(part)
        return cls(plan, {slot: place for place, slot in enumerate(plan.members)})

    def share(self, slot: int, total: int) -> list[int]:
        """Return the slot's micro-batches of `total` in an undisturbed iteration."""
        return list(range(self.places[slot], total, len(self.places)))


class Agent:
    """The agent of element `element`, with `ranks` ranks of a job with `total` ranks and as many micro-batches."""

    def __init__(self, element: int, ranks: int, total: int, node: str = "", address: str = "", door: str = "") -> None:
        """It runs on `node` at `address`; `door` is the host:port at which it can be probed, if it has one."""
        self.element, self.total = element, total
        self.node, self.address, self.door = node or f"n{element:05}", address or "127.0.0.1", door
        self.name = f"agent-{element}-{node}" if node else f"agent-{element}"
        self.ranks = {
            slot: self._fresh(slot, 0, "starting") for slot in range(element * ranks, element * ranks + ranks)
        }
        store = f"127.0.0.1:{20000 + element}"
        self.status = wire.Status(job=JOB, element=element, agent=self.name, sent=0.0, store=store, ranks=self.ranks)
        self.reported = 0  # steps
        self.unsent: list[structs.StepTable] = []  # for the next status
        self.heartbeats = Heartbeats()
        self.welcomed = False
        self.layout: Layout | None = None  # the newest plan
        self.assignment: dict[int, list[int]] = {}  # its micro-batches of the first iteration
        self.shares: dict[int, list[int]] = {}  # slot -> micro-batches of the present iteration

    def _fresh(self, slot: int, incarnation: int, state: str) -> structs.RankStatus:
        return structs.RankStatus(
            state=state,
            incarnation=incarnation,
            micro_batches=self.total,
            train_iterations=ITERATIONS,
            flops_per_iteration=FLOPS,
            pid=100_000 + slot,
            process="S",
        )

    # ------------------------------------------------------------ messages
    def register(self) -> bytes:
        """Return the first message."""
        nodes, ranks = self.total // len(self.ranks), len(self.ranks)
        settings = structs.Settings(name="scale", user="ann", max_nodes=nodes, ranks_per_node=ranks)
        return wire.encode(
            wire.Register(
                job=JOB,
                element=self.element,
                agent=self.name,
                node=self.node,
                address=self.address,
                slots=list(self.ranks),
                settings=settings,
                door=self.door,
            )
        )

    def say(self, now: float) -> bytes:
        """Return the status of all ranks."""
        self.status.sent = now
        self.status.number += 1
        self.status.tables, self.unsent = self.unsent, []
        return wire.encode(self.heartbeats.form(self.status, now))

    def steps(self, generation: int, iteration: int, seconds: float, now: float) -> bool:
        """Add a report of all ranks that were in the iteration. Return whether there was one."""
        phases = [seconds * share for share in PHASE_SHARES]
        loss = 1.0 + 10.0 / (iteration + 1)
        made = [
            structs.RankStep(slot, share, seconds, loss, None, phases)
            for slot, share in self.shares.items()
            if self.ranks[slot].state == "running"
        ]
        if not made:
            return False
        self.reported += 1
        self.unsent.append(structs.step_table(generation, iteration, self.total, now, made, self.reported))
        return True

    def say_steps(self) -> bytes:
        """Return the reports that no status has sent."""
        reports, self.unsent = self.unsent, []
        return wire.encode(wire.Steps(job=JOB, element=self.element, agent=self.name, tables=reports))

    def metrics(self) -> bytes:
        """Return the node's metrics, the same on every node."""
        ranks = {slot: {"rank_cpu": 1.0, "rank_memory": 2e10} for slot in self.ranks}
        message = wire.Metrics(
            job=JOB, element=self.element, agent=self.name, host=f"host{self.element}", node=METRICS, ranks=ranks
        )
        return wire.encode(message)

    # ------------------------------------------------------------ its ranks
    def change(self, slot: int, now: float, state: str, **changes: object) -> None:
        """Change a rank's state and other fields."""
        rank = self.ranks[slot]
        rank.state, rank.changed = state, now
        for name, value in changes.items():
            setattr(rank, name, value)

    def progress(self, generation: int, iteration: int, part: float, seconds: float, now: float) -> None:
        """Bring its running ranks to the share `part` of an iteration."""
        computed = part >= COMPUTED_SHARE
        for slot, rank in self.ranks.items():
            if rank.state == "running" and rank.generation == generation:
                rank.iteration, rank.phase = iteration, "reducing" if computed else "computing"
                rank.done = self.shares.get(slot, []) if computed else []
                rank.iteration_seconds, rank.loss, rank.changed = seconds, 1.0 + 10.0 / (iteration + 1), now

    def deal(self, layout: Layout) -> None:
        """Set its ranks' micro-batches of an undisturbed iteration."""
        self.shares = {slot: layout.share(slot, self.total) for slot in self.ranks if slot in layout.places}

    def die(self, slot: int, now: float, code: int = -9, last_line: str = "") -> None:
        """End the rank's process, by SIGKILL unless `code` is another exit status."""
        self.change(slot, now, "exited", exit=structs.Exit(code=code, at=now, lived=LIVED, last_line=last_line))

    def fail(self, slot: int, now: float, text: str) -> None:
        """Stop a rank by an error of its collective."""
        rank = self.ranks[slot]
        fault = structs.Fault(type="RuntimeError", text=text, at=now)
        self.change(slot, now, "stopped", broken=rank.generation, entering=0, fault=fault)

    def start(self, slot: int, incarnation: int, now: float) -> bool:
        """Start a process in the slot of one that has ended. Return whether there was one."""
        rank = self.ranks[slot]
        if rank.state != "exited" or rank.incarnation >= incarnation:
            return False
        self.ranks[slot] = self._fresh(slot, incarnation, "starting")
        self.ranks[slot].changed = now
        return True

    def ready(self, now: float) -> None:
        """Make the ranks that were starting wait for a generation."""
        for slot, rank in self.ranks.items():
            if rank.state == "starting":
                self.change(slot, now, "waiting")

    def stops(self, generation: int) -> bool:
        """Return whether one of its ranks must still stop for a Break of this generation."""
        return any(rank.state in ("running", "entering") and rank.broken < generation for rank in self.ranks.values())

    def note_break(self, generation: int) -> None:
        """Keep ranks at rest from entering a generation up to this one, as a Break orders."""
        for rank in self.ranks.values():
            if rank.state in ("waiting", "stopped"):
                rank.broken = max(rank.broken, generation)

    def stop(self, generation: int, now: float) -> None:
        """Stop its ranks between two micro-batches, or in their reduce: every other rank had finished its own."""
        for slot, rank in self.ranks.items():
            if rank.broken >= generation or rank.state not in ("running", "entering"):
                continue
            if rank.generation == 0:
                self.change(slot, now, "waiting", broken=generation, entering=0)
                continue
            if rank.state == "running":
                computed = slot % 2 == 0
                rank.phase, rank.done = ("reducing", self.shares.get(slot, [])) if computed else ("computing", [])
            self.change(slot, now, "stopped", broken=generation, entering=0)

    def obey(self, layout: Layout, now: float) -> None:
        """Let its ranks begin to enter the plan's generation, or leave."""
        plan = layout.plan
        for slot, rank in self.ranks.items():
            if rank.state not in ("waiting", "stopped", "left") or plan.generation <= max(rank.generation, rank.broken):
                continue
            if slot in layout.places:
                self.change(slot, now, "entering", entering=plan.generation, fault=None)
            elif rank.state == "stopped":
                self.change(slot, now, "left", generation=plan.generation)

    def enter(self, layout: Layout, iteration: int, now: float) -> None:
        """Bring its ranks into the generation: those that were entering, and with an offer those that trained."""
        plan = layout.plan
        for slot, rank in self.ranks.items():
            entering = rank.state == "entering" and rank.entering == plan.generation
            if not entering and not (plan.boundary and rank.state == "running"):
                continue
            if slot in layout.places:
                kept = rank.done if not plan.boundary and rank.iteration == iteration else []
                self.change(
                    slot,
                    now,
                    "running",
                    generation=plan.generation,
                    entering=0,
                    iteration=iteration,
                    phase="computing",
                    done=kept,
                )
            else:
                self.change(slot, now, "left", generation=plan.generation)
        self.deal(layout)
        if not plan.boundary:
            self.shares |= {slot: list(share) for slot, share in self.assignment.items() if slot in self.shares}
