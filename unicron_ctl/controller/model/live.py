"""What the controller knows for now: what agents say, and when they said it. Lost with the process, rebuilt from
their messages.

Nothing here is searched at every message. A status tells which of its slots changed; these are put on the job's lists
of what sensors (`changed`) and orders (`touched`) have to look at, and the sets that the state machine waits on
(`awaited`, `unfinished`, `ready`) are kept up slot by slot. So a message costs the same however large the job is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from transition.layout import stated
from unicron_ctl.controller.model.agent_view import CAN_ENTER, AgentView
from unicron_ctl.controller.model.job import Identity, JobState, Phase
from unicron_ctl.controller.model.survey import Survey
from unicron_ctl.protocol.wire import Plan, RankStatus

AT_REST = ("stopped", "waiting", "standby")
PUT_BACK_SECONDS = 1.0  # a newcomer that does not acknowledge a Break by then has not got in
READY = ("waiting", "entering", "running", "standby")


@dataclass
class Stepped:
    """The newest iteration that a member reported as ended, when that was heard, and when the one before it was: the
    newest began after that, with all members."""

    iteration: int = -1
    at: float = 0.0
    before: float = 0.0

    def take(self, iteration: int, now: float) -> None:
        if iteration > self.iteration:
            self.iteration, self.at, self.before = iteration, now, self.at


@dataclass
class Fetching:
    """Images of a state on their way to ranks that lack them. moved: bytes that all agents had moved, and when that
    rose, or an image came, last. most: seconds that are waited in all. left: how many lack. words: where they come
    from."""

    state: tuple[int, str] = (-1, "")
    began: float | None = None
    moved: int = 0
    moved_at: float = 0.0
    most: float = 0.0
    again_at: float = 0.0
    left: int = 0
    words: str = ""


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
    overdue: str = ""
    """Why the time to enter the present plan or offer is over."""
    elsewhere_until: float = 0.0
    """Until when it counts as known that a majority may go on by itself (`sense.elsewhere`)."""
    unbound_at: float = 0.0
    """When it is looked at next who may vote although it has no rank that goes on."""
    enter_look_at: float = 0.0
    """When all members are looked at next for that."""
    ready_look_at: float = 0.0
    """When those that wait to come in are looked through next."""
    replica: int = 1
    layout: str = ""
    """Ranks of a replica, and its shape, as the job's ranks say."""
    blocked: frozenset[int] = frozenset()
    """Ranks that have stopped where the rest of their replica cannot finish its schedule without them."""
    blocked_look_at: float = 0.0
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
class JobView:
    """A job's durable state together with its agents' statuses: what deciders read."""

    state: JobState
    live: LiveJob
    per_node: int = 1
    planned: tuple[list[int], frozenset[int]] = field(default_factory=lambda: ([], frozenset()))
    counted: tuple[dict[int, Identity], frozenset[int]] = field(default_factory=lambda: ({}, frozenset()))

    def __post_init__(self) -> None:
        self.per_node = max(1, self.state.settings.ranks_per_node)

    @property
    def agents(self) -> dict[int, AgentView]:
        return self.live.agents

    def agent(self, slot: int) -> AgentView | None:
        return self.live.agents.get(slot // self.per_node)

    def status(self, slot: int) -> RankStatus | None:
        view = self.live.agents.get(slot // self.per_node)
        return view.ranks.get(slot) if view else None

    def last_word(self, slot: int, process: Identity) -> RankStatus | None:
        """The last status of that process, which may have been replaced since."""
        view = self.agent(slot)
        if view is None or view.agent != process.agent:
            return None
        found = (view.ranks.get(slot), view.before.get(slot))
        return next((status for status in found if status and status.incarnation == process.incarnation), None)

    def identity(self, slot: int) -> Identity | None:
        view = self.agent(slot)
        status = view.ranks.get(slot) if view else None
        return Identity(view.agent, status.incarnation) if view and status else None

    def cold(self) -> dict[str, list[int]]:
        """reason -> slots whose processes were not started warm for it."""
        found: dict[str, list[int]] = {}
        for _, agent in sorted(self.agents.items()):
            for slot, reason in sorted(agent.cold.items()):
                found.setdefault(reason, []).append(slot)
        return found

    def forgets(self) -> dict[str, list[int]]:
        """reason -> slots whose state is not kept in memory for it."""
        found: dict[str, list[int]] = {}
        for _, slot, status in self.all_ranks():
            if status.forgets:
                found.setdefault(status.forgets, []).append(slot)
        return found

    def all_ranks(self) -> Iterator[tuple[AgentView, int, RankStatus]]:
        for element in sorted(self.agents):
            view = self.agents[element]
            for slot in sorted(view.ranks):
                yield view, slot, view.ranks[slot]

    def alive(self) -> list[AgentView]:
        """Living agents in order of their elements."""
        return [view for _, view in sorted(self.agents.items()) if view.alive]

    @property
    def replica(self) -> int:
        """Ranks of a replica, as planned; before there is a plan, of the layout in which they are started, or as the
        ranks say it."""
        if self.state.plan is not None:
            return self.state.plan.replica
        return stated(self.state.layout).layout.size if self.state.layout else self.live.replica

    @property
    def inside_elements(self) -> frozenset[int]:
        """Elements with a member; counted once per membership."""
        members = self.state.members
        if self.counted[0] is not members:
            self.counted = members, frozenset(slot // self.per_node for slot in members)
        return self.counted[1]

    @property
    def wanted(self) -> int:
        """Elements that are to train when all are there."""
        return self.state.wanted(self.replica)

    @property
    def room(self) -> int:
        """How many more of them there may be. Without spares whoever comes is wanted."""
        settings = self.state.settings
        return self.wanted - len(self.inside_elements) if settings.spares else settings.max_nodes

    @property
    def complete(self) -> bool:
        """Every element with a member has all of its ranks inside."""
        return len(self.state.members) == len(self.inside_elements) * self.per_node

    def reports(self) -> dict[int, RankStatus]:
        """The statuses of survivors that have stopped, by slot."""
        members, lost, plan = self.state.members, self.state.lost, self.state.plan
        came: set[int] = set()  # with a state of their own, which is not that of the present plan until they are in
        if plan is not None and plan.replica > 1:
            came = {*plan.joiners, *(members.keys() - self._planned(plan.members))}
        return {
            slot: status
            for _, view in sorted(self.agents.items())
            for slot, status in view.ranks.items()
            if status.state in ("stopped", "standby")
            and slot in members
            and slot not in lost
            and (slot not in came or (plan is not None and status.generation >= plan.generation))
        }

    def anybody_stopped(self) -> bool:
        """Whether there is a report to go on from."""
        slots = (slot for slot in self.state.members if slot not in self.state.lost)
        found = (self.status(slot) for slot in slots)
        return any(status is not None and status.state in ("stopped", "standby") for status in found)

    def waited(self, now: float) -> float:
        """Seconds in the present phase, without those in which this process stood still."""
        return now - self.state.since - self.live.stalled

    def has_store(self) -> bool:
        return any(view.store for view in self.agents.values() if view.alive)

    # ------------------------------------------------------------ one slot
    def finished(self, slot: int) -> bool:
        """The slot's present process trained to the end (or its script ended without an error).

        In restart mode nobody has while a world is breaking: all start again, until all end well together.
        """
        status = self.status(slot)
        if status is not None and status.state not in ("finished", "exited"):
            return False
        if self.state.restart_mode and self.state.phase is Phase.BREAKING:
            return False
        member = self.state.members.get(slot)
        if status is None:
            record = self.state.agents.get(slot // self.per_node)
            return bool(record and member and record.gone == "finished" and record.agent == member.agent)
        if self.identity(slot) != member:
            return False
        return status.state == "finished" or (status.exit is not None and status.exit.code == 0)

    def inside(self, slot: int, generation: int) -> bool:
        """The slot runs in that generation, or has trained to the end."""
        status = self.status(slot)
        if status is not None and status.state == "running" and status.generation == generation:
            return True
        return self.finished(slot)

    def at_rest(self, slot: int, now: float) -> bool:
        """The rank has left its collectives for good and waits for a plan above the Break.

        A stopped rank can't enter an offer, so a report counts if it is newer than every plan that the rank could still
        enter.
        """
        state, status = self.state, self.status(slot)
        if status is None or status.state not in AT_REST:
            return False
        if status.broken >= state.broken:
            return True
        view = self.agent(slot)
        unchanged = view is not None and view.last_heard > state.since + PUT_BACK_SECONDS
        unchanged = unchanged and now - state.since > PUT_BACK_SECONDS
        if status.state in CAN_ENTER:
            return unchanged
        newest = max(status.generation, state.plan.generation if state.plan else 0)
        return status.broken >= newest or unchanged

    # ------------------------------------------------------------ keeping the sets up
    def begin_phase(self, now: float) -> None:
        """The job's phase, members or plan changed: every member is looked at once, closely those that are further than
        the phase begins with."""
        live, state, phase = self.live, self.state, self.state.phase
        live.stopped.clear()
        live.strayed.clear()
        live.overdue, live.enter_look_at, live.stalled, live.stepped = "", 0.0, 0.0, Stepped()
        live.elsewhere_until = live.ready_look_at = live.nobody_until = live.blocked_look_at = 0.0
        live.blocked = frozenset()
        live.unfinished = set(state.survivors())
        plan = state.offer or state.plan
        if phase is Phase.BREAKING:
            live.awaited = set(live.unfinished)
            live.changed.update(self._members_but("running", -1))
            if state.replica > 1:  # those whose replica is hit only now have to stop at once
                live.touched.update(state.elements(state.hit()))
        elif phase in (Phase.ENTERING, Phase.OFFERING) and plan is not None:
            live.awaited = set(plan.members)
            live.changed.update(self._members_but("stopped", plan.generation))
        else:
            live.awaited.clear()
            live.changed.update(state.members)
            live.touched.update(live.agents)

    def _members_but(self, usual: str, generation: int) -> list[int]:
        """Members and joiners that are not in the usual state any more, or are in that generation already."""
        members, joining, agents = self.state.members, self.state.joining, self.live.agents
        found = [
            slot
            for agent in agents.values()
            for slot, rank in agent.ranks.items()
            if (rank.state != usual or rank.generation == generation or not agent.alive)
            and (slot in members or slot in joining)
        ]
        return found + [slot for slot in (*members, *joining) if slot // self.per_node not in agents]

    def notice(self, slot: int, now: float) -> None:
        """The slot's status or its agent changed."""
        live, phase = self.live, self.state.phase
        if slot in live.unfinished and self.finished(slot):
            live.unfinished.discard(slot)
        status = self.status(slot)
        if status is not None and status.incarnation < self.state.slot(slot).wanted:
            live.restarts.add(self.state.element(slot))  # ordered before this controller started, perhaps
        if phase is Phase.BREAKING:
            waits = slot in self.state.members and slot not in self.state.lost
            waits = waits and not (self.finished(slot) or self.at_rest(slot, now))
        elif phase in (Phase.ENTERING, Phase.OFFERING):
            plan = self.state.offer or self.state.plan
            waits = plan is not None and slot in self._planned(plan.members) and not self.inside(slot, plan.generation)
        else:
            waits = False
        if waits:
            live.awaited.add(slot)
        else:
            live.awaited.discard(slot)
        if status is not None and self._strays(slot, status):
            live.strayed.add(slot)
        else:
            live.strayed.discard(slot)
        self._note_stop(slot)

    def _strays(self, slot: int, status: RankStatus) -> bool:
        """The member took an offer while it was being withdrawn; the others wait there for whoever did not come."""
        state = self.state
        if slot not in state.members or state.plan is None or state.phase not in (Phase.RUNNING, Phase.OFFERING):
            return False
        within = status.entering if status.state == "entering" else status.generation
        offered = state.offer.generation if state.offer is not None else 0
        return state.plan.generation < within <= state.generation and within != offered

    def _planned(self, members: list[int]) -> frozenset[int]:
        """The plan's members as a set, made once per plan."""
        if self.planned[0] is not members:
            self.planned = members, frozenset(members)
        return self.planned[1]

    def _note_stop(self, slot: int) -> None:
        state, view = self.state, self.agent(slot)
        status = view.ranks.get(slot) if view else None
        here = slot in state.members or slot in state.joining
        if (
            here
            and view is not None
            and status is not None
            and status.state in AT_REST
            and status.broken > state.broken  # else it obeys an earlier Break and has not got its plan yet
            and (slot in state.members or state.offer is None or status.broken >= state.offer.generation)
            and not self.finished(slot)
        ):
            self.live.stopped[slot] = view.progress.get(slot, view.last_heard)
        else:
            self.live.stopped.pop(slot, None)

    def notice_agent(self, view: AgentView) -> None:
        """One of the agent's ranks, or its being alive, changed."""
        if view.waits and view.alive:
            self.live.ready.add(view.element)
        else:
            self.live.ready.discard(view.element)


@dataclass
class Live:
    """All agents of all jobs."""

    jobs: dict[str, LiveJob] = field(default_factory=dict)
    leases: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)
    """Living agents, the one that has been silent for longest first."""
    suspects: set[tuple[str, int]] = field(default_factory=set)
    """Agents of which Slurm says that they ended."""
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
        return [view for view in found if view is not None]

    def add(self, view: AgentView) -> None:
        self.remove(view.job, view.element)
        self.jobs.setdefault(view.job, LiveJob()).agents[view.element] = view
        self.by_node.setdefault(view.node, set()).add((view.job, view.element))
        if view.key:
            self.keys.add(view.key)
        self.heard(view, view.last_heard)

    def remove(self, job: str, element: int) -> None:
        live = self.jobs.get(job)
        view = live.agents.pop(element, None) if live else None
        if view is None or live is None:
            return
        self.keys.discard(view.key)
        live.ready.discard(element)
        live.touched.discard(element)
        live.restarts.discard(element)
        self.leases.pop((job, element), None)
        self.suspects.discard((job, element))
        here = self.by_node.get(view.node, set())
        here.discard((job, element))
        if not here:
            self.by_node.pop(view.node, None)

    def forget(self, job: str) -> None:
        """What is known for now of a job that is over."""
        for element in list(self.jobs[job].agents) if job in self.jobs else ():
            self.remove(job, element)
        self.jobs.pop(job, None)

    def heard(self, view: AgentView, now: float) -> None:
        """The agent has spoken: its lease begins again."""
        view.last_heard = now
        key = view.job, view.element
        if view.alive:
            self.leases[key] = None
            self.leases.move_to_end(key)
        if view.suspect_since is not None:
            view.suspect_since = None
            self.suspects.discard(key)

    def silenced(self, view: AgentView) -> None:
        """The agent's lease ran out, or it has left: nobody waits for its next word."""
        self.leases.pop((view.job, view.element), None)
        self.suspects.discard((view.job, view.element))

    def suspect(self, view: AgentView, now: float) -> None:
        """Slurm says that the agent has ended, or its peers' connections broke and it does not answer."""
        view.suspect_since = now
        self.suspects.add((view.job, view.element))

    def renew(self, now: float) -> None:
        """Everybody has a whole lease again: nobody could be heard."""
        for view in self.agents():
            view.last_heard = now

    def shift(self, seconds: float) -> None:
        """This process stood still for so long: nobody else was late."""
        for live in self.jobs.values():
            live.stalled += seconds
            live.ahead_since += seconds if live.ahead_since else 0.0
        for view in self.agents():
            view.last_heard += seconds
            if view.suspect_since is not None:
                view.suspect_since += seconds
            view.progress = {slot: at + seconds for slot, at in view.progress.items()}
            view.came = {slot: at + seconds for slot, at in view.came.items()}
            view.began = {slot: at + seconds for slot, at in view.began.items()}
