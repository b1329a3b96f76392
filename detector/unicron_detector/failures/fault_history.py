"""The faults of jobs and nodes so far, and what was decided about them.

:class:`History` is a fold over recorded faults and outcomes, so a restarted controller gets the same one back by
replaying its event log.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from unicron_detector.failures.escalation_table import RUNNING, TABLE, Event, State
from unicron_detector.failures.severity import Severity

WHOLE_JOB = -1  # the slot of a fault of which no rank, and so no node, can be named
BLAMING = ("hardware", "network")  # scopes that may blame a node; the network's only where the node flaps
FAULTS_KEPT, RECENT_KEPT = 64, 1000  # of a slot or a node; of a job, at least


@dataclass(frozen=True)
class Policy:
    """The limits, with their reasons. Seconds unless said otherwise.

    window: the same fault within it escalates (30 min: as between two checkpoints, longer than any repair).
    quick_seconds, quick_deaths: a rank that dies this early and often before an iteration has a bug or a bad node.
    own_bug_nodes: on so many nodes the node cannot be the reason. stuck_faults: so many faults of one slot without one
    iteration of the job in between are a bug too. storage_patience: a file system that is away this long without an
    iteration ends the job; sooner it is waited for. flap_window, flap_faults: a node with so many faults that are not
    the application's is left. shared_seconds, shared_nodes: so many nodes with a network fault at once are the
    network's matter. moment: faults closer together than this are one moment: a node's ranks fail together. backoff,
    backoff_limit: waiting time before an action is repeated; doubles.
    """

    window: float = 1800.0
    quick_seconds: float = 120.0
    quick_deaths: int = 3
    own_bug_nodes: int = 2
    stuck_faults: int = 8
    storage_patience: float = 3600.0
    flap_window: float = 86400.0
    flap_faults: int = 3
    shared_seconds: float = 30.0
    shared_nodes: int = 3
    moment: float = 10.0
    backoff: float = 1.0
    backoff_limit: float = 60.0


@dataclass(frozen=True)
class Fault:
    """One recorded fault. ``uptime``: seconds since the rank's process started, None if unknown. ``worked``: it had
    finished an iteration since then."""

    time: float
    job: str
    slot: int
    node: str
    cause: str
    scope: str
    severity: Severity
    uptime: float | None = None
    worked: bool = True


@dataclass(frozen=True)
class Decision:
    """What to do now. ``wait_seconds``: how long to hold the action back (repeated faults back off)."""

    severity: Severity
    action: str
    reason: str
    cause: str = ""
    event: Event = Event.FAULT3
    state: State = State.HEALTHY
    wait_seconds: float = 0.0


Slots = set[int]


@dataclass
class Recent:
    """The newest faults in the order in which they came, those of the network apart: where thousands of ranks fail at
    once each asks for what is near it in time."""

    network: list[Fault] = field(default_factory=list)
    others: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        faults = self.network if fault.scope == "network" else self.others
        faults.append(fault)
        if len(faults) >= 2 * RECENT_KEPT:
            del faults[:-RECENT_KEPT]


def near(faults: list[Fault], at: float, seconds: float) -> Iterator[Fault]:
    """The faults that are at most `seconds` from `at`; they are given in order of time."""
    first = bisect.bisect_left(faults, at - seconds, key=operator.attrgetter("time"))
    for index in range(first, len(faults)):
        if faults[index].time > at + seconds:
            return
        yield faults[index]


@dataclass
class Stuck:
    """The faults of a job since it last finished an iteration. slots: each slot's last ones. quick: nodes on which
    ranks died soon after their start. starts: by cause, nodes on which processes ended that had not finished an
    iteration. storage: when the first fault of storage was seen, None without one."""

    slots: dict[int, deque[Fault]] = field(default_factory=dict)
    quick: set[str] = field(default_factory=set)
    starts: dict[str, set[str]] = field(default_factory=dict)
    storage: float | None = None

    def add(self, fault: Fault, policy: Policy) -> None:
        self.slots.setdefault(fault.slot, deque(maxlen=FAULTS_KEPT)).append(fault)
        if is_quick(fault, policy):
            self.quick.add(fault.node)
        if at_start(fault):
            self.starts.setdefault(fault.cause, set()).add(fault.node)
        if fault.scope == "storage" and self.storage is None:
            self.storage = fault.time


@dataclass
class History:
    """What happened so far; grows by ``record``, ``recovered``, ``set`` only. Times in seconds, any epoch."""

    policy: Policy = field(default_factory=Policy)
    states: dict[tuple[str, int], State] = field(default_factory=dict)
    last: dict[tuple[str, int], float] = field(default_factory=dict)
    of_job: dict[str, Slots] = field(default_factory=dict)
    by_slot: dict[tuple[str, int], deque[Fault]] = field(default_factory=dict)
    by_node: dict[str, deque[Fault]] = field(default_factory=dict)
    since_progress: dict[str, Stuck] = field(default_factory=dict)
    recent: Recent = field(default_factory=Recent)
    # What is done with a job follows from its own faults only: no user's processes move another's job. So both again,
    # by job; those of all jobs are for what admins are shown.
    node_of_job: dict[str, dict[str, deque[Fault]]] = field(default_factory=dict)
    recent_of_job: dict[str, Recent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._acting: dict[str, Slots] = {}  # follows from `states`, so no snapshot holds it
        for (job, slot), state in self.states.items():
            self._note_action(job, slot, state)

    def state(self, job: str, slot: int, now: float) -> State:
        """The slot's state, probation that has run out taken into account."""
        key = (job, slot)
        state = self.states.get(key, State.HEALTHY)
        if now - self.last.get(key, now) > self.policy.window:
            state = TABLE[state][Event.QUIET][0]
        return state

    def acting(self, job: str) -> list[int]:
        """The slots of the job for which an action runs, in order."""
        return sorted(self._acting.get(job, ()))

    def set(self, job: str, slot: int, state: State, now: float) -> None:
        """An action runs for the slot from now on."""
        self.states[(job, slot)] = state
        self.last[(job, slot)] = now
        self.of_job.setdefault(job, set()).add(slot)
        self._note_action(job, slot, state)

    def _note_action(self, job: str, slot: int, state: State) -> None:
        if state in RUNNING:
            self._acting.setdefault(job, set()).add(slot)
        elif job in self._acting:
            self._acting[job].discard(slot)

    def record(self, fault: Fault, decision: Decision) -> None:
        """Takes a fault and what was decided about it into the history."""
        key = (fault.job, fault.slot)
        self.set(fault.job, fault.slot, decision.state, fault.time)
        self.by_slot.setdefault(key, deque(maxlen=FAULTS_KEPT)).append(fault)
        if fault.node:
            self.by_node.setdefault(fault.node, deque(maxlen=FAULTS_KEPT)).append(fault)
            own = self.node_of_job.setdefault(fault.job, {})
            own.setdefault(fault.node, deque(maxlen=FAULTS_KEPT)).append(fault)
        self.since_progress.setdefault(fault.job, Stuck()).add(fault, self.policy)
        self.recent.add(fault)
        self.recent_of_job.setdefault(fault.job, Recent()).add(fault)

    def recovered(self, job: str, slot: int, now: float) -> State:
        """The slot took part in a finished iteration after its action."""
        key = (job, slot)
        if key in self.states:
            self.states[key] = TABLE[self.state(job, slot, now)][Event.RECOVERED][0]
            self._note_action(job, slot, self.states[key])
        return self.states.get(key, State.HEALTHY)

    def progressed(self, job: str) -> None:
        """The job finished an iteration: what failed before did not keep it from working."""
        self.since_progress.pop(job, None)

    def forget_job(self, job: str) -> None:
        """The job is over. What its faults said about nodes stays, for admins to see."""
        for of_job in (self.since_progress, self.node_of_job, self.recent_of_job, self._acting):
            of_job.pop(job, None)
        for slot in self.of_job.pop(job, ()):
            for memory in (self.by_slot, self.states, self.last):
                memory.pop((job, slot), None)

    def readmitted(self, node: str) -> None:
        """The node was repaired and has passed its admission test: its past no longer counts."""
        self.by_node.pop(node, None)
        for nodes in self.node_of_job.values():
            nodes.pop(node, None)

    def same_cause(self, job: str, slot: int, cause: str, now: float) -> int:
        """How often the cause was seen on the slot within the window, and not on other nodes of the job as well."""
        faults = self.by_slot.get((job, slot), ())
        within = [fault for fault in faults if fault.cause == cause and now - fault.time <= self.policy.window]
        return sum(not self._struck_others(fault) for fault in within)

    def _struck_others(self, fault: Fault) -> bool:
        """What nobody's node is known for has struck several nodes of the job at once: as when all ranks are killed."""
        if fault.scope != "unknown":
            return False
        around = near(self._of_job(fault.job).others, fault.time, self.policy.moment)
        return any(other.node != fault.node and other.cause == fault.cause for other in around)

    def _of_job(self, job: str) -> Recent:
        return self.recent_of_job.get(job) or Recent()

    def node_moments(self, node: str, now: float, new: Fault | None = None) -> int:
        """How many separate moments of own faults the node had within the flap window: of all jobs, or, with a new
        one, of this fault's job. Faults of applications, and network faults that something else explains, do not
        count."""
        known = self.node_of_job.get(new.job, {}) if new else self.by_node
        own = [fault for fault in known.get(node, ()) if now - fault.time <= self.policy.flap_window]
        own += [new] if new else []
        recent = self._of_job(new.job) if new else self.recent
        times = [fault.time for fault in own if fault.scope in BLAMING and not self._elsewhere(fault, recent)]
        return moments(times, self.policy.moment)

    def elsewhere(self, fault: Fault) -> str:
        """Why a fault is not the matter of the node that saw it, by its job's faults; empty when it may be."""
        return self._elsewhere(fault, self._of_job(fault.job))

    def _elsewhere(self, fault: Fault, recent: Recent) -> str:
        seconds = self.policy.shared_seconds
        if fault.scope in BLAMING and at_start(fault):
            for other in near(recent.network if fault.scope == "network" else recent.others, fault.time, seconds):
                alike = (other.job, other.cause) == (fault.job, fault.cause) and other.node != fault.node
                if alike and at_start(other):
                    return f"it failed so at its start on {other.node}, too"
        if fault.scope != "network":
            return ""
        for other in near(recent.others, fault.time, seconds):
            if other.job == fault.job and other.slot != fault.slot:
                return f"slot {other.slot} on {other.node} failed with {other.cause}, and this is what its peers see"
        nodes = {fault.node}
        for other in near(recent.network, fault.time, seconds):
            nodes.add(other.node or fault.node)
            if len(nodes) >= self.policy.shared_nodes:
                return f"{len(nodes)} nodes or more have network faults at once, so no single node is to blame"
        return ""


def moments(times: Iterable[float], apart: float) -> int:
    """The number of groups into which times fall that lie more than ``apart`` seconds from each other."""
    ordered = sorted(times)
    return bool(ordered) + sum(after - before > apart for before, after in itertools.pairwise(ordered))


def at_start(fault: Fault) -> bool:
    """A process ended that had not finished an iteration."""
    return fault.uptime is not None and not fault.worked


def is_quick(fault: Fault, policy: Policy) -> bool:
    early = fault.uptime is not None and fault.uptime <= policy.quick_seconds and not fault.worked
    return early and fault.scope in ("application", "unknown")
