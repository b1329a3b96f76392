"""Agents and a Slurm without processes: they do what the protocol says, step by step, as the test wants it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from tests.support import clock
from unicron_ctl.agent.loop.heartbeats import Heartbeats
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.fold import replay
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.requests import Knock, Poll, Probe, Run, TestPairs
from unicron_ctl.controller.server.worker import perform
from unicron_ctl.shared.consensus.survivors_plan import deal
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.thinning import redundant
from unicron_ctl.shared.protocol import shared_plans, structs, wire
from unicron_ctl.shared.protocol.reach import Reach
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.settings.partitions import PartitionConfig
from unicron_ctl.shared.slurm.admin_comment import with_own
from unicron_ctl.shared.slurm.host_lists import hosts
from unicron_ctl.shared.slurm.slurm_client import UNSAID, ElementInfo, NodeInfo, Queue, SlurmError
from unicron_ctl.shared.slurm.squeue import names_of
from unicron_detector.failures.classify import Classifier
from unicron_transition.generations import layout

MICRO_BATCHES = 8
CHANGES = itertools.count(1)  # an agent dates every change of a rank, and no two alike


class FakeAgent:
    """One agent with its ranks; `obedient` agents follow Break and Plan at once.

    layouts: those that the job states; saved: what its ranks say of checkpoints. replica: ranks of a replica. Where
    that is more than one, a rank whose replica a Break does not hit finishes what it
    has begun first, at once while it is `prompt`, else when :meth:`finish` says so. lanes: micro-batches that a replica
    computes at the same time, because its parameters are sharded.
    """

    restarts = False  # its ranks are plain programs
    lease = 0.0  # of plain programs, in seconds
    memory = False  # its node keeps images

    def __init__(
        self,
        world: World,
        job: str,
        element: int,
        node: str,
        ranks: int = 1,
        nodes: int = 4,
        weight: float = 1.0,
        min_nodes: int = 1,
        name: str = "",
        replica: int = 1,
        layouts: tuple[str, ...] = (),
        saved: int = -1,
        spares: int = 0,
        lanes: int = 1,
    ):
        self.world, self.job, self.element, self.node = world, job, element, node
        self.agent = name or f"{job}-{element}-{node}-{len(world.agents)}"
        self.settings = structs.Settings(
            name=f"job{job}",
            user="ann",
            ranks_per_node=ranks,
            max_nodes=nodes,
            min_nodes=min_nodes,
            weight=weight,
            layouts=list(layouts),
            spares=spares,
        )
        self.slots = [element * ranks + local for local in range(ranks)]
        self.replica = replica
        self.shape = layout.Layout(tensor=replica // lanes, shard=lanes)  # unless it is told another
        self.layout = ""  # as it was told
        self.saved, self.can_save = saved, True
        self.ranks = {slot: self.new_rank() for slot in self.slots}
        self.prompt = True
        self.plans: dict[int, wire.Plan] = {}  # slot -> the generation that it was in last
        self.rested: dict[int, str] = {}  # slot -> its state before it was to enter
        self.checkpoint = 0  # the iteration with which a new process begins
        self.obedient, self.silent = True, False
        self.asker = EVERYBODY  # who makes its credentials
        self.cut = False  # it lives, and is silent only to the controller
        self.killed = False  # its node lives, and says so
        self.fenced = self.restarts  # its processes end by themselves where it is cut off
        self.opened = 9999 if self.restarts else 0  # the port of its next world
        self.begins = 0  # the generation of the world that it is about to begin
        self.stored = True  # its node's rendezvous store lives
        self.left = 0  # the newest Break that it has heard
        self.number = 0
        self.heard: list[wire.Message] = []
        self.held: dict[int, wire.PlanShare] = {}
        self.pinged = self.over = 0
        self.gives_up = True  # its vote, when it is asked for
        self.agreed: wire.Agreement | None = None
        self.asked_at = -1.0  # when it registered again last
        self.offers: dict[int, wire.Plan] = {}
        self.images: list[structs.Image] = []  # in its node's memory
        self.moved = 0  # bytes of images
        self.failing: dict[str, structs.Failing] = {}  # addresses from which it could not get any
        self.refusing: dict[str, structs.Failing] = {}  # and to which it could not give any
        self.keeps = 0  # the number of the last cut that it was told
        self.user: structs.Image | None = None  # the newest that its script has saved
        self.noticed = False  # its element is to end
        self.steps = 0
        self.held_steps: list[structs.StepTable] = []  # that the next status takes along
        self.heartbeats = Heartbeats()
        world.agents.append(self)

    def new_rank(self, incarnation: int = 0) -> structs.RankStatus:
        return structs.RankStatus(
            state="starting",
            incarnation=incarnation,
            micro_batches=MICRO_BATCHES,
            train_iterations=100,
            flops_per_iteration=1e9,
            iteration_seconds=0.5,
            changed=self.world.now + 1e-9 * next(CHANGES) if incarnation else 0.0,
            replica=self.replica,
            layout=self.shape.text,
            saved=self.saved,
        )

    def _relay(self, told: str) -> None:
        """The ranks that are started from now on have this layout."""
        if told:
            self.layout, self.shape = told, layout.parse_layout(told).layout
            self.replica = self.shape.size

    @property
    def route(self) -> tuple[bytes, ...]:
        return (self.agent.encode(),)

    def registration(self, **more: Any) -> wire.Register:
        """Its first message; more: what else it says of itself."""
        return wire.Register(
            job=self.job,
            element=self.element,
            agent=self.agent,
            node=self.node,
            address="127.0.0.1",
            slots=self.slots,
            settings=self.settings,
            door=f"{self.node}:{self.agent}",
            **more,
        )

    def register(self) -> None:
        about = {"images": f"{self.node}:70", "token": f"token-{self.node}"} if self.memory else {}
        self.world.to_core(self, self.registration(**about))

    def orders(self, kind: type) -> list:
        """The messages of this kind that it has got."""
        return [message for message in self.heard if isinstance(message, kind)]

    def status(self, leaving: str = "") -> None:
        if not self.silent:
            self.world.to_core(self, self.heartbeats.form(self.whole(leaving), self.world.now))
            self.held_steps = []

    def whole(self, leaving: str = "") -> wire.Status:
        """All that it has to say now."""
        self.number += 1
        return wire.Status(
            job=self.job,
            element=self.element,
            agent=self.agent,
            sent=self.world.now,
            number=self.number,
            store=f"127.0.0.1:{9000 + self.element}" if self.stored else "",
            leaving=leaving,
            noticed=self.noticed,
            pinged=self.pinged,
            agreed=self.agreed,
            over=self.over,
            cut=self.keeps,
            images=self.images,
            saved=self.user,
            moved=self.moved,
            failing=self.failing,
            refusing=self.refusing,
            fenced=self.fenced,
            lease=self.lease,
            begins=self.begins,
            world=self.opened,
            left=self.left,
            ranks={slot: copy.copy(rank) for slot, rank in self.ranks.items()},
            tables=self.held_steps,
        )

    def set(self, slot: int, **changes) -> None:
        """Change a rank's status and report it."""
        values = {name: getattr(self.ranks[slot], name) for name in structs.RankStatus.__struct_fields__}
        if changes.get("state") == "running":  # only ranks at rest say with what they could go on
            changes["kept"] = []
        changed = max(self.world.now, values["changed"] + 1e-6)  # no clock shows two changes at one time
        self.ranks[slot] = structs.RankStatus(**{**values, **changes, "changed": changed})
        self.status()

    def ready(self) -> None:
        for slot in self.slots:
            self.set(slot, state="waiting")

    def die(self, slot: int, code: int = -9, lived: float = 60.0, last_line: str = "") -> None:
        self.set(
            slot, state="exited", exit=structs.Exit(code=code, at=self.world.now, lived=lived, last_line=last_line)
        )

    def get(self, message: wire.Message) -> None:  # noqa: C901  (one branch a message)
        if isinstance(message, wire.PlanShare):
            plan = shared_plans.whole(message)
            self.held[plan.generation] = message
            if self.agreed is not None:
                if plan.generation < self.agreed.generation:
                    return
                if plan.generation == self.agreed.generation and plan.prefix != self.agreed.plan.prefix:
                    return
                self.agreed = None
            message = shared_plans.whole(wire.decode(wire.encode(message), wire.ToAgent))
        self.heard.append(message)
        if not self.silent:
            self.heartbeats.on_message(message)
        if isinstance(message, wire.Welcome):
            self.heartbeats.period = message.heartbeat_period
        if isinstance(message, wire.Ping):
            self.pinged = max(self.pinged, message.number)
            self.over = max(self.over, message.over if self.gives_up else 0)
            self.status()
        if isinstance(message, wire.Reach) and not self.silent:
            words = [str(self.world.answer(self.node, target)) for target in message.targets]
            job, element, agent, number = self.job, self.element, self.agent, message.number
            self.world.to_core(
                self, wire.ReachAnswer(job=job, element=element, agent=agent, number=number, words=words)
            )
        if not self.obedient or self.silent:
            return
        match message:
            case wire.Cut():
                self.keeps = message.number
            case wire.Welcome():
                self._relay(message.layout)
                if message.layout and all(rank.state == "starting" for rank in self.ranks.values()):
                    self.ranks = {slot: self.new_rank() for slot in self.slots}
            case wire.Ping():
                self.status()
            case wire.Refusal(final=False) if self.asked_at < self.world.now:
                self.asked_at = self.world.now
                self.register()
                self.status()
            case wire.Break() if self.replica > 1:
                for slot in self.slots:
                    self._break(slot, message)
            case wire.Break():
                for slot, rank in self.ranks.items():
                    if rank.state in ("running", "entering") and rank.broken < message.generation:
                        was_in = rank.generation > 0
                        self.set(slot, state="stopped" if was_in else "waiting", broken=message.generation, entering=0)
                    elif rank.state in ("waiting", "stopped"):
                        self.set(slot, broken=max(rank.broken, message.generation))
            case wire.Withdraw():
                self.offers = {s: plan for s, plan in self.offers.items() if plan.generation > message.generation}
                for slot, rank in self.ranks.items():
                    joins = slot in self.rested if self.replica > 1 else not rank.generation
                    if rank.state == "entering" and rank.entering <= message.generation and joins:
                        self.set(slot, state=self.rested.get(slot, "waiting"), broken=rank.entering, entering=0)
            case wire.Plan():
                for slot in self.slots:
                    self._plan(slot, message)
            case wire.Recall():
                if (share := self.held.get(message.generation)) is not None:
                    self.world.to_core(
                        self, wire.RecallAnswer(job=self.job, element=self.element, agent=self.agent, share=share)
                    )
            case wire.StartRank():
                if message.slot in self.ranks and self.ranks[message.slot].incarnation < message.incarnation:
                    self._relay(message.layout)
                    self.ranks[message.slot] = self.new_rank(message.incarnation)
                    self.status()
            case wire.StopRank():
                rank = self.ranks.get(message.slot)
                if rank is not None and rank.incarnation == message.incarnation:
                    if message.save and self.can_save:
                        self.saved = rank.iteration
                        self.die(message.slot, code=75)
                    elif not message.save:
                        self.die(message.slot)

    def _plan(self, slot: int, plan: wire.Plan) -> None:
        rank = self.ranks[slot]
        if plan.generation <= max(rank.generation, rank.broken):
            return
        if plan.boundary and rank.state == "running":
            self.offers[slot] = plan
        elif slot not in plan.members:
            if rank.state in ("stopped", "running"):
                self._leave(slot, plan)
        elif plan.boundary and rank.state in ("waiting", "standby"):
            self.rested[slot] = rank.state
            self.set(slot, state="entering", entering=plan.generation)
        elif rank.state in ("waiting", "stopped", "standby"):
            before, self.plans[slot] = self.mates(slot), plan
            iteration = plan.iteration if plan.iteration is not None else self.world.iteration(self.job)
            self.set(
                slot,
                state="running",
                generation=plan.generation,
                iteration=iteration,
                phase="computing",
                done=rank.done if rank.iteration == iteration and self._keeps(slot, plan, before) else [],
            )

    def _leave(self, slot: int, plan: wire.Plan) -> None:
        """A plan goes on without the rank. Where it is a part of a replica it keeps what it has."""
        if self.replica > 1:
            self.set(slot, state="standby", broken=max(self.ranks[slot].broken, plan.generation - 1))
        else:
            self.set(slot, state="left", generation=plan.generation)

    def _keeps(self, slot: int, plan: wire.Plan, before: list[int]) -> bool:
        """What is in the gradient stays there: the replica is the same, and is to have it."""
        if slot in plan.joiners:
            return False
        mates = self.mates(slot)
        return self.replica == 1 or (mates == before and set(self.ranks[slot].done) <= set(plan.assignment[mates[0]]))

    def mates(self, slot: int) -> list[int]:
        """The slots of the replica that the rank was in last."""
        plan = self.plans.get(slot)
        if plan is None or slot not in plan.members:
            return [slot]
        return next(one for one in layout.replicas(plan.members, plan.replica) if slot in one)

    def _break(self, slot: int, message: wire.Break) -> None:
        rank, broken = self.ranks[slot], message.generation
        if rank.state == "entering" and rank.entering <= broken:
            joins = slot in self.rested or not rank.generation
            self.set(slot, state=self.rested.get(slot, "waiting") if joins else "stopped", broken=broken, entering=0)
        elif rank.state == "running" and rank.generation <= broken:
            if not set(self.mates(slot)).isdisjoint(message.lost):
                self.set(slot, state="stopped", broken=broken)
            else:
                self.set(slot, broken=broken)
                if self.prompt:
                    self.finish(slot)
        elif rank.state in ("waiting", "stopped", "standby") and rank.broken < broken:
            self.set(slot, broken=broken)

    def finish(self, slot: int, done: list[int] | None = None) -> None:
        """What the rank's replica had begun is done, and it stops at the reduce."""
        rank = self.ranks[slot]
        if rank.state == "running" and rank.broken >= rank.generation:
            self.set(slot, state="stopped", done=rank.done if done is None else done)

    def take_offer(self) -> None:
        """The iteration ends: whoever holds an offer enters it."""
        for slot, plan in list(self.offers.items()):
            rank = self.ranks[slot]
            del self.offers[slot]
            if plan.generation <= max(rank.broken, rank.generation) or rank.state != "running":
                continue
            if slot in plan.members:
                self.plans[slot] = plan
                self.set(slot, state="running", generation=plan.generation, iteration=rank.iteration + 1, done=[])
            else:
                self._leave(slot, plan)
            self.world.let_in(self.job, plan)

    def step(self, slot: int, iteration: int, indices: list[int], computed: list[int] | None = None) -> None:
        self.report(iteration, structs.RankStep(slot, indices, 0.5, 1.0 / (iteration + 1), computed))

    def report(self, iteration: int, rank: structs.RankStep, total: int = MICRO_BATCHES, hold: bool = False) -> None:
        """A step of one of its ranks; hold: the next status takes it along."""
        generation = self.ranks[rank.slot].generation
        report = structs.step_table(generation, iteration, total, self.world.now, [rank], self.next_step())
        if hold:
            self.held_steps.append(report)
        else:
            self.world.to_core(self, wire.Steps(job=self.job, element=self.element, agent=self.agent, tables=[report]))

    def next_step(self) -> int:
        """The number of its next report of a step."""
        self.steps += 1
        return self.steps


class FakeSlurm:
    """A queue and nodes that follow the calls of a SlurmClient at once."""

    def __init__(self, nodes: int) -> None:
        self.node_states = {f"n{i}": {"IDLE"} for i in range(1, nodes + 1)}
        self.reasons: dict[str, str] = {}
        self.starts = dict.fromkeys(self.node_states, 1.0)
        self.node_facts: dict[str, dict[str, Any]] = {}  # fields of NodeInfo that differ from the usual
        self.queue: dict[tuple[str, int], dict] = {}
        self.calls: list[tuple] = []
        self.refuse = ""
        self.site = UNSAID
        self.refuse_down = self.refuse_shrink = self.refuse_requeue = ""
        self.unheard: set[str] = set()
        """Nodes whose slurmd does not answer: what was requeued there is COMPLETING until the node is set down."""
        self.unfit: set[str] = set()
        """Nodes on which Slurm starts nothing that is pinned to them, and what it says of that."""
        self.refusal = "BadConstraints"
        self.failed: set[tuple[str, int]] = set()
        """Elements of which it has heard that their scripts failed, and that are COMPLETING on such a node."""

    def submit(self, job: str, count: int, block: int = 1, **facts: Any) -> None:
        """`facts` are fields of ElementInfo that differ from the usual: partition="main" and so on. block: nodes of an
        element."""
        for element in range(count):
            self.queue[job, element] = {
                "state": "PENDING",
                "node": None,
                "reason": "Resources",
                "admin_comment": "",
                "restarts": 0,
                "pin": None,
                "size": block,
                **facts,
            }
        self.schedule()

    def free(self) -> list[str]:
        used = {n for e in self.queue.values() if e["state"] in ("RUNNING", "COMPLETING") for n in names_of(e["node"])}
        return [n for n, states in self.node_states.items() if states == {"IDLE"} and n not in used]

    def schedule(self) -> None:
        free = dict.fromkeys(self.free())
        for entry in self.queue.values():
            waits = "held" in entry["reason"].lower() or entry["reason"] == "BeginTime"
            names = names_of(entry["pin"]) if entry["pin"] else list(free)[: entry.get("size", 1)]
            enough = len(names) == entry.get("size", 1) and free.keys() >= set(names)
            if entry["state"] == "PENDING" and not waits and entry["pin"] and not self.unfit.isdisjoint(names):
                entry["reason"] = self.refusal
            elif entry["state"] == "PENDING" and not waits and enough and self.unfit.isdisjoint(names):
                for name in names:
                    del free[name]
                entry.update(state="RUNNING", node=",".join(names), reason="")

    def nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(
                name=n,
                states=frozenset(s),
                reason=self.reasons.get(n, ""),
                slurmd_start=self.starts[n],
                gpus=1,
                **{
                    "address": n,
                    "port": "slurmd",
                    "partitions": ("main",),
                    "gres": "gpu:1",
                    **self.node_facts.get(n, {}),
                },
            )
            for n, s in self.node_states.items()
        ]

    def others(self, but: Collection[str] = ()) -> Queue:
        found = [e for e in self.elements() if e.job not in but]
        return Queue(found, len(self.queue))

    def elements(self, jobs: Collection[str] | None = None) -> list[ElementInfo]:
        usual = {"user": "ann", "comment": "", "partition": "main", "priority": 1, "submitted": 1.0, "array": True}
        return [
            ElementInfo(
                job=job,
                element=element,
                slurm_id=f"{job}{element}",
                **{
                    **usual,
                    "name": f"job{job}",
                    **{name: value for name, value in e.items() if name not in ("pin", "size")},
                },
            )
            for (job, element), e in self.queue.items()
            if jobs is None or job in jobs
        ]

    def down(self, node: str, reason: str) -> None:
        if self.refuse_down:
            raise SlurmError(self.refuse_down)
        self.node_states[node], self.reasons[node] = {"DOWN"}, reason
        for key, entry in self.queue.items():
            here = node in names_of(entry["node"])
            if here and key in self.failed:
                entry.update(state="FAILED")
            elif here and entry["state"] in ("RUNNING", "COMPLETING"):
                began = entry["state"] == "RUNNING"  # else it was requeued before
                entry.update(state="PENDING", node=None, reason="BeginTime", restarts=entry["restarts"] + began)
        self.schedule()

    def drain(self, node: str, reason: str) -> None:
        if self.refuse_down:
            raise SlurmError(self.refuse_down)
        self.node_states[node], self.reasons[node] = {"IDLE", "DRAIN"}, reason

    def resume(self, node: str) -> None:
        self.node_states[node] = {"IDLE"}
        self.schedule()

    def requeue(self, job: str, element: int) -> None:
        if self.refuse_requeue:
            raise SlurmError(self.refuse_requeue)
        entry = self.queue[job, element]
        self.failed.discard((job, element))
        if entry["node"] in self.unheard and entry["state"] != "FAILED":
            entry.update(state="COMPLETING", restarts=entry["restarts"] + (entry["state"] == "RUNNING"))
        else:
            entry.update(state="PENDING", node=None, reason="BeginTime", restarts=entry["restarts"] + 1)

    def requeue_hold(self, job: str, element: int, comment: str) -> None:
        entry = self.queue[job, element]
        restarts = entry["restarts"] + (entry["state"] != "PENDING")
        held = "job requeued in held state"
        entry.update(state="PENDING", node=None, reason=held, admin_comment=comment, restarts=restarts)
        self.schedule()

    def shrink(self, job: str, nodes: str) -> None:
        if self.refuse_shrink:
            raise SlurmError(self.refuse_shrink)
        assert set(names_of(nodes)) < set(hosts(self.queue[job, 0]["node"]))
        self.queue[job, 0].update(node=nodes)
        self.schedule()

    def hold(self, job: str, element: int, comment: str) -> None:
        self.queue[job, element].update(reason="JobHeldAdmin", admin_comment=comment)

    def release(self, job: str, element: int, comment: str = "") -> None:
        self.queue[job, element].update(reason="Priority", **({"admin_comment": comment} if comment else {}))
        self.schedule()

    def pin(self, job: str, element: int, node: str | None) -> None:
        entry = self.queue[job, element]
        entry["pin"] = node
        entry["required_nodes"] = frozenset(names_of(node))
        if entry["reason"] == "BadConstraints":  # Slurm looks at it anew
            entry["reason"] = "None"

    def start_now(self, job: str, element: int) -> None:
        if self.queue[job, element]["reason"] == "BeginTime":
            self.queue[job, element]["reason"] = "Priority"
        self.schedule()

    def comment(self, job: str, element: int, text: str) -> None:
        entry = self.queue[job, element]
        entry["admin_comment"] = with_own(entry["admin_comment"], text)

    def cancel(self, job: str, element: int | None = None, comment: str = "") -> None:
        for key, entry in self.queue.items():
            if key[0] == job and element in (None, key[1]):
                entry.update(state="CANCELLED", node=None)


class World:
    """Core, agents, Slurm and a clock."""

    def __init__(self, slurm: FakeSlurm | None = None, observe: bool | None = False, **settings: Any) -> None:
        """observe: the mode of partitions that have none of their own; None leaves it to the defaults."""
        self.now = clock.START
        usual = {"auth": "none", "forming_settle_seconds": 2.0, "slurm_poll_seconds": 1.0}
        partitions = settings.pop("partitions", {"default": PartitionConfig(max_weight=100.0)})
        default = partitions.get("default", PartitionConfig())
        if default.mode is None and observe is not None:
            default = replace(default, mode="observe" if observe else "act")
        self.config = ControllerConfig(**{**usual, **settings}, partitions={**partitions, "default": default})
        self.slurm = slurm
        self.core = Core(self.config, ClusterState(), self.now, has_slurm=slurm is not None)
        self.agents: list[FakeAgent] = []
        self.log: list[Event] = []
        self.sent: list[tuple[str, wire.Message]] = []
        self.dead_nodes: set[str] = set()
        self.refusing: set[str] = set()
        """Nodes at which nobody listens any more, and whose kernel says so."""
        self.pair_tests: list[TestPairs] = []
        self.cuts: set[frozenset[str]] = set()
        """Pairs of nodes that cannot reach each other; "" is the controller's."""
        self._busy = False
        self._reading = False

    def restart(self) -> None:
        """The controller is gone, and another one starts from its log."""
        state = replay(self.log)
        self.core = Core(self.config, state, self.now, Classifier(), has_slurm=self.slurm is not None)

    def job(self, job: str = "1") -> JobState:
        return self.core.state.jobs[job]

    def iteration(self, job: str) -> int:
        running = [r.iteration for a in self.agents if a.job == job for r in a.ranks.values() if r.state == "running"]
        return max(running, default=0)

    def let_in(self, job: str, plan: wire.Plan) -> None:
        """Joiners get in when everyone else is."""
        ranks = {
            slot: (a, rank) for a in self.agents if a.job == job and not a.silent for slot, rank in a.ranks.items()
        }
        if set(plan.members) <= set(ranks) and all(
            ranks[s][1].generation == plan.generation or ranks[s][1].entering == plan.generation for s in plan.members
        ):
            for slot in plan.joiners:
                agent, rank = ranks[slot]
                if rank.state == "entering":
                    agent.plans[slot] = plan
                    agent.rested.pop(slot, None)
                    agent.set(
                        slot, state="running", generation=plan.generation, entering=0, iteration=self.iteration(job)
                    )

    def to_core(self, agent: FakeAgent, message: wire.Message) -> None:
        self.core.receive(agent.route, message, self.now, asker=agent.asker)
        if not self._reading:
            self._settle()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What comes in here the server reads before the core goes on."""
        self._reading = True
        yield
        self._reading = False
        self._settle()

    def _settle(self) -> None:
        self.core.advance_jobs()
        self.deliver()

    def deliver(self) -> None:
        """What the server does after each turn, until nothing is left. Each agent gets its messages in their order."""
        if self._busy:
            return
        self._busy = True
        core = self.core
        while core.events or core.outbox or core.requests or core.pending:
            if not core.outbox:
                core.advance_jobs()
            self.log += core.events
            core.events = []
            outbox, core.outbox = core.outbox, []
            requests, core.requests = core.requests, []
            by_route = {agent.route: agent for agent in self.agents} if outbox else {}
            for send in outbox:
                self.sent.append((send.route[0].decode(), send.message))
                if send.route in by_route:
                    by_route[send.route].get(send.message)
            for request in requests:
                self._perform(request)
        self._busy = False

    def _perform(self, request: Any) -> None:
        core = self.core
        match request:
            case Probe():
                for place, target in enumerate(request.targets):
                    if target:
                        core.on_probe(request, place, self.answer("", target))
            case Knock():
                core.on_knock(request, self.answer("", request.address))
            case TestPairs():
                self.pair_tests.append(request)  # the test itself answers
            case Poll():
                if self.slurm.refuse:
                    core.on_slurm_error(self.slurm.refuse)
                else:
                    core.on_listing(self.slurm.nodes(), self.slurm.elements(), self.slurm.site)
            case Run():
                for action in request.actions:
                    self.slurm.calls.append((action.action, action.job, action.element, action.node))
                    try:
                        perform(self.slurm, action)
                    except SlurmError as error:
                        core.on_action(action, str(error))
                    else:
                        core.on_action(action, "")
                core.on_actions_done(request.urgent)
        self.deliver()

    def answer(self, witness: str, target: str) -> Reach:
        """What a node, or the controller (""), finds at "node:agent" (a door) or "node:slurmd"."""
        if not target:
            return Reach.UNKNOWN
        node, _, port = target.partition(":")
        if node in self.dead_nodes or frozenset((witness, node)) in self.cuts:
            return Reach.SILENT
        if node in self.refusing:
            return Reach.REFUSED
        if port == "slurmd":
            return Reach.REACHED
        agent = next((agent for agent in self.agents if agent.agent == port), None)
        if agent is not None and (agent.cut or not agent.silent):
            return Reach.REACHED
        gone = agent is None or agent.killed or self.slurm is not None
        return Reach.REFUSED if gone else Reach.SILENT  # without Slurm a silent agent is a lost node

    def run(self, seconds: float, heartbeats: bool = True) -> None:
        """Time passes; living agents send their heartbeats. In long spans the controller has a look less often."""
        turns, step = round(seconds / 0.05), 0.05
        if seconds > 2.0:
            turns //= 8 if seconds > 10.0 else 5 if seconds > 5.0 else 2
            step = seconds / turns
        for turn in range(turns):
            self.now += step
            if heartbeats and turn % round(0.5 / step) == 0:
                with self.at_once():
                    for agent in list(self.agents):
                        agent.status()
            self.core.tick(self.now)
            self.deliver()

    def start_job(self, job: str = "1", nodes: int = 3, ranks: int = 1, **settings) -> list[FakeAgent]:
        """A job that trains."""
        agents = [FakeAgent(self, job, e, f"n{e + 1}", ranks, nodes=nodes, **settings) for e in range(nodes)]
        for agent in agents:
            agent.register()
            agent.ready()
        self.run(0.3)
        return agents

    def iterate(self, job: str, iteration: int) -> None:
        """All members train one iteration, report it and begin the next."""
        members = self.job(job).order
        agents = {slot: a for a in self.agents if a.job == job and not a.silent for slot in a.slots}
        lanes = agents[members[0]].shape.lanes if members else 1
        shares = deal(range(MICRO_BATCHES), layout.heads(members, self.job(job).replica), lanes)
        for slot in members:
            agents[slot].step(slot, iteration, shares.get(slot, []))
            agents[slot].set(slot, iteration=iteration + 1, done=[])

    def kinds(self, job: str = "1") -> list[str]:
        quiet = (
            "ranks_ready",
            "agent_registered",
            "job_registered",
            "step",
            "allotted",
            "replanned",
            "slurm_action",
            "unpinned",
            "slurm_done",
        )
        return [event.kind for event in self.log if event.job == job and event.kind not in quiet]

    def check_replay(self) -> None:
        """The log gives the live state back, and so does the thinned one."""
        assert replay(self.log) == self.core.state
        gone = set(redundant((event.id, event.job, event.kind) for event in self.log))
        assert replay(event for event in self.log if event.id not in gone) == self.core.state
