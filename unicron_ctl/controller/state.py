"""What the controller knows for good, rebuilt from the event log (`fold`); what agents say is not in here."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from detector.escalation import History
from unicron_ctl.protocol.wire import RESTART, Plan, Settings

FAILURES_KEPT = 100
DECISIONS_KEPT = 50
RECENT_STEPS = 9
NODE_EVENTS_KEPT = 20
MARKS_KEPT = 200


@dataclass
class Identity:
    """Which process a slot is: its agent and the incarnation under that agent."""

    agent: str
    incarnation: int


@dataclass
class SlotState:
    """wanted: the incarnation that is to be alive, not started before `not_before`. ready, worked: the last identity
    that could enter, and that finished an iteration. quick_deaths: in a row, without ever being ready. exit_seen: the
    last one handled."""

    wanted: int = 0
    not_before: float = 0.0
    why: str = ""
    ready: Identity | None = None
    worked: Identity | None = None
    quick_deaths: int = 0
    exit_seen: Identity | None = None
    noted: float = 0.0  # the time of the last note that is on record


@dataclass
class AgentRecord:
    """The agent that an element had last."""

    agent: str
    node: str
    address: str
    slots: list[int]
    gone: str = ""


@dataclass
class JobState:
    """One job. `generation` is the highest number ever used. `plan` is the generation that its members are in or enter,
    `offer` the boundary plan that is outstanding. `lost` are the members that the present Break goes on without.
    `restarts`: losses in a row, and `steady` the last generation that has proved itself, in restart mode. `step`: the
    Slurm step that trains."""

    job: str
    settings: Settings
    registered_at: float
    phase: str = "forming"
    since: float = 0.0
    generation: int = 0
    plan: Plan | None = None
    offer: Plan | None = None
    members: dict[int, Identity] = field(default_factory=dict)
    joining: dict[int, Identity] = field(default_factory=dict)
    broken: int = 0
    why: str = ""
    lost: dict[int, Identity] = field(default_factory=dict)
    banished: list[tuple[int, Identity]] = field(default_factory=list)  # (slot, identity): declared lost
    superseded: list[str] = field(default_factory=list)
    agents: dict[int, AgentRecord] = field(default_factory=dict)
    slots: dict[int, SlotState] = field(default_factory=dict)
    allotted: list[int] | None = None
    leaving: list[int] = field(default_factory=list)
    failures: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=FAILURES_KEPT))
    decisions: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=DECISIONS_KEPT))
    iteration: int = -1
    iterations_wanted: int = 0
    loss: float | None = None
    recent: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    measured: dict[int, float] = field(default_factory=dict)
    enter_failures: int = 0
    ended: dict[str, Any] | None = None
    ledger_violations: int = 0
    restarts: int = 0
    steady: int = 0
    step: int = 0

    @property
    def restart_mode(self) -> bool:
        """Its processes know nothing of generations: all are ended and started again together."""
        return self.settings.mode == RESTART

    def slot(self, slot: int) -> SlotState:
        return self.slots.setdefault(slot, SlotState())

    def element(self, slot: int) -> int:
        return slot // max(1, self.settings.ranks_per_node)

    def elements(self, slots: Iterable[int]) -> list[int]:
        return sorted({self.element(slot) for slot in slots})

    def node(self, slot: int) -> str:
        record = self.agents.get(self.element(slot))
        return record.node if record else ""

    @property
    def seconds(self) -> float | None:
        """The median iteration time of the last steps at the present node count."""
        nodes = len(self.elements(self.members))
        times = [seconds for count, seconds, _ in self.recent if count == nodes]
        return statistics.median(times) if times else None


@dataclass(frozen=True)
class HealthReport:
    """at: when the controller heard of it; checked_at: the node's own clock when the checks began."""

    verdict: str
    reason: str
    source: str
    at: float
    checked_at: float


@dataclass
class NodeState:
    """lost_at: when the controller last took it for lost. downed: by us, with this reason. health, paired: the last
    admission checks and the last paired test. unverified: it came back without passing checks. suspicion: why it was
    last set down.
    """

    lost_at: float = 0.0
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NODE_EVENTS_KEPT))
    heard: deque[str] = field(default_factory=lambda: deque(maxlen=MARKS_KEPT))  # agent:number of events taken in
    downed: bool = False
    reason: str = ""
    resumed_at: float = 0.0
    health: HealthReport | None = None
    paired: HealthReport | None = None
    unverified: bool = False
    suspicion: str = ""
    suspected_at: float = 0.0


@dataclass
class ClusterState:
    jobs: dict[str, JobState] = field(default_factory=dict)
    nodes: dict[str, NodeState] = field(default_factory=dict)
    isolated: dict[str, dict[str, Any]] = field(default_factory=dict)  # living nodes set down -> {"at", "job"}
    withheld: dict[str, dict[str, Any]] = field(default_factory=dict)  # not set down -> {"since", "job", "reason"}
    pins: dict[str, dict[str, Any]] = field(default_factory=dict)  # "JOB_ELEMENT" -> {"node", "at"}
    assignment: dict[str, int] = field(default_factory=dict)
    plan_inputs: str = ""
    plan_report: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    last_event: int = 0

    def node(self, name: str) -> NodeState:
        return self.nodes.setdefault(name, NodeState())

    def failure(self, job: str, number: int) -> dict[str, Any] | None:
        """The failure record with that id."""
        state = self.jobs.get(job)
        return next((f for f in state.failures if f["id"] == number), None) if state else None
