"""From verdicts to decisions: escalation 3 -> 2 -> 1, flapping nodes, shared faults, jobs that fail by their own bug.

Two layers, both pure (the clock is an argument): a table of (state, event) -> (state, action) for one slot of a job
(`escalation_table`), and :func:`decide`, which finds out from the history (`fault_history`) which event a verdict is.
The reasons: docs/design/escalation.md.
"""

from __future__ import annotations

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
from unicron_detector.failures.fault_history import (
    BLAMING,
    WHOLE_JOB,
    Decision,
    Fault,
    History,
    Policy,
    Stuck,
    at_start,
    is_quick,
)
from unicron_detector.failures.severity import REPORT, Severity, Verdict
from unicron_detector.words import counted

SEVERITY_OF_ACTION = {
    NOTHING: Severity.SEV3,
    REPORT: Severity.SEV3,
    REATTEMPT: Severity.SEV3,
    RESTART: Severity.SEV2,
    MOVE: Severity.SEV2,
    END_JOB: Severity.SEV2,
    ISOLATE: Severity.SEV1,
}


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
    stays: bool = False,
) -> Decision:
    """What to do about a verdict on a slot of a job on a node. Pure: record the outcome with ``History.record``.

    ``uptime``: seconds since the rank started, None if unknown. ``worked``: whether it finished an iteration since.
    ``job_nodes``: on how many nodes the job runs; a program that fails on one of several may have a bad node.
    ``apart``: the job trains without the slot, so its deaths say nothing of the job, however long an iteration takes.
    ``fresh``: the job has never finished an iteration, and the verdict is on the process's own words.
    ``stays``: no other node can be tried, so only a fault of the node itself takes the slot off it.
    """
    fault = as_fault(verdict, now, job=job, slot=slot, node=node, uptime=uptime, worked=worked)
    state = history.state(job, slot, now)
    if verdict.action == REPORT:
        return Decision(Severity.SEV3, REPORT, f"{verdict.reason}; only reported", verdict.cause, Event.FAULT3, state)
    event, why = _event(history, fault, state, job_nodes, apart, fresh, stays)
    following, action = _step(state, event, fault.scope, stays)
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


def action_failed(
    history: History, now: float, *, job: str, slot: int, why: str, moved: bool = False, stays: bool = False
) -> Decision:
    """The action that ran for the slot timed out or failed: the next severity. ``why`` becomes part of the reason.

    ``moved``: the slot is on another node already, where it has to come up: that node is new to the fault. ``stays``:
    as in :func:`decide`. Pure, too: take it into the history with ``apply_failed``.
    """
    state = history.state(job, slot, now)
    if moved and state is State.ISOLATING:
        state = State.MOVED
    faults = history.by_slot.get((job, slot))
    following, action = _step(state, Event.FAILED, faults[-1].scope if faults else "", stays)
    reason = f"{state.value} failed ({why}): {action}"
    return Decision(SEVERITY_OF_ACTION[action], action, reason, "action_failed", Event.FAILED, following)


def _step(state: State, event: Event, scope: str, stays: bool) -> tuple[State, str]:
    """The table's answer for a fault of that scope."""
    following, action = TABLE[state][event]
    blamed = scope == "hardware" or (event is Event.FLAPPING and scope in BLAMING)
    if action != ISOLATE or blamed:
        return following, action
    return (State.RESTARTING, RESTART) if stays else (following, MOVE)


def apply_failed(history: History, decision: Decision, now: float, *, job: str, slot: int) -> None:
    """Takes an ``action_failed`` decision into the history."""
    history.set(job, slot, decision.state, now)


def withhold_isolation(history: History, now: float, *, job: str, slot: int) -> None:
    """The slot was to leave its node and does not: the process is started again in place instead."""
    history.set(job, slot, State.RESTARTING, now)


def _event(
    history: History, fault: Fault, state: State, job_nodes: int, apart: bool, fresh: bool, stays: bool
) -> tuple[Event, str]:
    """Which event the fault is, the most far-reaching first, and why."""
    began = fresh and not apart and at_start(fault)
    bug = "" if apart else own_bug(history, fault, job_nodes, stays)
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


def own_bug(history: History, fault: Fault, job_nodes: int = 1, stays: bool = False) -> str:
    """Why the job itself is to blame and healing it would go on for ever; empty when it is not. stays: see
    :func:`decide`.

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
        died = f"slot {fault.slot} died {counted(len(quick), 'time')} within {policy.quick_seconds:g} s of its start"
        if len(nodes) >= policy.own_bug_nodes:
            return f"{died}, and ranks died so on {len(nodes)} nodes without an iteration: the job's own error"
        if (stays or job_nodes <= 1) and all(other.scope == "application" for other in quick):
            return f"{died} by an error of the program ({fault.cause}) and never finished an iteration"
    own = [other for other in mine if other.scope in ("application", "unknown")]
    if len(own) >= policy.stuck_faults:
        return (
            f"slot {fault.slot} failed {counted(len(own), 'time')} and the job has not finished an iteration in between"
        )
    return ""


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
    deaths = sum(other.cause == fault.cause and at_start(other) for other in mine)
    if deaths < history.policy.quick_deaths or not _on_every_node(history, fault, job_nodes):
        return ""
    if job_nodes <= 1 and fault.scope not in ("application", "network"):
        return ""
    where = f"on all {job_nodes} nodes" if job_nodes > 1 else "on the job's only node"
    died = f"slot {fault.slot} died {counted(deaths, 'time')} of {fault.cause} before the job's first iteration"
    return f"{died}, and ranks died so {where}: the script's own failure, whatever its words"


def _quick_deaths(mine: list[Fault], policy: Policy) -> list[Fault]:
    """The quick deaths among one slot's faults; none if the last fault is not one."""
    return [fault for fault in mine if is_quick(fault, policy)] if is_quick(mine[-1], policy) else []


def _bad_node(history: History, fault: Fault) -> str:
    """Why the job should try another node although this one fault does not say so; empty when it should not."""
    policy, stuck = history.policy, history.since_progress.get(fault.job) or Stuck()
    mine = [*stuck.slots.get(fault.slot, ()), fault]
    quick = [other for other in _quick_deaths(mine, policy) if other.node == fault.node]
    if len(quick) < policy.quick_deaths:
        return ""
    died = f"slot {fault.slot} died {counted(len(quick), 'time')} within {policy.quick_seconds:g} s of its start"
    return f"{died}, and on {fault.node} only: it is tried on another node"


def _flaps(history: History, fault: Fault) -> str:
    """Why the job should leave the node, which has failed too often; empty when it should not."""
    policy = history.policy
    if fault.scope not in BLAMING or not fault.node or history.elsewhere(fault):
        return ""
    times = history.node_moments(fault.node, fault.time, fault)
    if times >= policy.flap_faults:
        hours = policy.flap_window / 3600
        return f"node {fault.node} has failed {counted(times, 'time')} in {hours:g} h: it flaps"
    return ""


def _backoff(policy: Policy, repeats: int) -> float:
    """Seconds to wait before an action on a fault that was seen ``repeats`` times before within the window."""
    return 0.0 if repeats == 0 else min(policy.backoff * 2.0 ** (repeats - 1), policy.backoff_limit)
