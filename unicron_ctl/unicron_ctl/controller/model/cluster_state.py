"""The whole of what the controller knows for good; changed by the rules of `model.fold` and by nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.node_state import NodeState
from unicron_ctl.shared.log.records import ObservedWeek
from unicron_detector.failures.fault_history import History

TAKES_KEPT = 5000
REQUEUES = ("requeue", "requeue_hold")
HOLDS = ("hold", "requeue_hold")
GIVES_BACK = (*REQUEUES, "shrink")  # actions that take nodes from a job
TAKES = (*GIVES_BACK, "hold")  # actions that take something from a job


@dataclass(frozen=True)
class Pin:
    """An element that was told to start on a node."""

    node: str
    at: float


@dataclass(frozen=True)
class Mark:
    """When something was done, for which job, and why."""

    at: float
    job: str
    reason: str = ""


@dataclass(frozen=True)
class Take:
    """A request to Slurm that takes something from a job. preempted: Slurm was taking it already."""

    at: float
    action: str
    job: str
    element: int
    preempted: bool = False


@dataclass(frozen=True)
class Intent:
    """A request to Slurm that is not known to be done. restarts: of the element before, -1 where not known."""

    at: float
    reason: str
    restarts: int


@dataclass(frozen=True)
class DeferredTake:
    """A lost node that is not taken out of service yet: for which failure, and the reason that Slurm would be given."""

    failure: int
    text: str


@dataclass(frozen=True)
class PlanReport:
    """The planner's last word."""

    time: float
    reasons: Mapping[str, str]
    objective: float
    waf: float
    trigger: str


@dataclass
class ClusterState:
    """All jobs and nodes, and the escalation's memory."""

    jobs: dict[str, JobState] = field(default_factory=dict)
    nodes: dict[str, NodeState] = field(default_factory=dict)
    isolated: dict[str, Mark] = field(default_factory=dict)
    """Nodes that were taken out of service, whoever has given them back since."""
    withheld: dict[str, Mark] = field(default_factory=dict)
    """Nodes that should have been, or that a job should have left, and were not."""
    taken: deque[Take] = field(default_factory=lambda: deque(maxlen=TAKES_KEPT))
    """Elements that were requeued or held, the last ones."""
    withheld_takes: dict[str, Mark] = field(default_factory=dict)
    """The same that a limit kept from being asked, by action and job; `Mark.reason` says which."""
    intents: dict[tuple[str, str, int, str], Intent] = field(default_factory=dict)
    """What was asked of Slurm and is not known to be done, by (action, job, element, node)."""
    deferred: dict[tuple[str, str, int], DeferredTake] = field(default_factory=dict)
    """Lost nodes that are taken once silence is to be believed again, by (node, job, element): each that was lost there
    speaks for it."""
    pins: dict[tuple[str, int], Pin] = field(default_factory=dict)
    held: set[tuple[str, int]] = field(default_factory=set)
    """(job, element) that were held here and not released since: nobody else's hold is touched."""
    once_held: dict[tuple[str, int], float] = field(default_factory=dict)
    """Those that were ever held here, and when that, or their release, was asked for or done last."""
    assignment: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    """As planned, by job that has several."""
    plan_inputs: str = ""
    plan_report: PlanReport | None = None
    observed_since: float = 0.0
    """Since when calls that are not made are summed up, and after which event; 0 when nothing is only observed."""
    observed_after: int = 0
    observed_week: ObservedWeek | None = None
    paused: dict[str, float] = field(default_factory=dict)
    """Partitions ("" for all) in which an admin has nothing changed in Slurm, until when; 0 for no end."""
    attention: dict[str, float] = field(default_factory=dict)
    """What needs an admin, by key, and since when that is on record."""
    told: dict[str, int] = field(default_factory=dict)
    """Target of [notify] -> the last event of which it needs to hear no more."""
    history: History = field(default_factory=History)
    out_of_service: set[str] = field(default_factory=set)
    """Nodes that must get no work of ours now, whatever Slurm says of them yet."""
    ended: list[str] = field(default_factory=list)
    """The jobs that ended last, oldest first; those before them are forgotten."""
    last_event: int = 0

    def is_paused(self, partition: str, now: float) -> bool:
        """An admin has nothing changed in Slurm for this partition now."""
        ends = [self.paused[name] for name in ("", partition) if name in self.paused]
        return any(not until or now < until for until in ends)

    def node(self, name: str) -> NodeState:
        """Return the state of a node; reading adds nothing."""
        return self.nodes.get(name) or NodeState()
