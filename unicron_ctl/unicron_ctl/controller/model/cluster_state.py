"""The controller's durable state; only the rules of `model.fold` change it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.node_state import NodeState
from unicron_ctl.shared.log.records import ObservedWeek
from unicron_ctl.shared.log.thinning import DAY
from unicron_detector.failures.fault_history import History

TAKES_KEPT = 5000
RESULTS_HALF_LIFE = 7 * DAY
REQUEUES = ("requeue", "requeue_hold")
HOLDS = ("hold", "requeue_hold")
GIVES_BACK = (*REQUEUES, "shrink")  # actions that take nodes from a job
TAKES = (*GIVES_BACK, "hold")  # actions that take something from a job


@dataclass(frozen=True)
class Pin:
    """A node to which an element was pinned."""

    node: str
    at: float


@dataclass(frozen=True)
class Mark:
    """An action that was done, or prevented, for a job."""

    at: float
    job: str
    reason: str = ""


@dataclass(frozen=True)
class Take:
    """A request to Slurm that takes an element from a job."""

    at: float
    action: str
    job: str
    element: int
    preempted: bool = False
    """Slurm was taking the element already."""


@dataclass(frozen=True)
class Intent:
    """A request to Slurm without an outcome yet."""

    at: float
    reason: str
    restarts: int
    """Slurm's requeues of the element before; -1 if unknown."""


@dataclass(frozen=True)
class DeferredTake:
    """A lost node that is not taken out of service yet."""

    failure: int
    text: str
    """The reason that Slurm would be given."""


@dataclass(frozen=True)
class PlanReport:
    """The planner's last result."""

    time: float
    reasons: Mapping[str, str]
    objective: float
    waf: float
    trigger: str


@dataclass
class PairResults:
    """Outcomes of pair tests for one kind of evidence, at one time. A week halves what they count: else what such
    evidence was worth once would decide for good, and without a test nothing new is learned."""

    tested: float = 0.0
    confirmed: float = 0.0
    """Tests in which the node was bad or slow."""
    at: float = 0.0

    def of(self, now: float) -> PairResults:
        """Return what they count now."""
        left = 0.5 ** (max(0.0, now - self.at) / RESULTS_HALF_LIFE)
        return PairResults(self.tested * left, self.confirmed * left, max(self.at, now))


@dataclass
class ClusterState:
    """All jobs and nodes, and the history of the escalation."""

    jobs: dict[str, JobState] = field(default_factory=dict)
    nodes: dict[str, NodeState] = field(default_factory=dict)
    isolated: dict[str, Mark] = field(default_factory=dict)
    """Nodes that were taken out of service or switched off, also those given back since."""
    withheld: dict[str, Mark] = field(default_factory=dict)
    """Nodes that should have been taken out of service, or left by a job, and were not."""
    taken: deque[Take] = field(default_factory=lambda: deque(maxlen=TAKES_KEPT))
    """The elements requeued or held last."""
    withheld_takes: dict[str, Mark] = field(default_factory=dict)
    """Requests that a limit prevented, by action and job; `Mark.reason` names the limit."""
    intents: dict[tuple[str, str, int, str], Intent] = field(default_factory=dict)
    """Requests to Slurm without an outcome yet, by (action, job, element, node)."""
    deferred: dict[tuple[str, str, int], DeferredTake] = field(default_factory=dict)
    """Lost nodes that are taken out once silence counts again, by (node, job, element): each loss there is a reason."""
    pins: dict[tuple[str, int], Pin] = field(default_factory=dict)
    held: set[tuple[str, int]] = field(default_factory=set)
    """(job, element) held by this controller and not released since: holds by others are never touched."""
    once_held: dict[tuple[str, int], float] = field(default_factory=dict)
    """All that were ever held, with the time of the last hold or release, as request or as outcome."""
    assignment: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    """The planned layout of each job with several."""
    plan_inputs: str = ""
    plan_report: PlanReport | None = None
    observed_since: float = 0.0
    """When the summary of calls not made begins; 0 when nothing is only observed."""
    observed_after: int = 0
    """The last event before that."""
    observed_week: ObservedWeek | None = None
    paused: dict[str, float] = field(default_factory=dict)
    """Partitions ("" for all) that an admin has paused, and until when; 0 for no end."""
    attention: dict[str, float] = field(default_factory=dict)
    """Matters for an admin, by key, and when each was recorded."""
    told: dict[str, int] = field(default_factory=dict)
    """Target of [notify] -> the last event that it has got."""
    history: History = field(default_factory=History)
    pair_seconds: dict[str, deque[float]] = field(default_factory=dict)
    """Partition and backend -> seconds for a gigabyte of the last pairs that were sound."""
    pair_results: dict[str, PairResults] = field(default_factory=dict)
    """By the evidence that led to the test."""
    out_of_service: set[str] = field(default_factory=set)
    """Nodes that get no work from this controller, even while Slurm does not show them so yet."""
    ended: list[str] = field(default_factory=list)
    """The jobs that ended last, oldest first; earlier ones are forgotten."""
    last_event: int = 0

    def is_paused(self, partition: str, now: float) -> bool:
        """Whether an admin has paused this partition."""
        ends = [self.paused[name] for name in ("", partition) if name in self.paused]
        return any(not until or now < until for until in ends)

    def node(self, name: str) -> NodeState:
        """Return the state of a node, without adding one."""
        return self.nodes.get(name) or NodeState()
