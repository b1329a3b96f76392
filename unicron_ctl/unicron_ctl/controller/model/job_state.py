"""The durable record of one job; only the rules of `model.fold` change it."""

from __future__ import annotations

import enum
import math
import operator
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from unicron_ctl.controller.model import healing_modes as modes
from unicron_ctl.controller.model.healing_modes import Mode
from unicron_ctl.shared.log.records import FailureDetected
from unicron_ctl.shared.log.thinning import RECENT_STEPS
from unicron_ctl.shared.protocol.structs import RESTART, Settings
from unicron_ctl.shared.protocol.wire import Plan
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_transition.generations.layout import replicas

FAILURES_KEPT = 100
DECISIONS_KEPT = 50
AFTER_END_SECONDS = 30.0  # a later start after the job's end means that the job is wanted again
WITH_BLOCK = "ended with its block"
AGENT_DIED, NODE_ENDED = "agent died", "node ended"  # values of `gone`: it died, and then its node ended, too
MAY_LIVE = ("silent", AGENT_DIED, NODE_ENDED)  # ends of an agent whose ranks may live until `quorum` shows their end
# The values of `gone` that explain an agent's end; of an agent that left by itself it is the agent's own reason.
CERTAIN_ENDS = ("", "finished", "taken away", "put aside", "dead", "silent", NODE_ENDED, WITH_BLOCK)


class Phase(enum.StrEnum):
    """The phases of a job."""

    FORMING = "forming"  # no generation yet: its ranks prepare themselves
    ENTERING = "entering"  # a plan is out; not all of its members are in yet
    RUNNING = "running"
    OFFERING = "offering"  # it trains on; a boundary plan with other members is out
    BREAKING = "breaking"  # its generations are over; survivors stop and report
    ENDED = "ended"


class Identity(NamedTuple):
    """The process in a slot."""

    agent: str
    incarnation: int
    """The number of the process under that agent."""


@dataclass(slots=True)
class SlotState:
    """One slot's processes."""

    wanted: int = 0
    """The incarnation that should be alive."""
    not_before: float = 0.0
    """When it may start."""
    why: str = ""
    """Why it starts."""
    ready: Identity | None = None
    """The last process that could enter a generation."""
    exit_seen: Identity | None = None
    """The last process whose end has been handled."""
    noted: float = 0.0
    """The time of the last note on record."""


NO_SLOT = SlotState()  # of a slot without records; never changed


@dataclass
class AgentRecord:
    """The last agent of an element."""

    agent: str
    node: str
    address: str
    slots: list[int]
    gone: str = ""
    door: str = ""
    """host:port at which others see that it lives."""
    key: str = ""
    """Its CURVE public key, which authenticates its messages."""
    peer: str = ""
    """host:port where other agents of the job reach it, empty if they cannot."""
    peer_key: str = ""
    """Its key for other agents, which it has also without encryption."""
    confirmed: bool = True
    """Slurm has shown the element at work on this node."""
    tries: int = 0
    """Requests to Slurm to start its element again."""
    noticed: bool = False
    """Slurm has asked its element to end."""
    restarts: int = -1
    """Slurm's requeues of its element when it came; -1 if unknown."""

    @property
    def ended_early(self) -> bool:
        """Whether the agent died, or left before its ranks had finished, and its node's state is unknown."""
        return self.gone not in CERTAIN_ENDS

    @property
    def lost(self) -> bool:
        """Whether the agent was lost with its node: it fell silent, or it died and its node ended after it."""
        return self.gone in ("dead", "silent", NODE_ENDED)


@dataclass(frozen=True)
class AvoidedNode:
    """A node that the job has left."""

    at: float
    reason: str
    agent: str
    """The one that had to go, empty if it need not any more."""
    suspect: bool
    """The node may be at fault."""


@dataclass(frozen=True)
class RefusedNode:
    """A node on which Slurm has not started an element that was told to start there."""

    until: float
    """When it may be tried again, in seconds since the epoch."""
    said: str
    """Slurm's reason."""


@dataclass
class Failure:
    """One failure with its story. Times in seconds since the epoch, None if it has not happened."""

    id: int
    job: str
    detected_at: float
    record: FailureDetected
    """The record in the log, with the changes of later verdicts."""
    iteration: int | None = None
    """The iteration with which the job went on."""
    generation: int | None = None
    broken_at: float | None = None
    planned_at: float | None = None
    resumed_at: float | None = None
    stepped_at: float | None = None
    restored_at: float | None = None
    whole_at: float | None = None
    """When as many ranks as wanted trained again, or exactly the lost ones."""
    reused_micro_batches: int = 0
    recomputed_micro_batches: int = 0
    redistributed_micro_batches: int = 0
    actions: list[str] = field(default_factory=list)
    slurm: str = ""
    healed: bool = False
    """The job has trained again after it, and that is on record."""

    @property
    def slot(self) -> int | None:
        """The first of its slots."""
        return self.record.slots[0] if self.record.slots else None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A decision, for `unicronctl explain`."""

    time: float
    kind: str
    generation: int
    reason: str


@dataclass(frozen=True)
class Unsound:
    """States that were found to be wrong: those of iterations after `sound`, up to `until`. Some of them may still be
    in a node's memory."""

    until: int
    sound: int
    verified: bool
    """An audit has found the state of `sound` to be right; otherwise it is only older than the first that can be
    wrong."""


@dataclass(frozen=True)
class Ending:
    """The end of a job."""

    code: int
    reason: str
    time: float
    disowned: bool = False
    """Slurm shows no such job, or another user's; its processes run on without the controller."""


def owner(uid: int | None, user: str) -> str:
    """A user's key: the id if it is proven, else the name."""
    return f"uid {uid}" if uid is not None else user


Voter = tuple[int, str]
"""An element, and its agent."""


class Swap(NamedTuple):
    """An element whose node is a suspect, and that leaves when spares take its place."""

    element: int
    agent: str
    along: tuple[int, ...]
    """Elements that leave with it: they make a replica or a block with it, and are spares afterwards."""
    reason: str

    @property
    def elements(self) -> frozenset[int]:
        """All elements that leave."""
        return frozenset((self.element, *self.along))


class Voting(NamedTuple):
    """The agents that have a vote on how a job goes on."""

    groups: tuple[frozenset[Voter], ...] = ()
    """The voters of each generation that may still run."""
    everybody: frozenset[Voter] = frozenset()
    """All of them, and the newcomers of an offer."""


class _Memberships:
    """Facts that follow from a job's members. They are kept until these are replaced, and are no part of the record: a
    saved state does not hold them."""

    _inside: tuple[Mapping[int, Identity], frozenset[int]] = ({}, frozenset())
    _group: tuple[Mapping[int, Identity], dict[int, str]] = ({}, {})
    _voting: tuple[tuple[object, ...], Voting] = ((), Voting())


@dataclass
class JobState(_Memberships):
    """One job."""

    job: str
    settings: Settings
    registered_at: float
    """When its training began; it names the job's snapshots in memory."""
    phase: Phase = Phase.FORMING
    since: float = 0.0
    generation: int = 0
    """The highest number ever used."""
    plan: Plan | None = None
    """The generation that its members are in or enter."""
    offer: Plan | None = None
    """The boundary plan that is outstanding."""
    members: dict[int, Identity] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """The members, replica-major (`generations.layout`); newcomers of a broken offer come last."""
    joining: dict[int, Identity] = field(default_factory=dict)
    former: list[dict[int, str]] = field(default_factory=list)
    """Agents by element, of generations in which some may still be, because not all have entered a later plan."""
    world: dict[int, str] = field(default_factory=dict)
    """Restart mode: the agents of the last plan's members, by element, also after it is over."""
    unfenced: list[int] = field(default_factory=list)
    """Restart mode: its elements whose processes nothing ends if they are cut off; all until it is entered."""
    broken: int = 0
    why: str = ""
    lost: dict[int, Identity] = field(default_factory=dict)
    """Members that the present Break leaves out."""
    condemned: dict[int, str] = field(default_factory=dict)
    """Members that a failure leaves out, with the reason; the next Break names them."""
    regroup: str = ""
    """Why a new generation is needed without a loss."""
    parted: dict[int, str] = field(default_factory=dict)
    """Elements that take no part because they and others do not reach each other -> their agents."""
    fatal: tuple[int, str] | None = None
    """A failure ends the job: exit code and reason."""
    banished: dict[int, Identity] = field(default_factory=dict)
    """slot -> the last process of it that was declared lost."""
    superseded: dict[str, str] = field(default_factory=dict)
    """Agents whose element another agent has taken -> their node."""
    nodes: list[str] = field(default_factory=list)
    """The nodes of a job that is one allocation of several: the node of each element."""
    nodes_of_restart: int = 0
    """Slurm's requeues of the job when it gave it these nodes."""
    shrunk: int = 0
    """Number of times that Slurm has taken nodes out of that allocation for the plan."""
    unshrinkable: str = ""
    """Why Slurm refused to do so."""
    unrequeueable: str = ""
    """Why Slurm refused to requeue that allocation."""
    agents: dict[int, AgentRecord] = field(default_factory=dict)
    avoid: dict[str, AvoidedNode] = field(default_factory=dict)
    """node -> why the job's elements must not start there."""
    refused: dict[str, RefusedNode] = field(default_factory=dict)
    requeued: dict[int, float] = field(default_factory=dict)
    """Slurm's element -> when Slurm was asked to start it again; until its next agents are there."""
    slots: dict[int, SlotState] = field(default_factory=dict)
    allotted: list[int] | None = None
    leaving: list[int] = field(default_factory=list)
    noticed: dict[int, str] = field(default_factory=dict)
    """Elements that will end soon by their agents' notice -> these agents: they leave at the next boundary."""
    swap: Swap | None = None
    """The suspect that a spare is to replace."""
    failures: deque[Failure] = field(default_factory=lambda: deque(maxlen=FAILURES_KEPT))
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=DECISIONS_KEPT))
    iteration: int = -1
    iterations_wanted: int = 0
    loss: float | None = None
    nan_since: int = -1
    """The first of the last iterations whose loss is not finite; -1 while it is."""
    recent: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """(nodes, seconds, FLOP) of the last iterations."""
    measured: dict[int, float] = field(default_factory=dict)
    """FLOP/s by number of nodes."""
    trained: float = 0.0
    """Seconds that were not lost, of the generations before the last one that has stepped."""
    lost_seconds: float = 0.0
    """Seconds between the last step of a generation and the first of the next one, and of iterations made again;
    before the first step, since the first failure."""
    unsound_seconds: float = 0.0
    """Seconds of iterations without a finite loss, and of trying iterations again that were no step at first."""
    lost_before: float = 0.0
    """Seconds that had been lost up to the last failure that was healed."""
    stepping_since: float = 0.0
    """When the first iteration of the generation `stepped_in` began; 0 before."""
    stepped: float = 0.0
    """When its last iteration ended; 0 before."""
    stepped_in: int = 0
    """The last generation that has stepped."""
    worked: dict[int, Identity] = field(default_factory=dict)
    """The processes that have finished an iteration."""
    tries: int = 0
    """Time-outs of entering in a row."""
    unsound: Unsound | None = None
    """Until the job has trained past them."""
    began: int = -1
    """The iteration with which its first generation began; -1 before."""
    restored: int = -1
    """The iteration of the state from which it was formed last; -1 before."""
    advanced: bool = False
    """Its ranks have made an iteration since."""
    fruitless: int = 0
    """Times in a row that it was formed from that state and ended without a sound iteration, each time with the same
    cause."""
    fruitless_cause: str = ""
    ended: Ending | None = None
    ledger_violations: int = 0
    restarts: int = 0
    """Restart mode: losses in a row."""
    steady: int = 0
    """Restart mode: the last generation that has proved itself."""
    reached: int = -1
    """Restart mode: the newest iteration whose state the worlds that are over have saved."""
    step: int = 0
    """The Slurm step that trains."""
    requeues: int = 0
    """Slurm's requeues of the whole job when its agents were started."""
    runs: dict[int, float] = field(default_factory=dict)
    """step -> when its training began, of steps that a requeue broke off: their snapshots in memory are theirs
    again."""
    trains: bool = True
    """The step's command may train; else a later one takes its place."""
    waits: str = ""
    """Why no time limit ends the present phase."""
    uid: int | None = None
    """Its owner's user id, if proven."""
    submitted: float = 0.0
    """When, as Slurm shows it; 0 while Slurm has not confirmed the job."""
    set_aside: str = ""
    """Why the controller leaves this job alone; its ranks train on."""
    sweep: bool = False
    """Whether it is set aside because its elements are separate runs."""
    layout: str = ""
    """The layout in which its ranks are started, if it has stated any."""
    relayout: str = ""
    """The layout in which all of them will start again."""
    laid_out: int = 0
    """The highest generation of the layouts before this one, whose images are of no use; 0 if there was none."""
    relayout_why: str = ""
    saving_until: float = 0.0
    """Until when ranks that end for that may save their state."""
    measured_before: dict[str, dict[int, float]] = field(default_factory=dict)
    """`measured` in earlier layouts."""

    def begin_phase(self, phase: Phase, now: float) -> None:
        """Begins a phase; only the fold calls this. A Break with more losses does not begin its phase anew."""
        if not (phase is self.phase is Phase.BREAKING):
            self.phase, self.since, self.waits = phase, now, ""

    @property
    def by_layout(self) -> dict[str, dict[int, float]]:
        """FLOP/s by layout and number of nodes."""
        return {**self.measured_before, self.layout: self.measured}

    @property
    def mode(self) -> Mode:
        """The mode of healing."""
        return modes.RESTART if self.settings.mode == RESTART else modes.SESSION

    @property
    def replica(self) -> int:
        """Ranks of a replica, as planned."""
        return self.plan.replica if self.plan is not None else 1

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return max(1, self.settings.ranks_per_node)

    def unit(self, replica: int) -> int:
        """The fewest nodes that hold whole replicas of `replica` ranks, and whole blocks."""
        return math.lcm(replica, self.per_node * self.settings.block) // self.per_node

    def elements_wanted(self, replica: int) -> int:
        """Elements that train when all are there: all but the spares, in whole replicas of `replica` ranks.

        All elements if these would be fewer than the job needs: a wrong number of spares ends no job.
        """
        settings, unit = self.settings, self.unit(replica)
        if not settings.spares:
            return settings.max_nodes
        least = max(settings.min_nodes, unit)
        count = max(settings.max_nodes - settings.spares, min(least, settings.max_nodes))
        whole = count - count % unit
        return whole if whole >= least else settings.max_nodes

    @property
    def least(self) -> int:
        """The fewest nodes with which the job may form if there are no more. A job that has trained goes on with any
        number, unless it is a plain script, whose world must not be smaller."""
        if self.mode.keeps_state and self.generation:
            return 1
        return min(self.settings.min_nodes, self.settings.max_nodes)

    @property
    def owner(self) -> str:
        """The key of its owner, for limits of a user."""
        return owner(self.uid, self.settings.user)

    @property
    def newest_sound(self) -> int | None:
        """The newest iteration from which it may be formed; None if any will do."""
        return None if self.unsound is None else max(self.unsound.sound, self.iteration + 1)

    @property
    def disowned(self) -> bool:
        """Whether the job was never Slurm's job of this id."""
        return self.ended is not None and self.ended.disowned

    @property
    def over(self) -> bool:
        """Whether nothing is decided about it any more."""
        return self.ended is not None or bool(self.set_aside)

    def id_reused(self, info: ElementInfo | None) -> bool:
        """Whether Slurm shows another job under this id, or the same one requeued after its end.

        SubmitTime distinguishes two jobs. Slurm sets it anew when it requeues an element, so only elements that were
        never requeued count.
        """
        if self.disowned or info is None:
            return self.disowned
        others = self.uid is not None and info.uid != self.uid
        later = bool(self.submitted) and not info.restarts and info.submitted > self.submitted + 1.0
        again = self.ended is not None and info.submitted > self.ended.time + AFTER_END_SECONDS
        return others or later or again

    def slot(self, slot: int) -> SlotState:
        """The state of a slot; reading adds nothing."""
        return self.slots.get(slot, NO_SLOT)

    def element(self, slot: int) -> int:
        return slot // max(1, self.settings.ranks_per_node)

    def block_of(self, element: int) -> int:
        """Slurm's own number of the block with this element."""
        return element // self.settings.block

    def label(self, element: int) -> str:
        """Slurm's name of the block with this element."""
        return f"{self.job}_{self.block_of(element)}"

    def mates(self, element: int) -> range:
        """The elements of its block, itself included."""
        return self.nodes_of_block(self.block_of(element))

    def nodes_of_block(self, block: int) -> range:
        """The elements of a block."""
        return range(block * self.settings.block, (block + 1) * self.settings.block)

    def torn(self, element: int) -> bool:
        """Whether its block has lost or has to leave another of its nodes, so that Slurm ends all of it."""
        others = (self.agents.get(mate) for mate in self.mates(element) if mate != element)
        return any(one is not None and (one.gone not in ("", "finished") or self._leaves(one)) for one in others)

    def agents_of(self, members: Mapping[int, Identity]) -> dict[int, str]:
        """The agents of these members, by element."""
        if members is self._group[0]:
            return self._group[1]
        per_node = self.per_node
        found = {slot // per_node: who.agent for slot, who in members.items()}
        if members is self.members:
            self._group = members, found
        return found

    @property
    def voting(self) -> Voting:
        """The voters; computed once per membership."""
        key = self.former, self.members, self.joining, self.offer
        if len(self._voting[0]) == len(key) and all(map(operator.is_, key, self._voting[0])):
            return self._voting[1]
        groups = [*self.former, self.agents_of(self.members)]
        if self.offer is not None:
            inside = set(self.offer.members)
            offered = {slot: who for slot, who in {**self.members, **self.joining}.items() if slot in inside}
            groups.append(self.agents_of(offered))
        voters = tuple(frozenset(group.items()) for group in groups)
        found = Voting(voters, frozenset().union(*voters, self.agents_of(self.joining).items()))
        self._voting = key, found
        return found

    def elements(self, slots: Iterable[int]) -> list[int]:
        per_node = self.per_node
        return sorted({slot // per_node for slot in slots})

    @property
    def inside(self) -> frozenset[int]:
        """Elements with a member; computed once per membership."""
        if self._inside[0] is not self.members:
            self._inside = self.members, frozenset(self.elements(self.members))
        return self._inside[1]

    def node(self, slot: int) -> str:
        record = self.agents.get(self.element(slot))
        return record.node if record else ""

    @property
    def departing(self) -> set[int]:
        """Elements that leave at the next boundary: the plan takes them away, or they will end."""
        return {*self.leaving, *(mate for element in self.noticed for mate in self.mates(element))}

    def was_noticed(self, element: int) -> bool:
        """Whether the element, or another node of its block, was asked to end, and has no new agent since."""
        return any(mate in self.agents and self.agents[mate].noticed for mate in self.mates(element))

    def gives_back(self, element: int) -> bool:
        """Whether the plan takes the element's node out of the job's allocation, and the others go on without it."""
        if not self.settings.allocation or self.allotted is None or element in (*self.allotted, *self.leaving):
            return False
        return element not in self.inside and element not in self.elements(self.joining)

    def moves(self, element: int) -> bool:
        """Whether the element's agent has to leave its node."""
        record = self.agents.get(element)
        return record is not None and self._leaves(record)

    def _leaves(self, record: AgentRecord) -> bool:
        mark = self.avoid.get(record.node)
        return mark is not None and mark.agent == record.agent

    def survivors(self) -> list[int]:
        """Members that the present Break does not leave out."""
        return [slot for slot in self.members if slot not in self.lost]

    def groups(self) -> list[list[int]]:
        """The members by replicas; all in one group if these are unknown."""
        whole = len(self.order) % self.replica == 0
        return replicas(self.order, self.replica) if whole else [self.order]

    def hit(self, blocked: Collection[int] = ()) -> frozenset[int]:
        """Members whose replica has lost a rank: they stop at once, all others finish what they have begun. blocked:
        ranks that have stopped at a point where their replica cannot finish without them."""
        gone = self.lost.keys() | set(blocked)
        if self.replica == 1 or not gone:
            return frozenset(gone)
        return frozenset(slot for one in self.groups() if not gone.isdisjoint(one) for slot in one)

    def failure(self, number: int) -> Failure | None:
        return next((failure for failure in reversed(self.failures) if failure.id == number), None)

    @property
    def goodput(self) -> float | None:
        """The share that was not lost of the time from the first step, or an earlier failure, to the last step; None
        before the first step."""
        whole = self.trained_seconds + self.all_lost_seconds
        return self.trained_seconds / whole if whole > 0.0 else None

    @property
    def trained_seconds(self) -> float:
        """Seconds from the first step to the last one that were not lost."""
        return max(0.0, self.stepping_seconds - self.unsound_seconds)

    @property
    def stepping_seconds(self) -> float:
        """Seconds of all iterations, unsound ones included, but for what failures have cost."""
        return self.trained + self.stepped - self.stepping_since

    @property
    def all_lost_seconds(self) -> float:
        """Seconds that were lost by failures and by unsound iterations."""
        return self.lost_seconds + min(self.unsound_seconds, self.stepping_seconds)

    @property
    def seconds(self) -> float | None:
        """The median iteration time of the last steps at the present node count."""
        times = [seconds for count, seconds, _ in self.recent if count == len(self.inside)]
        return statistics.median(times) if times else None
