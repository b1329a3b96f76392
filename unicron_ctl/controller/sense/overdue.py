"""Actions that do not come to their end: each has a time limit, whose expiry leads to the next severity.

Which action runs for a slot is the escalation's memory (`escalation.History`), so a restarted controller goes
on with it. The clock stands still while the action waits for somebody else: for a plan that gives the element a node,
for other nodes without which the job cannot form, for the monitor that judges iterations once the slot is in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from unicron.ctl.controller.model.agent_view import CAN_ENTER
from unicron.ctl.controller.model.finding import Finding, Source, What
from unicron.ctl.controller.model.job_state import AGENT_DIED, JobState, Phase
from unicron.ctl.controller.model.job_view import JobView
from unicron.ctl.controller.model.pacing import look_again
from unicron.ctl.controller.model.view import View
from unicron.ctl.controller.sense.progress import last_copy
from unicron.ctl.settings.config import ControllerConfig
from unicron.detector.failures.escalation import RESTART, RUNNING, WHOLE_JOB, State

LOOK_SECONDS = 0.5
MANY = 100  # actions that begin between two looks
COSTS = 10  # times what pacing counts for a rank: 16,384 that are being started are looked at every eight seconds


@dataclass
class Clocks:
    """When an action was last seen to wait for somebody else; lost with the process. Times in seconds."""

    look_at: dict[str, float] = field(default_factory=dict)
    paced_for: dict[str, int] = field(default_factory=dict)  # job -> actions when its next look was planned
    excused: dict[tuple[str, str], float] = field(default_factory=dict)  # (job, what) -> when

    def elapsed(self, key: tuple[str, str], since: float, waits: bool, now: float, started_at: float) -> float:
        """How long the action has run. A restarted controller does not know what happened before: it begins at 0."""
        if not waits:
            self.excused[key] = now
        return now - max(since, started_at, self.excused.get(key, 0.0))

    def forget(self, job: str) -> None:
        self.excused = {key: at for key, at in self.excused.items() if key[0] != job}
        self.look_at.pop(job, None)
        self.paced_for.pop(job, None)


def limit(config: ControllerConfig, state: State, moved: bool) -> float:
    """Seconds that the running action may take."""
    if state is State.REATTEMPTING:
        return config.regroup_seconds
    return config.isolate_seconds if state is State.ISOLATING and not moved else config.restart_seconds


def pending(job: JobView, slot: int, state: State, node: str, unfit: set[str]) -> str:
    """What the running action still lacks; empty while it is done, or waits for somebody else.

    node: where the fault was. unfit: nodes that must get no work.
    """
    known, element = job.state, job.state.element(slot)
    if (
        known.over
        or element in known.parted
        or (known.allotted is not None and element not in known.allotted)
        or element in known.leaving
    ):
        return ""
    record, agent = known.agents.get(element), job.agents.get(element)
    if record is None:
        return ""
    if state is State.ISOLATING and record.gone:
        return f"element {element} has a place in the plan, and no agent came"
    if record.gone or agent is None or not agent.alive:
        return ""  # the lease and Slurm see to that
    status = agent.ranks.get(slot)
    if status is None or job.finished(slot):
        return ""
    leaves = record.node in unfit or known.moves(element)
    if state is State.ISOLATING and record.node == node and leaves:
        return f"its agent on {node} still runs"
    if status.state in ("starting", "exited"):
        return f"its process (incarnation {status.incarnation}) is not ready"
    if known.phase in (Phase.RUNNING, Phase.OFFERING) and slot in known.members and status.state == "running":
        return ""  # the monitor judges its iterations
    if known.phase in (Phase.FORMING, Phase.BREAKING) or leaves:
        return ""  # it waits for others, or is late to stop, which has limits of its own
    if known.phase in (Phase.ENTERING, Phase.OFFERING) and status.state == "entering":
        return ""  # a transfer is judged by its progress
    if last_copy(job, slot):
        return ""  # no time limit ends it
    if known.replica > 1 and slot not in known.members and status.state in CAN_ENTER:
        return ""  # it waits for the other ranks of a replica
    if known.settings.spares and slot not in known.members and status.state in CAN_ENTER:
        return ""  # it waits as a spare
    if not known.mode.joins and status.state == "waiting":
        return ""  # newcomers may be kept waiting for the next world (`job.modes.worth`)
    return f"it is {status.state} while the job is {known.phase}"


def look(view: View, clocks: Clocks, job: JobState) -> Iterator[Finding]:
    """Actions of the job whose time is over. Called at every tick, looks twice a second, and less often where all
    ranks of a large job are being started."""
    if view.now < clocks.look_at.get(job.job, 0.0):
        return
    history = view.state.history
    slots = history.acting(job.job)
    before = clocks.paced_for.get(job.job, 0)
    clocks.paced_for[job.job] = len(slots)
    clocks.look_at[job.job] = look_again(view.now, COSTS * len(slots), LOOK_SECONDS)
    if len(slots) > 2 * max(before, MANY):
        return  # so many have just begun: there is nothing to see yet, and more urgent work
    for slot in slots:
        if slot != WHOLE_JOB:
            yield from _slot(view, clocks, job, slot, history.states[job.job, slot])
    for element, record in job.agents.items():
        if record.gone == AGENT_DIED:
            yield from _element(view, clocks, job, element)


def _slot(view: View, clocks: Clocks, job: JobState, slot: int, state: State) -> Iterator[Finding]:
    history, config = view.state.history, view.config
    faults = history.by_slot.get((job.job, slot))
    node = faults[-1].node if faults else ""
    record = job.agents.get(job.element(slot))
    moved = state is State.ISOLATING and record is not None and not record.gone and record.node != node
    lacks = pending(view.job(job), slot, state, node, view.state.out_of_service)
    since = max(history.last.get((job.job, slot), 0.0), job.slot(slot).not_before)
    key, most = (job.job, f"slot {slot}"), limit(config, state, moved)
    if clocks.elapsed(key, since, bool(lacks), view.now, view.started_at) < most:
        return
    clocks.excused[key] = view.now
    yield Finding(
        What.ACTION,
        job.job,
        (slot,),
        view.now,
        Source.CLOCK,
        f"not done within {most:g} s: {lacks}",
        node=job.node(slot),
        by="time limit",
        action=RUNNING[state],
        moved=moved,
    )


def _element(view: View, clocks: Clocks, job: JobState, element: int) -> Iterator[Finding]:
    """An element whose agent alone died is started again by Slurm; it must come back, too."""
    record = job.agents[element]
    waits = job.allotted is None or element in job.allotted
    begun = max((f.detected_at for f in job.failures if f.element == element), default=0.0)
    key, most = (job.job, f"agent {record.agent}"), view.config.restart_seconds
    if clocks.elapsed(key, begun, waits, view.now, view.started_at) < most:
        return
    clocks.excused[key] = view.now
    yield Finding(
        What.ACTION,
        job.job,
        (record.slots[0],),
        view.now,
        Source.CLOCK,
        f"no agent came back within {most:g} s; see `squeue -j {job.job}_{element}`",
        element=element,
        node=record.node,
        by="time limit",
        action=RESTART,
    )
