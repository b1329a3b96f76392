"""Actions that do not come to their end: each has a time limit, whose expiry leads to the next severity.

Which action runs for a slot is the escalation's memory (`detector.escalation.History`), so a restarted controller goes
on with it. The clock stands still while the action waits for somebody else: for a plan that gives the element a node,
for other nodes without which the job cannot form, for the monitor that judges iterations once the slot is in one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from detector.escalation import ISOLATE, RESTART, Decision, State, action_failed
from detector.severity import Severity
from unicron_ctl.controller import failures
from unicron_ctl.controller.machine import Event as Happening
from unicron_ctl.controller.machine import State as Phase
from unicron_ctl.controller.signals import Signal
from unicron_ctl.controller.soft import JobView
from unicron_ctl.controller.state import JobState

if TYPE_CHECKING:
    from unicron_ctl.config import ControllerConfig
    from unicron_ctl.controller.engine import Engine

LOOK_SECONDS = 0.5
ACTING = (State.REATTEMPTING, State.RESTARTING, State.ISOLATING)
NAMES = {State.REATTEMPTING: "reattempt", State.RESTARTING: "restart", State.ISOLATING: "isolate"}


@dataclass
class Clocks:
    """Soft state of one controller: when an action was last seen to wait for somebody else. Times in seconds."""

    looked_at: float = 0.0
    excused: dict[tuple[str, str], float] = field(default_factory=dict)  # (job, what) -> when

    def elapsed(self, key: tuple[str, str], since: float, waits: bool, now: float, started_at: float) -> float:
        """How long the action has run. A restarted controller does not know what happened before: it begins anew."""
        if not waits:
            self.excused[key] = now
        return now - max(since, started_at, self.excused.get(key, 0.0))

    def forget(self, job: str) -> None:
        self.excused = {key: at for key, at in self.excused.items() if key[0] != job}


def limit(config: ControllerConfig, state: State, moved: bool) -> float:
    """Seconds that the running action may take."""
    if state is State.REATTEMPTING:
        return config.regroup_seconds
    return config.isolate_seconds if state is State.ISOLATING and not moved else config.restart_seconds


def pending(job: JobView, slot: int, state: State, node: str, aside: set[str]) -> str:
    """What the running action still lacks; empty while it is done, or waits for somebody else. Pure.

    node: where the fault was. aside: nodes that must get no work.
    """
    known, element = job.state, job.state.element(slot)
    if known.ended or (known.allotted is not None and element not in known.allotted) or element in known.leaving:
        return ""
    record, view = known.agents.get(element), job.agents.get(element)
    if record is None:
        return ""
    if state is State.ISOLATING and record.gone:
        return f"element {element} has a place in the plan, and no agent came"
    if record.gone or view is None or not view.alive:
        return ""  # the lease and Slurm see to that
    status = view.ranks.get(slot)
    if status is None or job.finished(slot):
        return ""
    if state is State.ISOLATING and record.node == node and node in aside:
        return f"its agent on {node} still runs"
    if status.state in ("starting", "exited"):
        return f"its process (incarnation {status.incarnation}) is not ready"
    if known.phase in (Phase.RUNNING, Phase.OFFERING) and slot in known.members and status.state == "running":
        return ""  # the monitor judges its iterations
    if known.phase == Phase.FORMING or record.node in aside:
        return ""
    if known.restart_mode and status.state == "waiting":
        return ""  # newcomers may be kept waiting for the next world (`restarting.worth`)
    return f"it is {status.state} while the job is {known.phase}"


def look(engine: Engine) -> None:
    """Finds actions whose time is over. Called at every tick."""
    clocks = engine.clocks
    if engine.config.observe or engine.now - clocks.looked_at < LOOK_SECONDS:
        return
    clocks.looked_at = engine.now
    history = engine.state.history
    for (job_id, slot), state in list(history.states.items()):
        job = engine.state.jobs.get(job_id)
        if state in ACTING and job is not None and not job.ended and slot >= 0:
            _look_at(engine, job, slot, state)
    for job in list(engine.state.jobs.values()):
        if not job.ended:
            for element in engine.cluster.dead(job):
                _look_at_element(engine, job, element)


def _look_at(engine: Engine, job: JobState, slot: int, state: State) -> None:
    history, config = engine.state.history, engine.config
    faults = history.by_slot.get((job.job, slot))
    node = faults[-1].node if faults else ""
    record = job.agents.get(job.element(slot))
    moved = state is State.ISOLATING and record is not None and not record.gone and record.node != node
    lacks = pending(engine.view(job), slot, state, node, engine.cluster.put_aside())
    since = max(history.last.get((job.job, slot), 0.0), job.slot(slot).not_before)
    key, most = (job.job, f"slot {slot}"), limit(config, state, moved)
    if engine.clocks.elapsed(key, since, bool(lacks), engine.now, engine.started_at) < most:
        return
    why = f"not done within {most:g} s: {lacks}"
    decision = action_failed(history, engine.now, job=job.job, slot=slot, why=why, moved=moved)
    cause = faults[-1].cause if faults else "other_software_error"
    failed(engine, job, slot, NAMES[state], decision, cause)


def _look_at_element(engine: Engine, job: JobState, element: int) -> None:
    """An element whose agent died while its node lives is started again by Slurm; it must come back, too."""
    record = job.agents[element]
    waits = job.allotted is None or element in job.allotted
    begun = max((f["detected_at"] for f in job.failures if f["element"] == element), default=0.0)
    key = (job.job, f"agent {record.agent}")
    most = engine.config.restart_seconds
    if engine.clocks.elapsed(key, begun, waits, engine.now, engine.started_at) < most:
        return
    engine.clocks.excused[key] = engine.now
    why = f"no agent came back within {most:g} s; see `squeue -j {job.job}_{element}`"
    reason = f"restart of element {element} on {record.node} failed ({why}): {ISOLATE}"
    decision = Decision(Severity.SEV1, ISOLATE, reason, "action_failed", state=State.ISOLATING)
    failed(engine, job, record.slots[0], RESTART, decision, "exited_abnormally")


def failed(engine: Engine, job: JobState, slot: int, action: str, decision: Decision, cause: str) -> None:
    """An action failed or was refused: records it and carries the next one out."""
    view = engine.agents.get((job.job, job.element(slot)))
    here = view is not None and view.alive
    verdict = engine.classifier.cause(cause, decision.reason)
    failure = failures.record(engine, job, "action", [slot], verdict, decision, "time limit")
    engine.emit(
        "action_failed",
        job.job,
        job.generation,
        slot=slot,
        node=job.node(slot),
        failed=action,
        action=decision.action,
        severity=int(decision.severity),
        state=decision.state.value,
        failure=failure,
        reason=decision.reason,
    )
    engine.clocks.excused[(job.job, f"slot {slot}")] = engine.now
    if here and slot in job.members and job.phase in (Phase.RUNNING, Phase.OFFERING, Phase.ENTERING, Phase.BREAKING):
        engine.drive(job, Signal(Happening.LOSS, decision.reason, {slot: decision.reason}))
    if job.ended:
        return
    isolated = (
        decision.action == ISOLATE and view is not None and engine.cluster.isolate(job, view, failure, decision.reason)
    )
    if not isolated and here:
        incarnation = view.ranks[slot].incarnation + 1 if slot in view.ranks else 0
        failures.start(engine, job, slot, incarnation, engine.now, decision.reason[:200], failure)
    engine.cluster.hurry()
