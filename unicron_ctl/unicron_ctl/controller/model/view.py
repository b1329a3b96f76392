"""The input of deciders (:class:`View`) and their result (:class:`Outcome`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from unicron_ctl.controller.model.agent_view import AgentView, Route
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.finding import Finding
from unicron_ctl.controller.model.job_state import AgentRecord, JobState
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.suspicion import Suspicions
from unicron_ctl.shared.log.records import Record
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.settings.partitions import Rules
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo
from unicron_ctl.shared.slurm.squeue import nodes_of
from unicron_detector.failures.classify import Classifier

SUSPECT_SECONDS = (
    86400.0  # as long as a flapping node is remembered (unicron_detector.failures.fault_history.Policy.flap_window)
)
WAITS_FOR_NODES = frozenset({"", "None", "Priority", "Resources"})  # other reasons have nothing to do with nodes


@dataclass
class Listing:
    """Slurm's nodes and elements."""

    asked_at: float
    """When Slurm was asked, in seconds since the epoch."""
    nodes: Sequence[NodeInfo]
    elements: Sequence[ElementInfo]
    """An entry for each node of an element with several."""
    rows: Sequence[ElementInfo] = ()
    """Each element as Slurm allocates it; the same as `elements` if none has several nodes."""

    def __post_init__(self) -> None:
        self.by_name = {node.name: node for node in self.nodes}
        self.rows = self.rows or self.elements
        self.by_job, self.rows_by_job = (_by_job(listed) for listed in (self.elements, self.rows))
        self._names: dict[str, Mapping[str, int]] = {}
        self._partitions: dict[str, frozenset[str]] = {}
        self.grounds: dict[frozenset[str], Any] = {}  # results of `plan.reach`, by the jobs they hold for

    def nodes_of(self, element: ElementInfo) -> Mapping[str, int]:
        """The names of the element's nodes, each with its place; parsed once."""
        text = element.node or ""
        found = self._names.get(text)
        if found is None:
            found = self._names[text] = {name: place for place, name in enumerate(nodes_of(element))}
        return found

    def partitions(self, job: str) -> frozenset[str]:
        """The partitions of the job's elements; parsed once."""
        found = self._partitions.get(job)
        if found is None:
            listed = {element.partition for element in self.of(job).values()}
            found = self._partitions[job] = frozenset(name for text in listed for name in text.split(","))
        return found

    @cached_property
    def sorts(self) -> list[list[NodeInfo]]:
        """The nodes, grouped so that Slurm's scheduler cannot tell those of a group apart."""
        found: dict[tuple[object, ...], list[NodeInfo]] = {}
        for node in self.nodes:
            key = (node.partitions, node.features, node.gres, node.reservations, node.size, node.limits)
            found.setdefault(key, []).append(node)
        return list(found.values())

    @cached_property
    def waiting(self) -> list[ElementInfo]:
        """Elements that wait for nodes and for nothing else, in the order in which Slurm starts them."""
        found = [e for e in self.rows if e.state == "PENDING" and not e.held and e.reason in WAITS_FOR_NODES]
        return sorted(found, key=lambda e: (-e.priority, e.job, e.element))

    @cached_property
    def by_node(self) -> dict[str, list[ElementInfo]]:
        """The elements on each node, by its name; elements that ended too, while Slurm shows their nodes."""
        found: dict[str, list[ElementInfo]] = {}
        for element in self.elements:
            for name in self.nodes_of(element) if element.node else ():
                found.setdefault(name, []).append(element)
        return found

    def of(self, job: str) -> dict[int, ElementInfo]:
        """The job's elements by number, one for each node."""
        return self.by_job.get(job, {})

    def rows_of(self, job: str) -> dict[int, ElementInfo]:
        """The job's elements by Slurm's own number."""
        return self.rows_by_job.get(job, {})


def _by_job(listed: Sequence[ElementInfo]) -> dict[str, dict[int, ElementInfo]]:
    found: dict[str, dict[int, ElementInfo]] = {}
    for element in (element for element in listed if not element.brief):  # brief ones carry no details of a job
        found.setdefault(element.job, {})[element.element] = element
    return found


@dataclass
class SlurmView:
    """Slurm's last answers. "No answer" is never read as "clean": without a listing nothing is decided."""

    used: bool = False
    seen: Listing | None = None
    error: str = ""
    """Why Slurm has not answered since `error_since`."""
    error_since: float = 0.0
    error_logged: float = 0.0
    """When a reason was last logged."""
    private: frozenset[str] = frozenset()
    """Slurm's PrivateData: the kinds of entries of which a user sees only their own."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """node -> the leaf switch or block with which it fails; empty if Slurm knows no topology."""
    kill_wait: float = 30.0
    """Seconds from SIGTERM to SIGKILL when an element is to end."""
    grace: Mapping[str, float] = field(default_factory=dict)
    """partition -> seconds from the first SIGTERM to the end, when an element is preempted."""
    shrinks: int = 0
    """Number of times that Slurm can take nodes from a running job on request."""
    expected: dict[str, list[int]] = field(default_factory=dict)
    """job -> elements that run or are about to start, by the last placement."""

    def node(self, name: str) -> NodeInfo | None:
        return self.seen.by_name.get(name) if self.seen else None


@dataclass
class Live:
    """All agents of all jobs."""

    jobs: dict[str, JobView] = field(default_factory=dict)
    leases: OrderedDict[tuple[str, int], AgentView] = field(default_factory=OrderedDict)
    """Living agents, the longest silent one first."""
    suspects: dict[tuple[str, int], AgentView] = field(default_factory=dict)
    """Living agents that have ended according to Slurm."""
    greet_at: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """node -> when its slurmd is tried next, the soonest first."""
    greeted: set[str] = field(default_factory=set)
    """Nodes whose slurmds are being tried."""
    slurmds: dict[str, str] = field(default_factory=dict)
    """node -> "host:port" at which this controller has reached its slurmd."""
    by_node: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    """Public keys of registered agents."""

    def agent(self, job: str, element: int) -> AgentView | None:
        live = self.jobs.get(job)
        return live.agents.get(element) if live else None

    def agents(self) -> Iterator[AgentView]:
        for live in self.jobs.values():
            yield from live.agents.values()

    def on_node(self, node: str) -> list[AgentView]:
        """Agents on the node, in order of job and element."""
        found = (self.agent(*key) for key in sorted(self.by_node.get(node, ())))
        return [agent for agent in found if agent is not None]

    def add(self, agent: AgentView) -> None:
        self.remove(agent.job, agent.element)
        if (job := self.jobs.get(agent.job)) is not None:
            job.agents[agent.element] = agent
        self.by_node.setdefault(agent.node, set()).add((agent.job, agent.element))
        if agent.key:
            self.keys.add(agent.key)
        self.greet_at[agent.node] = 0.0
        self.greet_at.move_to_end(agent.node, last=False)
        self.note_word(agent, agent.last_heard)

    def remove(self, job: str, element: int) -> None:
        live = self.jobs.get(job)
        agent = live.agents.pop(element, None) if live else None
        if agent is None or live is None:
            return
        self.keys.discard(agent.key)
        live.ready.discard(element)
        live.touched.discard(element)
        live.restarts.discard(element)
        self.leases.pop((job, element), None)
        self.suspects.pop((job, element), None)
        here = self.by_node.get(agent.node, set())
        here.discard((job, element))
        if not here:
            self.by_node.pop(agent.node, None)
            self.greet_at.pop(agent.node, None)

    def forget(self, job: str) -> None:
        """Drop a job that has ended."""
        for element in list(self.jobs[job].agents) if job in self.jobs else ():
            self.remove(job, element)
        self.jobs.pop(job, None)

    def note_word(self, agent: AgentView, now: float) -> None:
        """Renews the lease of an agent that was heard."""
        agent.last_heard = now
        key = agent.job, agent.element
        if agent.alive:
            self.leases[key] = agent
            self.leases.move_to_end(key)
        if agent.suspect_since is not None:
            agent.suspect_since = None
            self.suspects.pop(key, None)

    def drop_lease(self, agent: AgentView) -> None:
        """Ends the lease of an agent that has expired or left."""
        self.leases.pop((agent.job, agent.element), None)
        self.suspects.pop((agent.job, agent.element), None)

    def suspect(self, agent: AgentView, now: float) -> None:
        """Marks an agent that has ended according to Slurm."""
        agent.suspect_since = now
        self.suspects[agent.job, agent.element] = agent

    def renew(self, now: float) -> None:
        """Renews all leases: no agent could be heard."""
        for agent in self.agents():
            agent.last_heard = now

    def shift(self, seconds: float) -> None:
        """Moves all times by as long as this process stood still: no agent was late meanwhile."""
        for live in self.jobs.values():
            live.stalled += seconds
            live.stopped = {slot: at + seconds for slot, at in live.stopped.items()}
            live.ahead_since += seconds if live.ahead_since else 0.0
        for agent in self.agents():
            agent.last_heard += seconds
            if agent.suspect_since is not None:
                agent.suspect_since += seconds
            agent.progress = {slot: at + seconds for slot, at in agent.progress.items()}
            agent.came = {slot: at + seconds for slot, at in agent.came.items()}
            agent.began = {slot: at + seconds for slot, at in agent.began.items()}


@dataclass
class View:
    """Everything that a decider may read; it changes nothing here."""

    config: ControllerConfig
    classifier: Classifier
    state: ClusterState
    live: Live
    slurm: SlurmView
    now: float
    """Seconds since the epoch."""
    started_at: float
    """When this controller started; later by as long as it stood still."""
    suspicions: Suspicions = field(default_factory=Suspicions)
    """Open questions about silent agents and their nodes; only the failure detector changes them."""
    unread: Callable[[Route], bool] = lambda route: False
    """Whether messages of this connection wait to be read: then its agent is not silent, this controller is behind."""

    def rules(self, partition: str) -> Rules:
        """The rules of this partition now ("" for an unknown one)."""
        rules = self.config.rules(partition)
        return rules.as_paused() if self.state.is_paused(partition, self.now) else rules

    def job(self, state: JobState) -> JobView:
        """The job together with its agents' reports."""
        found = self.live.jobs.get(state.job)
        if found is None or found.state is not state:
            found = self.live.jobs[state.job] = JobView(state)
        return found

    def managed_jobs(self) -> list[JobState]:
        """The jobs of the plan, by id."""
        return [job for _, job in sorted(self.state.jobs.items()) if not job.over]

    def known_agents(self) -> Iterator[tuple[JobState, int, AgentRecord]]:
        """Yield the last agent of each element, by the log, of all jobs that are not over."""
        for job in self.state.jobs.values():
            for element, record in job.agents.items() if not job.over else ():
                yield job, element, record

    def shown_node(self, job: JobState, element: int) -> NodeInfo | None:
        """The node on which Slurm has shown this element of the job running; None if it has not, or is not used: an
        agent's word alone never justifies an action on a node."""
        agent = job.agents.get(element)
        sure = self.slurm.used and job.submitted and agent is not None and agent.confirmed
        return self.slurm.node(agent.node) if sure and agent is not None else None

    def unfit(self, node: str) -> bool:
        """Whether the node may get no work from this controller now."""
        return node in self.state.out_of_service

    @property
    def alone(self) -> bool:
        """Whether no agent at all is heard: then nothing is judged and nothing is done."""
        return self.suspicions.alone_since is not None

    def avoided_nodes(self, job: JobState) -> frozenset[str]:
        """Nodes on which no element of the job may start: a suspect until a pair test clears it, a day at most; any
        other as long as the same fault escalates."""
        found = []
        for node, mark in job.avoid.items():
            paired = self.state.node(node).paired
            cleared = mark.suspect and paired is not None and paired.verdict == "good" and paired.at > mark.at
            kept = SUSPECT_SECONDS if mark.suspect else self.state.history.policy.window
            if not cleared and self.now - mark.at < kept:
                found.append(node)
        return frozenset(found)

    def refused_nodes(self, job: JobState) -> dict[str, str]:
        """Nodes on which Slurm did not start an element of the job that was pinned there, and why."""
        return {node: one.said for node, one in job.refused.items() if self.now < one.until}

    def expected_elements(self, job: JobState) -> list[int] | None:
        """Elements that run or are about to start; None while the listing is too old to say. Elements that were asked
        to end are left out: Slurm may have given their nodes away, and they may wait long for others."""
        seen = self.slurm.seen
        if not self.slurm.used or seen is None or job.job not in self.slurm.expected:
            return None
        late = seen.asked_at < self.job(job).last_arrival
        return None if late else [e for e in self.slurm.expected[job.job] if not job.was_noticed(e)]


class Send(NamedTuple):
    """One message to one agent."""

    route: Route
    message: wire.Message


class Order(NamedTuple):
    """A message that is repeated until it takes effect, every `repeat_seconds` at most."""

    agent: AgentView
    key: str
    """The name of the order: it is the same when the message is repeated."""
    message: wire.Message


@dataclass
class Outcome:
    """The result of a sensor or a decider; empty if nothing needs doing."""

    records: list[tuple[str, int, Record]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    """Sent by the job's turn; only sensors return them."""
    requests: list[Any] = field(default_factory=list)
    suspects: list[AgentView] = field(default_factory=list)
    """Agents reported to have ended: `failure_detector.leases` asks them."""
    hurry: bool = False
    """Slurm should be asked soon."""

    def __bool__(self) -> bool:
        return bool(self.records or self.findings or self.sends or self.requests or self.suspects)

    def record(self, job: JobState | None, record: Record, generation: int | None = None) -> None:
        """Adds a record, by default of the job's present generation."""
        number = generation if generation is not None else job.generation if job else 0
        self.records.append((job.job if job else "", number, record))

    def send(self, agent: AgentView, message: wire.Message) -> None:
        self.sends.append(Send(agent.route, message))

    def note(self, agents: Mapping[int, AgentView], text: str) -> None:
        """Has the first living agent write a line into the job's log."""
        first = min((element for element, agent in agents.items() if agent.alive), default=None)
        if first is not None:
            self.send(agents[first], wire.Note(text=text))

    def note_at_end(self, agents: Mapping[int, AgentView], text: str) -> None:
        """Has the first living agent, and no other, write a line at the end of the job's log."""
        alive = [agents[element] for element in sorted(agents) if agents[element].alive]
        none = wire.Note(text="", at_end=True)
        for agent in alive[:1]:
            self.send(agent, wire.Note(text=text, at_end=True))
        for agent in alive[1:]:
            self.send(agent, none)

    def merge(self, others: Iterable[Outcome]) -> Outcome:
        """Appends the others to this one."""
        for other in others:
            self.records += other.records
            self.findings += other.findings
            self.sends += other.sends
            self.requests += other.requests
            self.suspects += other.suspects
            self.hurry = self.hurry or other.hurry
        return self
