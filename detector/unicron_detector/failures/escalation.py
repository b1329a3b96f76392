"""Decisions about faults: severity 3 -> 2 -> 1, flapping nodes, shared faults, jobs that fail by their own bug.

A decision takes three pure steps. :data:`RULES` finds the event that a fault is, after the faults before it
(`fault_history`). The table of `escalation_table` gives the consequence in the slot's state. Then only a fault of the
node's own may blame the node. The reasons: docs/design/escalation.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from unicron_detector.failures.escalation_table import (
    END_JOB,
    ISOLATE,
    MOVE,
    NOTHING,
    REATTEMPT,
    RESTART,
    TABLE,
    Event,
    State,
)
from unicron_detector.failures.fault_history import BLAMING, WHOLE_JOB, Fault, History, Policy, Stuck
from unicron_detector.failures.severity import REPORT, Severity, Verdict
from unicron_detector.words import plural

SEVERITY_OF_ACTION = {
    NOTHING: Severity.SEV3,
    REPORT: Severity.SEV3,
    REATTEMPT: Severity.SEV3,
    RESTART: Severity.SEV2,
    MOVE: Severity.SEV2,
    END_JOB: Severity.SEV2,
    ISOLATE: Severity.SEV1,
}
OF_PROGRAMS = ("application", "unknown")  # scopes in which a program's own bug may be the reason


class Decision(msgspec.Struct, frozen=True):
    """An action, with its reason."""

    severity: Severity
    action: str
    reason: str
    cause: str = ""
    event: Event = Event.FAULT3
    state: State = State.HEALTHY
    """The slot's state from now on."""
    wait_seconds: float = 0.0
    """The action is delayed by this: repeated faults back off."""


class Circumstances(msgspec.Struct, frozen=True):
    """The job at the moment of a fault."""

    job_nodes: int = 1
    """Nodes on which the job runs; a program that fails on one of several may have a bad node."""
    apart: bool = False
    """The job trains without the slot, so its deaths prove nothing about the job."""
    fresh: bool = False
    """The job has never finished an iteration, and the verdict is on the process's own words."""
    stays: bool = False
    """No other node can be tried, so only a fault of the node itself takes the slot off it."""


def decide(history: History, verdict: Verdict, fault: Fault, around: Circumstances) -> Decision:
    """Return the decision about a verdict and its fault. Take both into the history with ``History.record``.

    Ranks of one node that fail at once in the same way, and for the first time, get one decision: the rules look at
    the slot's own past and at other nodes.
    """
    if history.knows(fault.job, fault.slot) or fault.slot == WHOLE_JOB:
        return _decide(history, verdict, fault, around)
    decided = verdict, around, fault.at_start, history.policy.is_quick(fault)
    last = history.decided
    if last is not None and last[0] == decided and fault.alike(last[1]):
        assert isinstance(last[2], Decision)
        return last[2]
    decision = _decide(history, verdict, fault, around)
    history.decided = decided, fault, decision
    return decision


def _decide(history: History, verdict: Verdict, fault: Fault, around: Circumstances) -> Decision:
    state = history.state(fault.job, fault.slot, fault.time)
    if verdict.action == REPORT:
        return Decision(Severity.SEV3, REPORT, f"{verdict.reason}; only reported", verdict.cause, Event.FAULT3, state)
    case = Case(history, fault, state, around)
    event, why = case.find_event()
    following, action = _step(state, event, fault.scope, around.stays)
    # If a node should be left and there is no other, the process is restarted in place.
    wait = _backoff(history.policy, case.seen) if action in (REATTEMPT, RESTART) or around.apart else 0.0
    reason = f"{verdict.reason}; {why}" if why else verdict.reason
    if state is State.ENDED:
        reason = f"{verdict.reason}; the job was ended before, nothing more is done"
    return Decision(SEVERITY_OF_ACTION[action], action, reason, verdict.cause, event, following, wait)


def action_failed(
    history: History, now: float, job: str, slot: int, why: str, *, moved: bool = False, stays: bool = False
) -> Decision:
    """Return the next action after one for the slot failed or timed out. Take it into the history with
    ``History.set_state``.

    ``moved``: the slot is on another node already, which is new to the fault. ``stays``: as in :class:`Circumstances`.
    """
    state = history.state(job, slot, now)
    if moved and state is State.ISOLATING:
        state = State.MOVED
    faults = history.of_slot(job, slot)
    following, action = _step(state, Event.FAILED, faults[-1].scope if faults else "", stays)
    reason = f"{state.value} failed ({why}): {action}"
    return Decision(SEVERITY_OF_ACTION[action], action, reason, "action_failed", Event.FAILED, following)


def _step(state: State, event: Event, scope: str, stays: bool) -> tuple[State, str]:
    following, action = TABLE[state][event]
    blamed = scope == "hardware" or (event is Event.FLAPPING and scope in BLAMING)
    if action != ISOLATE or blamed:
        return following, action
    return (State.RESTARTING, RESTART) if stays else (following, MOVE)


def _backoff(policy: Policy, repeats: int) -> float:
    """Return the seconds to wait before an action on a fault that was seen so often before within the window."""
    return 0.0 if repeats == 0 else min(policy.backoff * 2.0 ** (repeats - 1), policy.backoff_limit)


# ---------------------------------------------------------------- from a fault to its event
@dataclass
class Case:
    """One fault of one slot, with the faults before it."""

    history: History
    fault: Fault
    state: State
    around: Circumstances
    seen: int = field(init=False)
    """The number of such failures of the slot before, within the window."""
    stuck: Stuck = field(init=False)
    """The faults of the job since its last iteration."""
    mine: list[Fault] = field(init=False)
    """The slot's faults among them, this one included."""
    quick_deaths: list[Fault] = field(init=False)
    """The quick deaths among them; none if this fault is not one."""

    def __post_init__(self) -> None:
        history, fault = self.history, self.fault
        self.seen = history.same_cause(fault.job, fault.slot, fault.cause, fault.time)
        self.stuck = history.since_progress.get(fault.job) or Stuck()
        self.mine = [*self.stuck.of_slot(fault.slot), fault]
        quick = history.policy.is_quick
        self.quick_deaths = [one for one in self.mine if quick(one)] if quick(fault) else []

    def find_event(self) -> tuple[Event, str]:
        """Return the event of the first rule that holds, and why it holds."""
        for event, rule in RULES:
            if (why := rule(self)) is not None:
                return event, why
        raise AssertionError("the last rule always holds")

    @property
    def acts(self) -> bool:
        """Whether the fault came although an action runs for the slot."""
        return self.state in (State.REATTEMPTING, State.RESTARTING)

    @property
    def returns(self) -> bool:
        """Whether the fault is not new to the slot."""
        return self.acts or (self.seen > 0 and self.state is not State.HEALTHY)

    @property
    def begins(self) -> bool:
        """Whether the process ended at its start, before the job's first iteration."""
        return self.around.fresh and not self.around.apart and self.fault.at_start

    @property
    def severe(self) -> bool:
        return self.fault.severity is Severity.SEV1

    @property
    def on_every_node(self) -> bool:
        """Whether ranks have died of this cause at their start on all nodes of the job, since its last iteration."""
        nodes = self.stuck.starts.get(self.fault.cause, set())
        return len(nodes) + (self.fault.node not in nodes) >= self.around.job_nodes

    # ------------------------------------------------------------ the rules: each returns why it holds, or None
    def is_own_bug(self) -> str | None:
        """The job itself is to blame, and healing it would go on for ever."""
        why = "" if self.around.apart else self._storage_away() or self._dies_everywhere() or self._is_stuck()
        if not why and self.begins:
            why = self._never_began()
        return why if why and (self.begins or not self.severe) else None

    def fails_on_every_node(self) -> str | None:
        if self._bad_start() and self.on_every_node:
            return "it failed so at its start on every node of the job, so none of them is to blame"
        return None

    def first_bad_start(self) -> str | None:
        if self._bad_start() and self.severe and not self.seen:
            return "its own words before the job's first iteration: it is started again once"
        return None

    def blames_node(self) -> str | None:
        return "" if self.severe else None

    def flaps(self) -> str | None:
        """The job should leave the node, which has failed too often."""
        fault, policy = self.fault, self.history.policy
        if fault.scope in BLAMING and fault.node and not self.history.elsewhere(fault):
            times = self.history.node_moments(fault.node, fault.time, fault)
            if times >= policy.flap_faults:
                hours = policy.flap_window / 3600
                return f"node {fault.node} has failed {plural(times, 'time')} in {hours:g} h: it flaps"
        return None

    def dies_on_one_node(self) -> str | None:
        """The job should try another node, although this one fault does not say so."""
        quick = [other for other in self.quick_deaths if other.node == self.fault.node]
        if self.around.apart or len(quick) < self.history.policy.quick_deaths:
            return None
        return f"{self._died_quickly(len(quick))}, and on {self.fault.node} only: it is tried on another node"

    def is_shared(self) -> str | None:
        return (self.fault.severity is Severity.SEV3 and self.history.elsewhere(self.fault)) or None

    def software_returns(self) -> str | None:
        if not self.returns or self.fault.scope not in ("application", "storage"):
            return None
        return f"{self.fault.cause} again; another node would not cure it, so the process is restarted"

    def returns_without_culprit(self) -> str | None:
        if not self.returns or self.fault.slot != WHOLE_JOB:
            return None
        why = f"it came back within {self.history.policy.window:g} s ({self.seen + 1} times) and no rank is behind"
        return f"{why}: no node can be named, so processes are restarted"

    def action_did_not_help(self) -> str | None:
        return f"it came while the slot was {self.state.value}: that action did not help" if self.acts else None

    def fault_returns(self) -> str | None:
        times = f"{self.seen + 1} times"
        return f"the same fault came back within {self.history.policy.window:g} s ({times})" if self.returns else None

    def restarts(self) -> str | None:
        return "" if self.fault.severity is Severity.SEV2 else None

    # ------------------------------------------------------------ reasons for which the job itself is to blame
    def _bad_start(self) -> bool:
        """Whether a process at its start blames its node, and the job has others."""
        return self.begins and self.around.job_nodes > 1 and self.fault.scope in BLAMING

    def _storage_away(self) -> str:
        if self.fault.scope != "storage" or self.stuck.storage is None:
            return ""
        away = self.fault.time - self.stuck.storage
        if away <= self.history.policy.storage_patience:
            return ""
        return f"storage has failed for {away:.0f} s and the job has not finished an iteration in between"

    def _died_quickly(self, times: int) -> str:
        within = f"within {self.history.policy.quick_seconds:g} s of its start"
        return f"slot {self.fault.slot} died {plural(times, 'time')} {within}"

    def _dies_everywhere(self) -> str:
        """Blame quick deaths on several nodes, or by an error of the program if no other node can be tried."""
        policy, quick, around = self.history.policy, self.quick_deaths, self.around
        if len(quick) < policy.quick_deaths:
            return ""
        died, nodes = self._died_quickly(len(quick)), self.stuck.quick | {self.fault.node}
        if len(nodes) >= policy.own_bug_nodes:
            return f"{died}, and ranks died so on {len(nodes)} nodes without an iteration: the job's own error"
        if (around.stays or around.job_nodes <= 1) and all(other.scope == "application" for other in quick):
            return f"{died} by an error of the program ({self.fault.cause}) and never finished an iteration"
        return ""

    def _is_stuck(self) -> str:
        """Blame too many faults of one slot. Those of hardware and network never count."""
        own = [other for other in self.mine if other.scope in OF_PROGRAMS]
        if self.fault.scope not in OF_PROGRAMS or len(own) < self.history.policy.stuck_faults:
            return ""
        failed = f"slot {self.fault.slot} failed {plural(len(own), 'time')}"
        return f"{failed} and the job has not finished an iteration in between"

    def _never_began(self) -> str:
        """Blame a script whose ranks die of one cause at their start wherever they run, whatever their words. A job on
        one node may have a bad one."""
        fault, nodes = self.fault, self.around.job_nodes
        deaths = sum(other.cause == fault.cause and other.at_start for other in self.mine)
        if deaths < self.history.policy.quick_deaths or not self.on_every_node:
            return ""
        if nodes <= 1 and fault.scope not in ("application", "network"):
            return ""
        where = f"on all {nodes} nodes" if nodes > 1 else "on the job's only node"
        died = f"slot {fault.slot} died {plural(deaths, 'time')} of {fault.cause} before the job's first iteration"
        return f"{died}, and ranks died so {where}: the script's own failure, whatever its words"


RULES: tuple[tuple[Event, Callable[[Case], str | None]], ...] = (
    (Event.OWN_BUG, Case.is_own_bug),
    (Event.AGAIN_SOFTWARE, Case.fails_on_every_node),
    (Event.FAULT2, Case.first_bad_start),
    (Event.FAULT1, Case.blames_node),
    (Event.FLAPPING, Case.flaps),
    (Event.FLAPPING, Case.dies_on_one_node),
    (Event.SHARED, Case.is_shared),
    (Event.AGAIN_SOFTWARE, Case.software_returns),
    (Event.AGAIN_SOFTWARE, Case.returns_without_culprit),
    (Event.FAILED, Case.action_did_not_help),
    (Event.AGAIN, Case.fault_returns),
    (Event.FAULT2, Case.restarts),
    (Event.FAULT3, lambda case: ""),
)
"""The first rule that holds decides: the most far-reaching event comes first."""
