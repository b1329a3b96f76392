"""What deciders read (:class:`View`) and what they return (:class:`Outcome`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from detector.classify import Classifier
from unicron_ctl.config import ControllerConfig
from unicron_ctl.controller.log.records import Record
from unicron_ctl.controller.model.cluster import ClusterState
from unicron_ctl.controller.model.finding import Finding
from unicron_ctl.controller.model.job import JobState
from unicron_ctl.controller.model.live import AgentView, JobView, Live, LiveJob, Route
from unicron_ctl.protocol import wire
from unicron_ctl.slurm.client import ElementInfo, NodeInfo


@dataclass
class Listing:
    """What Slurm showed, and when it was asked (seconds since the epoch)."""

    asked_at: float
    nodes: Sequence[NodeInfo]
    elements: Sequence[ElementInfo]

    def __post_init__(self) -> None:
        self.by_name = {node.name: node for node in self.nodes}
        self.by_job: dict[str, dict[int, ElementInfo]] = {}
        for element in self.elements:
            self.by_job.setdefault(element.job, {})[element.element] = element

    def of(self, job: str) -> dict[int, ElementInfo]:
        """The job's elements by number."""
        return self.by_job.get(job, {})


@dataclass
class SlurmView:
    """Slurm as it last showed itself. "No answer" is never read as "clean": without a listing nothing is decided."""

    used: bool = False
    seen: Listing | None = None
    error: str = ""
    private: frozenset[str] = frozenset()
    """Slurm's PrivateData: kinds of things that users see of their own only."""
    expected: dict[str, list[int]] = field(default_factory=dict)
    """job -> elements that run or are about to, by the last placement."""
    probing: set[str] = field(default_factory=set)
    """Nodes whose slurmd is being asked whether it is there."""

    def node(self, name: str) -> NodeInfo | None:
        return self.seen.by_name.get(name) if self.seen else None


@dataclass
class View:
    """Everything that a decider may look at. It changes nothing in it."""

    config: ControllerConfig
    classifier: Classifier
    state: ClusterState
    live: Live
    slurm: SlurmView
    now: float
    started_at: float
    """When this controller started; later by as long as it stood still."""
    views: dict[str, JobView] = field(default_factory=dict)

    def job(self, state: JobState) -> JobView:
        """The job with what its agents say."""
        found = self.views.get(state.job)
        if found is None or found.state is not state:
            live = self.live.jobs.setdefault(state.job, LiveJob())
            found = self.views[state.job] = JobView(state, live)
        return found

    def shown_node(self, job: JobState, element: int) -> NodeInfo | None:
        """The node on which Slurm has shown this element of the job at work. Where it has not, or Slurm is not used,
        None: nothing may be done to a node on an agent's word alone."""
        agent = job.agents.get(element)
        sure = self.slurm.used and job.submitted and agent is not None and agent.confirmed
        return self.slurm.node(agent.node) if sure and agent is not None else None

    def unfit(self, node: str) -> bool:
        """The node must get no work of ours now."""
        return node in self.state.out_of_service

    def expected(self, job: JobState) -> list[int] | None:
        """Elements that run or are about to; None while that is not known freshly enough."""
        seen = self.slurm.seen
        if not self.slurm.used or seen is None or job.job not in self.slurm.expected:
            return None
        late = seen.asked_at < self.job(job).live.last_arrival
        return None if late else self.slurm.expected[job.job]


@dataclass(frozen=True)
class Send:
    """One message to one agent."""

    route: Route
    message: wire.Message


@dataclass
class Outcome:
    """What a decider wants: records for the log, messages, slow work, and findings for the judge. Empty means that
    there is nothing to do."""

    records: list[tuple[str, int, Record]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    hurry: bool = False
    """Slurm should be asked soon."""

    def __bool__(self) -> bool:
        return bool(self.records or self.findings or self.sends or self.requests)

    def record(self, job: JobState | None, record: Record, generation: int | None = None) -> None:
        """Adds a record; its generation is the job's present one unless another is named."""
        number = generation if generation is not None else job.generation if job else 0
        self.records.append((job.job if job else "", number, record))

    def send(self, view: AgentView, message: wire.Message) -> None:
        self.sends.append(Send(view.route, message))

    def merge(self, others: Iterable[Outcome]) -> Outcome:
        """This with the others after it."""
        for other in others:
            self.records += other.records
            self.findings += other.findings
            self.sends += other.sends
            self.requests += other.requests
            self.hurry = self.hurry or other.hurry
        return self
