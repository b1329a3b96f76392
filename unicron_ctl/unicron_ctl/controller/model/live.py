"""What the controller knows for now: what agents say, and when they said it. Lost with the process, rebuilt from
their messages.

Nothing here is searched at every message. A status tells which of its slots changed; these are put on the job's lists
of what sensors (`changed`) and orders (`touched`) have to look at, and the sets that the state machine waits on
(`awaited`, `unfinished`, `ready`) are kept up slot by slot (:mod:`unicron_ctl.controller.model.job_view`). So a message
costs the same however large the job is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.survey import Survey
from unicron_ctl.shared.protocol.wire import Plan

READY = ("waiting", "entering", "running", "standby")


@dataclass
class Stepped:
    """The newest iteration that a member reported as ended, when that was heard, and when the one before it had ended,
    at the latest that is certain: the newest began after that, with all members."""

    iteration: int = -1
    at: float = 0.0
    before: float = 0.0

    def note_iteration(self, iteration: int, now: float, held: float) -> None:
        """held: seconds for which an agent may have kept the report to itself."""
        if iteration > self.iteration:
            self.iteration, self.at, self.before = iteration, now, self.at - held


class Told(NamedTuple):
    """How an image comes to a rank: to which element, from which address, and the same for people."""

    receiver: int
    source: str
    words: str


@dataclass
class Fetching:
    """Images of a state on their way to ranks that lack them. moved: bytes that all agents had moved, and when that
    rose, or an image came, last. most: seconds that are waited in all. left: how many lack. words: (kind, place, shard)
    of each -> where it comes from."""

    state: tuple[int, str] = (-1, "")
    began: float | None = None
    moved: int = 0
    moved_at: float = 0.0
    most: float = 0.0
    again_at: float = 0.0
    left: int = 0
    words: dict[tuple[str, int, int], Told] = field(default_factory=dict)


@dataclass(frozen=True)
class Fence:
    """What an agent of restart mode left behind that fell silent. heard: when it was last; nodes: of its world; fenced:
    its processes end by themselves where it is cut off."""

    element: int
    heard: float
    nodes: int
    fenced: bool


@dataclass
class ProgressWatch:
    """What sensors have found about members that do not come where the others wait for them, in the present phase."""

    overdue: str = ""
    """Why the time to enter the present plan or offer is over."""
    enter_check_at: float = 0.0
    """When all members are looked at next for that."""
    blocked: frozenset[int] = frozenset()
    """Ranks that have stopped where the rest of their replica cannot finish its schedule without them."""
    blocked_check_at: float = 0.0
    majority_until: float = 0.0
    """Until when it counts as known that a majority may train on without the controller."""
    votes_check_at: float = 0.0
    """When agents with a vote and without a rank that goes on are looked for next."""

    def reset(self) -> None:
        """A new phase began."""
        self.overdue, self.blocked = "", frozenset()
        self.enter_check_at = self.blocked_check_at = self.majority_until = self.votes_check_at = 0.0


@dataclass
class LiveJob:
    """One job's agents and what has to be looked at."""

    agents: dict[int, AgentView] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    """Slots whose status sensors have not seen yet."""
    touched: set[int] = field(default_factory=set)
    """Elements that may have to be told something."""
    told: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (when, element): who was told something, and when to see whether it was obeyed."""
    due: dict[int, float] = field(default_factory=dict)
    """element -> its next entry in that heap."""
    awaited: set[int] = field(default_factory=set)
    """Slots for which the present phase waits: to be in the generation, or to have stopped."""
    unfinished: set[int] = field(default_factory=set)
    """Members that have not trained to the end."""
    ready: set[int] = field(default_factory=set)
    """Elements with a rank that waits to enter."""
    restarts: set[int] = field(default_factory=set)
    """Elements in which a process is to be ended or started."""
    fences: dict[str, Fence] = field(default_factory=dict)
    """Restart mode: agents that fell silent, whose processes may live (`sense.fencing`)."""
    fences_known: bool = False
    """What the controller before this one knew of such agents is there, too."""
    stalled: float = 0.0
    """Seconds of the present phase in which this process stood still."""
    stepped: Stepped = field(default_factory=Stepped)
    """Of the present phase."""
    last_arrival: float = 0.0
    """When an agent registered last."""
    ahead: set[int] = field(default_factory=set)
    """Elements whose ranks show a generation that the log does not hold (`job.adoption`)."""
    ahead_since: float = 0.0
    """Since when that has been asked; 0 when it is not."""
    asked: int = 0
    """The number of the Ping that all of them are to answer before that is looked at."""
    held: Plan | None = None
    """What such an agent says that its plan was."""
    missed: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Slots that agents went on without while the controller was away: their agent, which is to tell why, and since
    when that is waited for."""
    survey: Survey = field(default_factory=Survey)
    """Who of its agents reaches whom."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Members that stopped without a Break, and when that was heard."""
    strayed: set[int] = field(default_factory=set)
    """Members that are in a generation, or enter one, whose offer was withdrawn."""
    progress: ProgressWatch = field(default_factory=ProgressWatch)
    ready_look_at: float = 0.0
    """When those that wait to come in are looked through next."""
    replica: int = 1
    layout: str = ""
    """Ranks of a replica, and its shape, as the job's ranks say."""
    saves: bool = False
    saves_look_at: float = 0.0
    """Whether ranks still save their state before all start again, and when that is looked at again."""
    unlike: bool = False
    unlike_look_at: float = 0.0
    """Whether ranks wait that can never train with the others; likewise."""
    nobody_until: float = 0.0
    """Until when it counts as known that no survivors make a complete replica."""
    remembers: bool = False
    """Its ranks keep the states of their places whole, and in memory."""
    sharded: bool = False
    """Its ranks have a distributed optimizer's state in shards."""
    fetching: Fetching = field(default_factory=lambda: Fetching())
    """What the job waits for while it is formed."""

    def shape(self, agent: AgentView, slots: Iterable[int]) -> None:
        """What a new process says of the job's replicas once it is ready."""
        for slot in slots:
            rank = agent.ranks.get(slot)
            if rank is not None and rank.state in READY:
                self.replica, self.layout = rank.replica, rank.layout
                self.remembers = self.remembers or rank.remembers
                self.sharded = self.sharded or rank.sharded


@dataclass
class Live:
    """All agents of all jobs."""

    jobs: dict[str, LiveJob] = field(default_factory=dict)
    leases: OrderedDict[tuple[str, int], AgentView] = field(default_factory=OrderedDict)
    """Living agents, the one that has been silent for longest first."""
    suspects: dict[tuple[str, int], AgentView] = field(default_factory=dict)
    """Living agents of which Slurm says that they ended."""
    greet_at: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """node -> when its slurmd is to be tried next, the soonest first."""
    greeted: set[str] = field(default_factory=set)
    """Nodes whose slurmds are being tried."""
    slurmds: dict[str, str] = field(default_factory=dict)
    """node -> "host:port" at which this controller has reached its slurmd."""
    by_node: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    """Public keys of agents that are registered."""

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
        self.jobs.setdefault(agent.job, LiveJob()).agents[agent.element] = agent
        self.by_node.setdefault(agent.node, set()).add((agent.job, agent.element))
        if agent.key:
            self.keys.add(agent.key)
        self.greet_at[agent.node] = 0.0
        self.greet_at.move_to_end(agent.node, last=False)
        self.heard(agent, agent.last_heard)

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
        """What is known for now of a job that is over."""
        for element in list(self.jobs[job].agents) if job in self.jobs else ():
            self.remove(job, element)
        self.jobs.pop(job, None)

    def heard(self, agent: AgentView, now: float) -> None:
        """The agent has spoken: its lease begins again."""
        agent.last_heard = now
        key = agent.job, agent.element
        if agent.alive:
            self.leases[key] = agent
            self.leases.move_to_end(key)
        if agent.suspect_since is not None:
            agent.suspect_since = None
            self.suspects.pop(key, None)

    def silenced(self, agent: AgentView) -> None:
        """The agent's lease ran out, or it has left: nobody waits for its next word."""
        self.leases.pop((agent.job, agent.element), None)
        self.suspects.pop((agent.job, agent.element), None)

    def suspect(self, agent: AgentView, now: float) -> None:
        """Slurm says that the agent has ended."""
        agent.suspect_since = now
        self.suspects[agent.job, agent.element] = agent

    def renew(self, now: float) -> None:
        """Everybody has a whole lease again: nobody could be heard."""
        for agent in self.agents():
            agent.last_heard = now

    def shift(self, seconds: float) -> None:
        """This process stood still for so long: nobody else was late."""
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
