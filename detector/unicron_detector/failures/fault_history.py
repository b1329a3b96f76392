"""The faults of jobs and nodes so far, and the states in which they left slots.

:class:`History` is a fold over recorded faults and outcomes, so replaying the event log restores it.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from unicron_detector.failures.escalation_table import RUNNING, TABLE, Event, State
from unicron_detector.failures.severity import Severity

WHOLE_JOB = -1  # the slot of a fault for which no rank, and so no node, can be named
BLAMING = ("hardware", "network")  # scopes that may blame a node; the network's only where the node flaps
FAULTS_KEPT, RECENT_KEPT = 64, 1000  # of a slot or a node; of a job, at least


class Fault(msgspec.Struct, frozen=True, gc=False):
    """One recorded fault of a slot."""

    time: float
    job: str
    slot: int
    node: str
    cause: str
    scope: str
    severity: Severity
    uptime: float | None = None
    """Seconds since the rank's process started, None if unknown."""
    worked: bool = True
    """The process had finished an iteration."""

    @property
    def at_start(self) -> bool:
        """Whether a process ended before it had finished an iteration."""
        return self.uptime is not None and not self.worked

    def alike(self, other: Fault) -> bool:
        """Whether both struck ranks of one node in the same way at once."""
        mine = self.time, self.job, self.node, self.cause, self.scope, self.severity
        return mine == (other.time, other.job, other.node, other.cause, other.scope, other.severity)


@dataclass(frozen=True)
class Policy:
    """The limits of escalation. Times in seconds."""

    window: float = 1800.0
    """Seconds within which the same fault escalates: as between two checkpoints, longer than any repair."""
    quick_seconds: float = 120.0
    """A rank dies quickly if it ends this soon after its start, before it has finished an iteration."""
    quick_deaths: int = 3
    """A slot with this many quick deaths has a bug or a bad node."""
    own_bug_nodes: int = 2
    """Quick deaths on this many nodes are the job's own bug."""
    stuck_faults: int = 8
    """This many faults of one slot, without an iteration of the job in between, are a bug, too."""
    storage_patience: float = 3600.0
    """A file system that is away for longer, without an iteration, ends the job."""
    flap_window: float = 86400.0
    flap_faults: int = 3
    """A node with this many faults within the window, none of them the application's, is left."""
    shared_seconds: float = 30.0
    shared_nodes: int = 3
    """If this many nodes have a network fault within `shared_seconds`, the network is at fault."""
    moment: float = 10.0
    """Faults closer together than this are one moment: a node's ranks fail together."""
    backoff: float = 1.0
    """The first wait before an action is repeated; each further wait is twice as long."""
    backoff_limit: float = 60.0
    """The longest wait."""

    def is_quick(self, fault: Fault) -> bool:
        """Whether the process died soon after its start, and may have done so by itself."""
        early = fault.at_start and fault.uptime is not None and fault.uptime <= self.quick_seconds
        return early and fault.scope in ("application", "unknown")


@dataclass
class Recent:
    """The newest faults in order, those of the network apart: if thousands of ranks fail at once, each searches for
    faults near it in time."""

    network: list[Fault] = field(default_factory=list)
    others: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        faults = self.network if fault.scope == "network" else self.others
        faults.append(fault)
        if len(faults) >= 2 * RECENT_KEPT:
            del faults[:-RECENT_KEPT]


def near(faults: list[Fault], at: float, seconds: float) -> Iterator[Fault]:
    """Yield the faults that are at most `seconds` from `at`; they are in order of time."""
    first = bisect.bisect_left(faults, at - seconds, key=operator.attrgetter("time"))
    for index in range(first, len(faults)):
        if faults[index].time > at + seconds:
            return
        yield faults[index]


def moments(times: Iterable[float], apart: float) -> int:
    """Count the groups into which times fall that lie more than ``apart`` seconds from each other."""
    ordered = sorted(times)
    return bool(ordered) + sum(after - before > apart for before, after in itertools.pairwise(ordered))


_Key = TypeVar("_Key")


class Last(msgspec.Struct, array_like=True, gc=False):
    """The last faults of a slot or a node, the oldest first. Nearly all have one, for which a deque would take 760
    bytes. Saved states have it as these two fields."""

    most: int
    faults: list[Fault]


def _append(faults: dict[_Key, Last], key: _Key, fault: Fault) -> None:
    """Add a fault to the last ones of a slot or a node."""
    kept = faults.get(key)
    if kept is None:
        faults[key] = Last(FAULTS_KEPT, [fault])
        return
    kept.faults.append(fault)
    if len(kept.faults) > kept.most:
        del kept.faults[0]


@dataclass
class Stuck:
    """The faults of a job since it last finished an iteration."""

    slots: dict[int, Last] = field(default_factory=dict)
    quick: set[str] = field(default_factory=set)
    """Nodes on which ranks died soon after their start."""
    starts: dict[str, set[str]] = field(default_factory=dict)
    """By cause, nodes on which processes ended that had not finished an iteration."""
    storage: float | None = None
    """The time of the first fault of storage."""

    def add(self, fault: Fault, policy: Policy) -> None:
        _append(self.slots, fault.slot, fault)
        if policy.is_quick(fault):
            self.quick.add(fault.node)
        if fault.at_start:
            self.starts.setdefault(fault.cause, set()).add(fault.node)
        if fault.scope == "storage" and self.storage is None:
            self.storage = fault.time

    def of_slot(self, slot: int) -> list[Fault]:
        """Return the last ones of a slot."""
        return self.slots[slot].faults if slot in self.slots else []


@dataclass
class History:
    """All faults, and the state of each slot. Times in seconds, any epoch."""

    policy: Policy = field(default_factory=Policy)
    states: dict[tuple[str, int], State] = field(default_factory=dict)  # by job and slot
    last: dict[tuple[str, int], float] = field(default_factory=dict)  # when the state was set
    of_job: dict[str, set[int]] = field(default_factory=dict)  # the slots with a state
    by_slot: dict[tuple[str, int], Last] = field(default_factory=dict)
    by_node: dict[str, Last] = field(default_factory=dict)
    since_progress: dict[str, Stuck] = field(default_factory=dict)
    recent: Recent = field(default_factory=Recent)
    # Decisions about a job rest on its own faults alone, since no user's processes may move another's job. So both are
    # here again, by job; those of all jobs are for admins.
    node_of_job: dict[str, dict[str, Last]] = field(default_factory=dict)
    recent_of_job: dict[str, Recent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decided: tuple[object, Fault, object] | None = None
        """The grounds of the last decision, its fault, and the decision, as long as it holds for an alike fault of
        another rank of that node (`escalation.decide`)."""
        self._acting: dict[str, set[int]] = {}  # follows from `states`, so no snapshot holds it
        for (job, slot), state in self.states.items():
            self._note_action(job, slot, state)

    def state(self, job: str, slot: int, now: float) -> State:
        """Return the slot's state, with probation that has run out."""
        key = (job, slot)
        state = self.states.get(key, State.HEALTHY)
        if now - self.last.get(key, now) > self.policy.window:
            state = TABLE[state][Event.QUIET][0]
        return state

    def knows(self, job: str, slot: int) -> bool:
        """Whether the slot had a fault or an action before."""
        return (job, slot) in self.states or (job, slot) in self.by_slot

    def of_slot(self, job: str, slot: int) -> list[Fault]:
        """Return the last faults of a slot, the oldest first."""
        kept = self.by_slot.get((job, slot))
        return kept.faults if kept is not None else []

    def of_node(self, node: str, job: str | None = None) -> list[Fault]:
        """Return the last faults of a node, the oldest first: of all jobs, or of one."""
        kept = (self.by_node if job is None else self.node_of_job.get(job, {})).get(node)
        return kept.faults if kept is not None else []

    def acting(self, job: str) -> list[int]:
        """Return the slots of the job for which an action runs, in order."""
        return sorted(self._acting.get(job, ()))

    def set_state(self, job: str, slot: int, state: State, now: float) -> None:
        """Take in that an action runs for the slot from now on."""
        key = job, slot
        self.states[key], self.last[key] = state, now
        self.of_job.setdefault(job, set()).add(slot)
        self._note_action(job, slot, state)

    def _note_action(self, job: str, slot: int, state: State) -> None:
        if state in RUNNING:
            self._acting.setdefault(job, set()).add(slot)
        elif job in self._acting:
            self._acting[job].discard(slot)

    def record(self, fault: Fault, state: State) -> None:
        """Take in a fault, and the state that follows from the decision about it."""
        if self.decided is not None and not fault.alike(self.decided[1]):
            self.decided = None
        job = fault.job
        self.set_state(job, fault.slot, state, fault.time)
        _append(self.by_slot, (job, fault.slot), fault)
        if fault.node:
            _append(self.by_node, fault.node, fault)
            _append(self.node_of_job.setdefault(job, {}), fault.node, fault)
        if (stuck := self.since_progress.get(job)) is None:
            stuck = self.since_progress[job] = Stuck()
        stuck.add(fault, self.policy)
        self.recent.add(fault)
        if (recent := self.recent_of_job.get(job)) is None:
            recent = self.recent_of_job[job] = Recent()
        recent.add(fault)

    def note_recovery(self, job: str, slot: int, now: float) -> None:
        """Take in that the slot took part in a finished iteration after its action."""
        key = (job, slot)
        if key in self.states:
            self.states[key] = TABLE[self.state(job, slot, now)][Event.RECOVERED][0]
            self._note_action(job, slot, self.states[key])

    def note_progress(self, job: str) -> None:
        """Take in that the job finished an iteration: its faults before did not keep it from working."""
        self.since_progress.pop(job, None)
        self.decided = None

    def forget_job(self, job: str) -> None:
        """Drop a job that is over. Its faults stay with their nodes, for admins to see."""
        self.decided = None
        for of_job in (self.since_progress, self.node_of_job, self.recent_of_job, self._acting):
            of_job.pop(job, None)
        for slot in self.of_job.pop(job, ()):
            for memory in (self.by_slot, self.states, self.last):
                memory.pop((job, slot), None)

    def forget_node(self, node: str) -> None:
        """Drop the past of a node that was repaired and has passed its admission test."""
        self.by_node.pop(node, None)
        self.decided = None
        for nodes in self.node_of_job.values():
            nodes.pop(node, None)

    def same_cause(self, job: str, slot: int, cause: str, now: float) -> int:
        """Count how often the cause struck the slot alone of its job, within the window."""
        faults = self.of_slot(job, slot)
        within = [fault for fault in faults if fault.cause == cause and now - fault.time <= self.policy.window]
        return sum(not self._struck_others(fault) for fault in within)

    def _struck_others(self, fault: Fault) -> bool:
        """Whether a fault of unknown scope struck several nodes of the job at once, as when all ranks are killed."""
        if fault.scope != "unknown":
            return False
        around = near(self._of_job(fault.job).others, fault.time, self.policy.moment)
        return any(other.node != fault.node and other.cause == fault.cause for other in around)

    def _of_job(self, job: str) -> Recent:
        return self.recent_of_job.get(job) or Recent()

    def node_moments(self, node: str, now: float, new: Fault | None = None) -> int:
        """Count the separate moments of the node's own faults within the flap window: of all jobs, or of the new
        fault's job. Faults of applications, and network faults that something else explains, do not count."""
        faults = self.of_node(node, new.job if new else None)
        own = [fault for fault in faults if now - fault.time <= self.policy.flap_window]
        own += [new] if new else []
        recent = self._of_job(new.job) if new else self.recent
        times = [fault.time for fault in own if fault.scope in BLAMING and not self._elsewhere(fault, recent)]
        return moments(times, self.policy.moment)

    def elsewhere(self, fault: Fault) -> str:
        """Return why a fault is not due to the node that saw it, by its job's faults; empty if it may be."""
        return self._elsewhere(fault, self._of_job(fault.job))

    def _elsewhere(self, fault: Fault, recent: Recent) -> str:
        seconds = self.policy.shared_seconds
        if fault.scope in BLAMING and fault.at_start:
            for other in near(recent.network if fault.scope == "network" else recent.others, fault.time, seconds):
                alike = (other.job, other.cause) == (fault.job, fault.cause) and other.node != fault.node
                if alike and other.at_start:
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
