"""From verdicts to decisions: escalation 3 -> 2 -> 1, flapping nodes, shared faults, jobs that fail by their own bug.

Two layers, both pure (the clock is an argument): a table of (state, event) -> (state, action) for one slot of a job,
and ``decide``, which finds out from the history which event a verdict is. ``History`` is a fold over recorded faults
and outcomes, so a restarted controller gets the same one back by replaying its event log. The reasons:
docs/design/escalation.md.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from unicron.detector.failures.severity import REPORT, Severity, Verdict


class State(enum.Enum):
    """What is known of one slot of a job."""

    HEALTHY = "healthy"  # nothing within the window
    REATTEMPTING = "reattempting"  # a SEV3 action runs
    REATTEMPTED = "reattempted"  # it worked; on probation until the window ends
    RESTARTING = "restarting"
    RESTARTED = "restarted"
    ISOLATING = "isolating"  # the job leaves the node: the slot waits for another one or is planned away
    MOVED = "moved"  # the slot runs elsewhere, on probation
    ENDED = "ended"  # the job was ended


class Event(enum.Enum):
    """What happened to the slot."""

    FAULT3 = "fault3"  # a fault that has not been seen here within the window, by severity
    FAULT2 = "fault2"
    FAULT1 = "fault1"
    AGAIN = "again"  # the same cause within the window
    AGAIN_SOFTWARE = "again_software"  # the same, of a kind that no other node would cure
    FAILED = "failed"  # the running action did not help: it timed out, or a fault came while it ran
    RECOVERED = "recovered"  # an iteration finished after the action
    QUIET = "quiet"  # the window passed without a fault
    SHARED = "shared"  # a network fault that another fault explains, or many nodes at once: this node is not to blame
    FLAPPING = "flapping"  # the node has failed too often
    OWN_BUG = "own_bug"  # the job fails by itself, wherever it runs


WHOLE_JOB = -1  # the slot of a fault of which no rank, and so no node, can be named
# ISOLATE: this job leaves the node, which is a suspect from then on. MOVE: the same, and the node is none.
NOTHING, REATTEMPT, RESTART, MOVE, ISOLATE, END_JOB = "none", "reattempt", "restart", "move", "isolate", "end_job"
BLAMING = ("hardware", "network")  # scopes that may blame a node; the network's only where the node flaps
RUNNING = {State.REATTEMPTING: REATTEMPT, State.RESTARTING: RESTART, State.ISOLATING: MOVE}  # the action that runs
FAULTS_KEPT, RECENT_KEPT = 64, 1000  # of a slot or a node; of a job, at least
SEVERITY_OF_ACTION = {
    NOTHING: Severity.SEV3,
    REPORT: Severity.SEV3,
    REATTEMPT: Severity.SEV3,
    RESTART: Severity.SEV2,
    MOVE: Severity.SEV2,
    END_JOB: Severity.SEV2,
    ISOLATE: Severity.SEV1,
}

_S, _E = State, Event
_TO_REATTEMPT = (_S.REATTEMPTING, REATTEMPT)
_TO_RESTART = (_S.RESTARTING, RESTART)
_TO_ISOLATE = (_S.ISOLATING, ISOLATE)
_TO_END = (_S.ENDED, END_JOB)


def _row(
    again: tuple[State, str],
    failed: tuple[State, str],
    recovered: State,
    quiet: State,
    fault3: tuple[State, str] = _TO_REATTEMPT,
    fault2: tuple[State, str] = _TO_RESTART,
) -> dict[Event, tuple[State, str]]:
    """One state's row; what is the same in every living state stands here once."""
    return {
        _E.FAULT3: fault3,
        _E.FAULT2: fault2,
        _E.FAULT1: _TO_ISOLATE,
        _E.AGAIN: again,
        _E.AGAIN_SOFTWARE: _TO_RESTART,
        _E.FAILED: failed,
        _E.RECOVERED: (recovered, NOTHING),
        _E.QUIET: (quiet, NOTHING),
        _E.SHARED: _TO_REATTEMPT,
        _E.FLAPPING: _TO_ISOLATE,
        _E.OWN_BUG: _TO_END,
    }


# Another fault on probation is met by its own severity; the same fault ("again") and a failed action take the next one.
# A moved slot that fails again restarts first, for its new node is new to the fault. Whether the job itself is to blame
# is for OWN_BUG. An application's repeated error moves nobody: no other node would cure it. Where the table says
# ISOLATE and the fault is none of the node's own (`_step`), the job moves and the node is not blamed.
TABLE: dict[State, dict[Event, tuple[State, str]]] = {
    _S.HEALTHY: _row(_TO_RESTART, _TO_RESTART, _S.HEALTHY, _S.HEALTHY),
    _S.REATTEMPTING: _row(_TO_RESTART, _TO_RESTART, _S.REATTEMPTED, _S.REATTEMPTING, fault3=_TO_RESTART),
    _S.REATTEMPTED: _row(_TO_RESTART, _TO_RESTART, _S.REATTEMPTED, _S.HEALTHY),
    _S.RESTARTING: _row(_TO_ISOLATE, _TO_ISOLATE, _S.RESTARTED, _S.RESTARTING, fault3=_TO_ISOLATE, fault2=_TO_ISOLATE),
    _S.RESTARTED: _row(_TO_ISOLATE, _TO_ISOLATE, _S.RESTARTED, _S.HEALTHY),
    _S.ISOLATING: _row(_TO_ISOLATE, _TO_ISOLATE, _S.MOVED, _S.ISOLATING, fault3=_TO_RESTART, fault2=_TO_RESTART),
    _S.MOVED: _row(_TO_RESTART, _TO_RESTART, _S.MOVED, _S.HEALTHY),
    _S.ENDED: {event: (_S.ENDED, NOTHING) for event in _E},
}


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
        if _is_quick(fault, policy):
            self.quick.add(fault.node)
        if _at_start(fault):
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
        if fault.scope in BLAMING and _at_start(fault):
            for other in near(recent.network if fault.scope == "network" else recent.others, fault.time, seconds):
                alike = (other.job, other.cause) == (fault.job, fault.cause) and other.node != fault.node
                if alike and _at_start(other):
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


def decide(
    history: History,
    verdict: Verdict,
    now: float,
    *,
    job: str,
    slot: int,
    node: str,
    uptime: float | None = None,
    worked: bool = True,
    job_nodes: int = 1,
    apart: bool = False,
    fresh: bool = False,
) -> Decision:
    """What to do about a verdict on a slot of a job on a node. Pure: record the outcome with ``History.record``.

    ``uptime``: seconds since the rank started, None if unknown. ``worked``: whether it finished an iteration since.
    ``job_nodes``: on how many nodes the job runs; a program that fails on one of several may have a bad node.
    ``apart``: the job trains without the slot, so its deaths say nothing of the job, however long an iteration takes.
    ``fresh``: the job has never finished an iteration, and the verdict is on the process's own words.
    """
    fault = as_fault(verdict, now, job=job, slot=slot, node=node, uptime=uptime, worked=worked)
    state = history.state(job, slot, now)
    if verdict.action == REPORT:
        return Decision(Severity.SEV3, REPORT, f"{verdict.reason}; only reported", verdict.cause, Event.FAULT3, state)
    event, why = _event(history, fault, state, job_nodes, apart, fresh)
    following, action = _step(state, event, fault.scope)
    repeats = history.same_cause(job, slot, verdict.cause, now)
    # Where a node is to be left and there is no other one, the process is started again in place.
    wait = _backoff(history.policy, repeats) if action in (REATTEMPT, RESTART) or apart else 0.0
    reason = f"{verdict.reason}; {why}" if why else verdict.reason
    if state is State.ENDED:
        reason = f"{verdict.reason}; the job was ended before, nothing more is done"
    return Decision(SEVERITY_OF_ACTION[action], action, reason, verdict.cause, event, following, wait)


def as_fault(
    verdict: Verdict,
    now: float,
    *,
    job: str,
    slot: int,
    node: str,
    uptime: float | None = None,
    worked: bool = True,
) -> Fault:
    """The record of a verdict, for ``History.record``."""
    return Fault(now, job, slot, node, verdict.cause, verdict.scope, verdict.severity, uptime, worked)


def action_failed(history: History, now: float, *, job: str, slot: int, why: str, moved: bool = False) -> Decision:
    """The action that ran for the slot timed out or failed: the next severity. ``why`` becomes part of the reason.

    ``moved``: the slot is on another node already, where it has to come up: that node is new to the fault. Pure, too:
    take it into the history with ``apply_failed``.
    """
    state = history.state(job, slot, now)
    if moved and state is State.ISOLATING:
        state = State.MOVED
    faults = history.by_slot.get((job, slot))
    following, action = _step(state, Event.FAILED, faults[-1].scope if faults else "")
    reason = f"{state.value} failed ({why}): {action}"
    return Decision(SEVERITY_OF_ACTION[action], action, reason, "action_failed", Event.FAILED, following)


def _step(state: State, event: Event, scope: str) -> tuple[State, str]:
    """The table's answer for a fault of that scope."""
    following, action = TABLE[state][event]
    blamed = scope == "hardware" or (event is Event.FLAPPING and scope in BLAMING)
    return following, MOVE if action == ISOLATE and not blamed else action


def apply_failed(history: History, decision: Decision, now: float, *, job: str, slot: int) -> None:
    """Takes an ``action_failed`` decision into the history."""
    history.set(job, slot, decision.state, now)


def withhold_isolation(history: History, now: float, *, job: str, slot: int) -> None:
    """The slot was to leave its node and does not: the process is started again in place instead."""
    history.set(job, slot, State.RESTARTING, now)


def _event(history: History, fault: Fault, state: State, job_nodes: int, apart: bool, fresh: bool) -> tuple[Event, str]:
    """Which event the fault is, the most far-reaching first, and why."""
    began = fresh and not apart and _at_start(fault)
    bug = "" if apart else own_bug(history, fault, job_nodes)
    if began and not bug:
        bug = _never_began(history, fault, job_nodes)
    if bug and (began or fault.severity is not Severity.SEV1):
        return Event.OWN_BUG, bug
    if began and job_nodes > 1 and fault.scope in BLAMING:
        if _on_every_node(history, fault, job_nodes):
            why = "it failed so at its start on every node of the job, so none of them is to blame"
            return Event.AGAIN_SOFTWARE, why
        if fault.severity is Severity.SEV1 and not history.same_cause(fault.job, fault.slot, fault.cause, fault.time):
            return Event.FAULT2, "its own words before the job's first iteration: it is started again once"
    if fault.severity is Severity.SEV1:
        return Event.FAULT1, ""
    suspect = _flaps(history, fault) or ("" if apart else _bad_node(history, fault))
    if suspect:
        return Event.FLAPPING, suspect
    elsewhere = history.elsewhere(fault)
    if elsewhere and fault.severity is Severity.SEV3:
        return Event.SHARED, elsewhere
    seen = history.same_cause(fault.job, fault.slot, fault.cause, fault.time)
    acting = state in (State.REATTEMPTING, State.RESTARTING)
    if (acting or seen) and fault.scope in ("application", "storage") and state is not State.HEALTHY:
        return Event.AGAIN_SOFTWARE, f"{fault.cause} again; another node would not cure it, so the process is restarted"
    if (acting or seen) and fault.slot == WHOLE_JOB and state is not State.HEALTHY:
        why = f"it came back within {history.policy.window:g} s ({seen + 1} times) and no rank is behind"
        return Event.AGAIN_SOFTWARE, f"{why}: no node can be named, so processes are restarted"
    if acting:
        return Event.FAILED, f"it came while the slot was {state.value}: that action did not help"
    if seen and state is not State.HEALTHY:
        return Event.AGAIN, f"the same fault came back within {history.policy.window:g} s ({seen + 1} times)"
    return {Severity.SEV2: Event.FAULT2, Severity.SEV3: Event.FAULT3}[fault.severity], ""


def own_bug(history: History, fault: Fault, job_nodes: int = 1) -> str:
    """Why the job itself is to blame and healing it would go on for ever; empty when it is not.

    Faults of hardware and network never count. Those of storage count when it has been away too long.
    """
    policy, stuck = history.policy, history.since_progress.get(fault.job) or Stuck()
    if fault.scope == "storage":
        away = 0.0 if stuck.storage is None else fault.time - stuck.storage
        if away > policy.storage_patience:
            return f"storage has failed for {away:.0f} s and the job has not finished an iteration in between"
    if fault.scope not in ("application", "unknown"):
        return ""
    mine = [*stuck.slots.get(fault.slot, ()), fault]
    quick = _quick_deaths(mine, policy)
    if len(quick) >= policy.quick_deaths:
        nodes = stuck.quick | {fault.node}
        died = f"slot {fault.slot} died {len(quick)} times within {policy.quick_seconds:g} s of its start"
        if len(nodes) >= policy.own_bug_nodes:
            return f"{died}, and ranks died so on {len(nodes)} nodes without an iteration: the job's own error"
        if job_nodes <= 1 and all(other.scope == "application" for other in quick):
            return f"{died} by an error of the program ({fault.cause}) and never finished an iteration"
    own = [other for other in mine if other.scope in ("application", "unknown")]
    if len(own) >= policy.stuck_faults:
        return f"slot {fault.slot} failed {len(own)} times and the job has not finished an iteration in between"
    return ""


def _at_start(fault: Fault) -> bool:
    """A process ended that had not finished an iteration."""
    return fault.uptime is not None and not fault.worked


def _on_every_node(history: History, fault: Fault, job_nodes: int) -> bool:
    """Ranks have died of the same cause at their start on all nodes of the job, since its last iteration."""
    stuck = history.since_progress.get(fault.job) or Stuck()
    nodes = stuck.starts.get(fault.cause, set())
    return len(nodes) + (fault.node not in nodes) >= job_nodes


def _never_began(history: History, fault: Fault, job_nodes: int) -> str:
    """Why the script is to blame whose ranks die of one cause at their start wherever they run, whatever their words;
    empty when it is not. A job on one node may have a bad one."""
    stuck = history.since_progress.get(fault.job) or Stuck()
    mine = [*stuck.slots.get(fault.slot, ()), fault]
    deaths = sum(other.cause == fault.cause and _at_start(other) for other in mine)
    if deaths < history.policy.quick_deaths or not _on_every_node(history, fault, job_nodes):
        return ""
    if job_nodes <= 1 and fault.scope not in ("application", "network"):
        return ""
    where = f"on all {job_nodes} nodes" if job_nodes > 1 else "on the job's only node"
    return (
        f"slot {fault.slot} died {deaths} times of {fault.cause} before the job's first iteration, and ranks died so "
        f"{where}: the script's own failure, whatever its words"
    )


def _is_quick(fault: Fault, policy: Policy) -> bool:
    early = _at_start(fault) and (fault.uptime or 0.0) <= policy.quick_seconds
    return early and fault.scope in ("application", "unknown")


def _quick_deaths(mine: list[Fault], policy: Policy) -> list[Fault]:
    """The quick deaths among one slot's faults; none if the last fault is not one."""
    return [fault for fault in mine if _is_quick(fault, policy)] if _is_quick(mine[-1], policy) else []


def _bad_node(history: History, fault: Fault) -> str:
    """Why the job should try another node although this one fault does not say so; empty when it should not."""
    policy, stuck = history.policy, history.since_progress.get(fault.job) or Stuck()
    mine = [*stuck.slots.get(fault.slot, ()), fault]
    quick = [other for other in _quick_deaths(mine, policy) if other.node == fault.node]
    if len(quick) < policy.quick_deaths:
        return ""
    died = f"slot {fault.slot} died {len(quick)} times within {policy.quick_seconds:g} s of its start"
    return f"{died}, and on {fault.node} only: it is tried on another node"


def _flaps(history: History, fault: Fault) -> str:
    """Why the job should leave the node, which has failed too often; empty when it should not."""
    policy = history.policy
    if fault.scope not in BLAMING or not fault.node or history.elsewhere(fault):
        return ""
    times = history.node_moments(fault.node, fault.time, fault)
    if times >= policy.flap_faults:
        hours = policy.flap_window / 3600
        return f"node {fault.node} has failed {times} times in {hours:g} h: it flaps"
    return ""


def _backoff(policy: Policy, repeats: int) -> float:
    """Seconds to wait before an action on a fault that was seen ``repeats`` times before within the window."""
    return 0.0 if repeats == 0 else min(policy.backoff * 2.0 ** (repeats - 1), policy.backoff_limit)


def check_table() -> list[str]:
    """What is missing in the table; empty when every state answers every event."""
    return [f"{state.value} x {event.value}" for state in State for event in Event if event not in TABLE.get(state, {})]
