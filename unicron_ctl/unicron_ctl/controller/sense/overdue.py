"""Actions that do not finish: each has a time limit, whose expiry leads to the next severity.

The escalation's memory (`fault_history.History`) knows which action runs for a slot, so a restarted controller goes on
with it. The clock stands still while the action waits for something else (`LACKS`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from unicron_ctl.controller.model.agent_view import CAN_ENTER, AgentView
from unicron_ctl.controller.model.finding import Finding, Source, What
from unicron_ctl.controller.model.job_state import AGENT_DIED, AgentRecord, JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.live import look_again
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.sense.progress import last_copy
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_detector.failures.escalation_table import RESTART, RUNNING, State
from unicron_detector.failures.fault_history import WHOLE_JOB

CHECK_SECONDS = 0.5  # between two checks of a job's actions
MANY = 100  # actions that begin between two checks
COSTS = 10  # times the usual pace of checks: 16,384 ranks that are being started are checked every eight seconds


@dataclass
class ActionClocks:
    """The clocks of a job's actions."""

    check_at: float = 0.0
    paced_for: int = 0
    """The number of actions when the next check was planned."""
    excused: dict[str, float] = field(default_factory=dict)
    """Action -> when it last waited for something else."""

    def elapsed_seconds(self, action: str, since: float, waits: bool, view: View) -> float:
        """Return how long the action has run. After a restart it begins at 0, since the time before is not known."""
        if not waits:
            self.excused[action] = view.now
        return view.now - max(since, view.started_at, self.excused.get(action, 0.0))


def time_limit(config: ControllerConfig, state: State, moved: bool) -> float:
    """Return the seconds that the running action may take."""
    if state is State.REATTEMPTING:
        return config.regroup_seconds
    return config.isolate_seconds if state is State.ISOLATING and not moved else config.restart_seconds


@dataclass(frozen=True)
class Action:
    """A slot's running action."""

    job: JobView
    slot: int
    state: State
    node: str  # where the fault was
    record: AgentRecord
    agent: AgentView | None
    status: RankStatus | None
    leaves: bool
    """The job leaves the agent's node, or the node must get no work."""

    @property
    def isolates(self) -> bool:
        return self.state is State.ISOLATING

    @property
    def known(self) -> JobState:
        return self.job.state

    @property
    def rank(self) -> str:
        return self.status.state if self.status is not None else ""

    @property
    def inside(self) -> bool:
        return self.slot in self.known.members

    @property
    def apart(self) -> bool:
        """The slot waits outside the job's generation."""
        return not self.inside and self.rank in CAN_ENTER


LACKS: tuple[tuple[Callable[[Action], object], str], ...] = (
    (lambda a: a.record.gone and a.known.settings.allocation, ""),  # nobody comes in its place
    (lambda a: a.isolates and a.record.gone, "its element has a place in the plan, and no agent came"),
    (lambda a: a.record.gone or a.agent is None or not a.agent.alive, ""),  # the lease and Slurm handle that
    (lambda a: a.status is None or a.job.finished(a.slot), ""),
    (lambda a: a.isolates and a.record.node == a.node and a.leaves, "its agent on {node} still runs"),
    (lambda a: a.rank in ("starting", "exited"), "its process (incarnation {incarnation}) is not ready"),
    # The monitor judges its iterations.
    (lambda a: a.known.phase in (Phase.RUNNING, Phase.OFFERING) and a.inside and a.rank == "running", ""),
    # It waits for others, or is late to stop, which has its own limits.
    (lambda a: a.known.phase in (Phase.FORMING, Phase.BREAKING) or a.leaves, ""),
    # A transfer is judged by its progress.
    (lambda a: a.known.phase in (Phase.ENTERING, Phase.OFFERING) and a.rank == "entering", ""),
    (lambda a: last_copy(a.job, a.slot), ""),  # no time limit ends it
    (lambda a: a.known.replica > 1 and a.apart, ""),  # it waits for the other ranks of a replica
    (lambda a: a.known.settings.spares and a.apart, ""),  # it waits as a spare
    # Newcomers may be kept waiting for the next world (`job.modes.worth`).
    (lambda a: not a.known.mode.joins and a.rank == "waiting", ""),
    (lambda a: True, "it is {rank} while the job is {phase}"),
)
"""The first row that holds says what an action still lacks; an empty text means that it waits for something else."""


def lacking(job: JobView, slot: int, state: State, node: str, unfit: set[str]) -> str:
    """Return what the running action still lacks; empty if it is done or waits for something else.

    node: where the fault was. unfit: nodes that must get no work.
    """
    known, element = job.state, job.state.element(slot)
    unplanned = known.allotted is not None and element not in known.allotted
    record, agent = known.agents.get(element), job.agents.get(element)
    if known.over or element in known.parted or unplanned or element in known.leaving or record is None:
        return ""
    leaves = record.node in unfit or known.moves(element)
    status = agent.ranks.get(slot) if agent is not None else None
    action = Action(job, slot, state, node, record, agent, status, leaves)
    words = next(words for holds, words in LACKS if holds(action))
    incarnation = status.incarnation if status is not None else -1
    return words.format(node=node, incarnation=incarnation, rank=action.rank, phase=known.phase)


def check_actions(view: View, job: JobView, clocks: ActionClocks) -> Outcome:
    """Report actions of the job whose time is over. Checks twice a second, and less often while all ranks of a large
    job are being started."""
    out, history = Outcome(), view.state.history
    if view.now < clocks.check_at:
        return out
    state = job.state
    slots, before = history.acting(state.job), clocks.paced_for
    clocks.paced_for = len(slots)
    clocks.check_at = look_again(view.now, COSTS * len(slots), CHECK_SECONDS)
    if len(slots) > 2 * max(before, MANY):
        return out  # so many have just begun: nothing to report yet, and more urgent work
    for slot in slots:
        if slot != WHOLE_JOB:
            _check_slot(view, job, clocks, slot, history.states[state.job, slot], out)
    for element, record in state.agents.items() if not state.settings.allocation else ():
        if record.gone == AGENT_DIED:
            _check_element(view, job, clocks, element, out)
    return out


def _check_slot(view: View, job: JobView, clocks: ActionClocks, slot: int, state: State, out: Outcome) -> None:
    history, known = view.state.history, job.state
    faults = history.of_slot(known.job, slot)
    node = faults[-1].node if faults else ""
    record = known.agents.get(known.element(slot))
    moved = state is State.ISOLATING and record is not None and not record.gone and record.node != node
    lacks = lacking(job, slot, state, node, view.state.out_of_service)
    since = max(history.last.get((known.job, slot), 0.0), known.slot(slot).not_before)
    action, most = f"slot {slot}", time_limit(view.config, state, moved)
    if clocks.elapsed_seconds(action, since, bool(lacks), view) < most:
        return
    clocks.excused[action] = view.now
    found = _overdue(view, known, slot, f"not done within {most:g} s: {lacks}", RUNNING[state])
    out.findings.append(replace(found, node=known.node(slot), moved=moved))


def _check_element(view: View, job: JobView, clocks: ActionClocks, element: int, out: Outcome) -> None:
    """Check an element of which only the agent died: Slurm starts it again, and an agent must come back."""
    state, record = job.state, job.state.agents[element]
    waits = state.allotted is None or element in state.allotted
    begun = max((f.detected_at for f in state.failures if f.record.element == element), default=0.0)
    action, most = f"agent {record.agent}", view.config.restart_seconds
    if clocks.elapsed_seconds(action, begun, waits, view) < most:
        return
    clocks.excused[action] = view.now
    evidence = f"no agent came back within {most:g} s; see `squeue -j {state.label(element)}`"
    found = _overdue(view, state, record.slots[0], evidence, RESTART)
    out.findings.append(replace(found, element=element, node=record.node))


def _overdue(view: View, job: JobState, slot: int, evidence: str, action: str) -> Finding:
    return Finding(What.ACTION, job.job, (slot,), view.now, Source.CLOCK, evidence, by="time limit", action=action)
