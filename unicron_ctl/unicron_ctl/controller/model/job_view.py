"""One job for the deciders.

No message leads to a search through the job. The slots that a status changes go on the job's lists for sensors
(`changed`) and orders (`touched`), and the sets on which the state machine waits (`awaited`, `unfinished`, `ready`) are
updated slot by slot. So the cost of a message does not depend on the job's size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from unicron_ctl.controller.model.agent_view import CAN_ENTER, AgentView, LastWord
from unicron_ctl.controller.model.job_state import NO_SLOT, Identity, JobState, Phase
from unicron_ctl.controller.model.live import READY, Fence, Fetching, LastStep, ProgressWatch, Survey
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_ctl.shared.protocol.wire import Plan
from unicron_transition.generations.layout import parse_layout

AT_REST = ("stopped", "waiting", "standby")
ENDED, GONE = ("finished", "exited"), ("exited", "left")
PUT_BACK_SECONDS = 1.0  # a newcomer that does not acknowledge a Break by then has not got in


@dataclass
class JobView:
    """One job as deciders get it: its durable record, and its volatile part, which a restart loses."""

    state: JobState
    """The durable record."""
    agents: dict[int, AgentView] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    """Slots whose status sensors have not seen yet."""
    together: set[int] = field(default_factory=set)
    """Elements whose ranks have all changed, and stand alike; these slots need not be in `changed`."""
    touched: set[int] = field(default_factory=set)
    """Elements that may lack an order."""
    order_checks: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (when, element): elements that got an order, and when to check whether it was obeyed."""
    due: dict[int, float] = field(default_factory=dict)
    """element -> its next entry in that heap."""
    awaited: set[int] = field(default_factory=set)
    """Slots for which the present phase waits: to enter the generation, or to stop."""
    unfinished: set[int] = field(default_factory=set)
    """Members that have not trained to the end."""
    ready: set[int] = field(default_factory=set)
    """Elements with a rank that waits to enter."""
    came: int = -1
    """The last one that was found to be so."""
    restarts: set[int] = field(default_factory=set)
    """Elements in which a process has to be ended or started."""
    fences: dict[str, Fence] = field(default_factory=dict)
    """Restart mode: agents that fell silent, whose processes may live (`sense.fencing`)."""
    shut: dict[str, float] = field(default_factory=dict)
    """Restart mode: agents whose doors are shut for the world that is over, until these were seen to be so."""
    shut_for: int = 0
    """The newest Break that `shut` is about."""
    ended: set[str] = field(default_factory=set)
    """Restart mode: agents that were proven to have ended with their processes."""
    fences_known: bool = False
    """Such agents of the previous controller are in `fences`."""
    stalled: float = 0.0
    """Seconds of the present phase in which this process stood still."""
    stepped: LastStep = field(default_factory=LastStep)
    """The last step of the present phase."""
    last_arrival: float = 0.0
    """When an agent last registered."""
    ahead: set[int] = field(default_factory=set)
    """Elements whose ranks show a generation that is not in the log (`job.adoption`)."""
    ahead_since: float = 0.0
    """Since when; 0 if there are none."""
    asked: int = 0
    """The number of the Ping that all of them have to answer first."""
    held: Plan | None = None
    """Its plan, by one of these agents."""
    missed: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Slots that agents left out while the controller was away -> the slot's agent, which may know why, and since when
    its answer is awaited."""
    survey: Survey = field(default_factory=Survey)
    """Which of its agents reach each other."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Members that stopped without a Break -> when that was heard."""
    strayed: set[int] = field(default_factory=set)
    """Members that are in a generation, or enter one, whose offer was withdrawn."""
    progress: ProgressWatch = field(default_factory=ProgressWatch)
    ready_look_at: float = 0.0
    """When to check the waiting elements next."""
    rank_replica: int = 1
    """Ranks of a replica, by the job's ranks."""
    rank_layout: str = ""
    """The layout of a replica, by the job's ranks."""
    saves: bool = False
    """Ranks still save their state before all start again."""
    saves_look_at: float = 0.0
    """When to check that next."""
    unlike: bool = False
    """Ranks wait that can never train with the others."""
    unlike_look_at: float = 0.0
    """When to check that next."""
    nobody_until: float = 0.0
    """Until when it counts as known that no survivors make a complete replica."""
    remembers: bool = False
    """Its ranks keep the whole states of their places in memory."""
    sharded: bool = False
    """Its ranks have a distributed optimizer's state in shards."""
    fetching: Fetching = field(default_factory=Fetching)
    """Images for which the job waits while it forms."""
    per_node: int = field(init=False)
    going: set[int] = field(default_factory=set)
    """Elements whose ranks did nothing but train on since the last turn."""
    phases: int = 0
    """Counts changes of phase, members or plan."""
    planned: tuple[list[int], frozenset[int]] = field(default_factory=lambda: ([], frozenset()))
    """The members of the last plan that was looked at, as a list and as a set."""
    _crews: tuple[Mapping[int, Identity], dict[int, Identity]] = field(default_factory=lambda: ({}, {}))
    """The members that were looked at last, and `crews` of them."""

    def __post_init__(self) -> None:
        self.per_node = self.state.per_node

    def agent(self, slot: int) -> AgentView | None:
        return self.agents.get(slot // self.per_node)

    def status(self, slot: int) -> RankStatus | None:
        agent = self.agents.get(slot // self.per_node)
        return agent.ranks.get(slot) if agent else None

    def last_word(self, slot: int, process: Identity) -> RankStatus | LastWord | None:
        """The point that the process had reached, which may have a successor by now."""
        agent = self.agent(slot)
        if agent is None or agent.agent != process.agent:
            return None
        found = (agent.ranks.get(slot), agent.before.get(slot))
        return next((status for status in found if status and status.incarnation == process.incarnation), None)

    def identity(self, slot: int) -> Identity | None:
        agent = self.agent(slot)
        status = agent.ranks.get(slot) if agent else None
        return Identity(agent.agent, status.incarnation) if agent and status else None

    @property
    def crews(self) -> dict[int, Identity]:
        """Element -> the process that is a member in all of its slots: their agent and their common incarnation.
        Computed once per membership."""
        members, per_node = self.state.members, self.per_node
        if self._crews[0] is not members:
            counts: dict[tuple[int, Identity], int] = {}
            for slot, process in members.items():
                where = slot // per_node, process
                counts[where] = counts.get(where, 0) + 1
            self._crews = members, {where[0]: where[1] for where, count in counts.items() if count == per_node}
        return self._crews[1]

    def forget_changes(self) -> None:
        """Drops the changes that no sensor has seen."""
        self.changed.clear()
        self.together.clear()

    def cold(self) -> dict[str, list[int]]:
        """reason -> slots whose processes were started cold for it."""
        found: dict[str, list[int]] = {}
        for _, agent in sorted(self.agents.items()):
            for slot, reason in sorted(agent.status.cold.items()):
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
            agent = self.agents[element]
            for slot in sorted(agent.ranks):
                yield agent, slot, agent.ranks[slot]

    def alive(self) -> list[AgentView]:
        """Living agents in order of their elements."""
        return [agent for _, agent in sorted(self.agents.items()) if agent.alive]

    def by_element(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """The slots by their elements."""
        found: dict[int, list[int]] = {}
        for slot in slots:
            found.setdefault(slot // self.per_node, []).append(slot)
        return found

    @property
    def replica(self) -> int:
        """Ranks of a replica, as planned; before there is a plan, by the layout in which they start, or by the
        ranks."""
        if self.state.plan is not None:
            return self.state.plan.replica
        return parse_layout(self.state.layout).layout.size if self.state.layout else self.rank_replica

    @property
    def shape(self) -> str:
        """The layout in words: the one in which its ranks start, or by the ranks."""
        return self.state.layout or self.rank_layout

    @property
    def wanted(self) -> int:
        """Elements that train when all are there."""
        return self.state.elements_wanted(self.replica)

    @property
    def room(self) -> int:
        """The number of elements that may still come in. Without spares all are wanted."""
        settings = self.state.settings
        return self.wanted - len(self.state.inside) if settings.spares else settings.max_nodes

    @property
    def complete(self) -> bool:
        """Whether every element with a member has all of its ranks inside."""
        return len(self.state.members) == len(self.state.inside) * self.per_node

    def reports(self) -> dict[int, RankStatus]:
        """The statuses of survivors that have stopped, by slot."""
        members, lost, plan = self.state.members, self.state.lost, self.state.plan
        came: set[int] = set()  # newcomers, whose state is not the present plan's until they are in
        if plan is not None and plan.replica > 1:
            came = {*plan.joiners, *(members.keys() - self._plan_members(plan.members))}
        return {
            slot: status
            for _, agent in sorted(self.agents.items())
            for slot, status in agent.ranks.items()
            if (status.state == "stopped" or status.state == "standby")
            and slot in members
            and slot not in lost
            and (not came or slot not in came or (plan is not None and status.generation >= plan.generation))
        }

    def anybody_stopped(self) -> bool:
        """Whether any survivor has stopped with a state."""
        slots = (slot for slot in self.state.members if slot not in self.state.lost)
        found = (self.status(slot) for slot in slots)
        return any(status is not None and status.state in ("stopped", "standby") for status in found)

    def seconds_in_phase(self, now: float) -> float:
        """Seconds in the present phase, without stalls of this process."""
        return now - self.state.since - self.stalled

    def has_store(self) -> bool:
        return any(agent.status.store for agent in self.agents.values() if agent.alive)

    def seconds_without_store(self, now: float) -> float:
        """Return for how long no agent has had a rendezvous store; 0 as long as a living one has one."""
        if self.has_store():
            return 0.0
        since = [agent.stored_at for agent in self.agents.values() if agent.stored_at is not None]
        return max(0.0, now - max(since, default=now) - self.stalled)

    # ------------------------------------------------------------ one slot
    def finished(self, slot: int) -> bool:
        """Whether the slot's present process trained to the end (or its script ended without an error).

        In a mode in which ranks do not finish alone, none has finished while a world breaks: all start again, until all
        end well together.
        """
        status = self.status(slot)
        if status is not None and status.state not in ENDED:
            return False
        if not self.state.mode.finishes_alone and self.state.phase is Phase.BREAKING:
            return False
        member = self.state.members.get(slot)
        if status is None:
            record = self.state.agents.get(slot // self.per_node)
            return bool(record and member and record.gone == "finished" and record.agent == member.agent)
        if self.identity(slot) != member:
            return False
        return status.state == "finished" or (status.exit is not None and status.exit.code == 0)

    def inside(self, slot: int, generation: int) -> bool:
        """Whether the slot runs in that generation, or has trained to the end."""
        status = self.status(slot)
        if status is not None and status.state == "running" and status.generation == generation:
            return True
        return self.finished(slot)

    def at_rest(self, slot: int, now: float) -> bool:
        """Whether the rank has left its collectives for good and waits for a plan above the Break.

        A stopped rank can't enter an offer, so its report counts if it is newer than every plan that the rank could
        still enter.
        """
        state, status = self.state, self.status(slot)
        if status is None or status.state not in AT_REST:
            return False
        if status.broken >= state.broken:
            return True
        agent = self.agent(slot)
        unchanged = agent is not None and agent.last_heard > state.since + PUT_BACK_SECONDS
        unchanged = unchanged and now - state.since > PUT_BACK_SECONDS
        if status.state in CAN_ENTER:
            return unchanged
        newest = max(status.generation, state.plan.generation if state.plan else 0)
        return status.broken >= newest or unchanged

    # ------------------------------------------------------------ keeping the sets up
    def note_shape(self, agent: AgentView, slots: Iterable[int]) -> None:
        """Notes the facts about the job's replicas that new processes report once they are ready."""
        for slot in slots:
            rank = agent.ranks.get(slot)
            if rank is not None and rank.state in READY:
                self.rank_replica, self.rank_layout = rank.replica, rank.layout
                self.remembers = self.remembers or rank.remembers
                self.sharded = self.sharded or rank.sharded

    def begin_phase(self) -> None:
        """Takes in that the job's phase, members or plan changed: every member is checked once, closely those that are
        further than the start of the phase."""
        state, phase = self.state, self.state.phase
        self.phases += 1
        self.stopped.clear()
        self.strayed.clear()
        self.stalled, self.stepped = 0.0, LastStep()
        self.progress.reset()
        self.ready_look_at = self.nobody_until = 0.0
        self.unfinished = set(state.survivors())
        plan = state.offer or state.plan
        if phase is Phase.BREAKING:
            self.awaited = set(self.unfinished)
            self.changed.update(slot for slot in self._look_at_all_but(("running",), -1) if not self._known_end(slot))
            if state.replica > 1:  # members whose replica is newly hit have to stop at once
                self.touched.update(state.elements(state.hit()))
        elif phase in (Phase.ENTERING, Phase.OFFERING) and plan is not None:
            self.awaited = set(plan.members)
            # All agents get a plan at once; newcomers that wait for an offer have to be looked at to get theirs.
            usual = AT_REST if phase is Phase.ENTERING else ("stopped",)
            self.changed.update(self._look_at_all_but(usual, plan.generation))
        else:
            self.awaited.clear()
            self.changed.update(state.members)
            self.touched.update(self.agents)

    def _look_at_all_but(self, usual: Collection[str], generation: int) -> list[int]:
        """Returns members and joiners that are no longer in a usual state, or are in that generation already. Crews
        that stand alike are noted as such."""
        members, joining, agents, crews = self.state.members, self.state.joining, self.agents, self.crews
        found: list[int] = []
        for element, agent in agents.items():
            if not agent.alive:
                found += agent.ranks
                continue
            common = agent.common
            if common is not None and common.state in usual and common.generation != generation:
                continue
            if common is not None and element in crews:
                self.together.add(element)
                continue
            ranks = agent.ranks.items()
            found += [slot for slot, rank in ranks if rank.state not in usual or rank.generation == generation]
        absent = {*self.state.inside, *self.state.elements(joining)} - agents.keys()
        if absent:
            found += [slot for slot in (*members, *joining) if slot // self.per_node in absent]
        return [slot for slot in found if slot in members or slot in joining]

    def _known_end(self, slot: int) -> bool:
        """Whether the slot's process is lost and has ended, which is on record: nothing more is to be said of it."""
        lost, status = self.state.lost.get(slot), self.status(slot)
        if lost is None or status is None or status.state != "exited" or status.note is not None:
            return False
        return self.identity(slot) == lost == self.state.slot(slot).exit_seen

    def notice(self, slot: int, now: float) -> None:
        """Takes in that the slot's status or its agent changed."""
        self.notice_all((slot,), now)

    def notice_all(self, slots: Collection[int], now: float) -> list[int]:
        """Takes in that the statuses or the agents of these slots changed. Returns the slots with news for a sensor:
        their process ended, left, says something, or is not the one that the job knows.

        These are two loops, not calls for each rank, because all ranks of a large job enter and stop at once.
        """
        state, agents, per_node = self.state, self.agents, self.per_node
        members, joining, known, stopped = state.members, state.joining, state.slots, self.stopped
        self._note_awaited(slots, now)
        news = []
        for slot in slots:
            agent = agents.get(slot // per_node)
            status = agent.ranks.get(slot) if agent is not None else None
            if agent is None or status is None:
                self.strayed.discard(slot)
                stopped.pop(slot, None)
                if agent is not None:
                    news.append(slot)
                continue
            if status.incarnation < known.get(slot, NO_SLOT).wanted:
                self.restarts.add(slot // per_node)  # perhaps ordered before this controller started
            if self._strays(slot, status):
                self.strayed.add(slot)
            elif self.strayed:
                self.strayed.discard(slot)
            if status.state in AT_REST and status.broken > state.broken:
                self._note_stop(slot, agent, status)
            elif stopped:
                stopped.pop(slot, None)
            member = members.get(slot) or joining.get(slot)
            same = member is None or (member.incarnation == status.incarnation and member.agent == agent.agent)
            if not same or status.state in GONE or status.fault is not None or status.note is not None:
                news.append(slot)
        return news

    def _note_awaited(self, slots: Iterable[int], now: float) -> None:
        """Notes which of these slots the phase waits for, and which have trained to the end."""
        state, phase, members, lost = self.state, self.state.phase, self.state.members, self.state.lost
        plan = (state.offer or state.plan) if phase in (Phase.ENTERING, Phase.OFFERING) else None
        inside = self._plan_members(plan.members) if plan is not None else frozenset[int]()
        generation = plan.generation if plan is not None else -1
        for slot in slots:
            status = self.status(slot)
            over = (status is None or status.state in ENDED) and self.finished(slot)
            if over:
                self.unfinished.discard(slot)
            if phase is Phase.BREAKING:
                waits = slot in members and slot not in lost and not (over or self.at_rest(slot, now))
            else:
                runs = status is not None and status.generation == generation and status.state == "running"
                waits = slot in inside and not (runs or over)
            if waits:
                self.awaited.add(slot)
            else:
                self.awaited.discard(slot)

    def _strays(self, slot: int, status: RankStatus) -> bool:
        """Whether the member took an offer while it was being withdrawn; in it, it waits for members that did not."""
        state = self.state
        if state.phase not in (Phase.RUNNING, Phase.OFFERING) or slot not in state.members or state.plan is None:
            return False
        within = status.entering if status.state == "entering" else status.generation
        offered = state.offer.generation if state.offer is not None else 0
        return state.plan.generation < within <= state.generation and within != offered

    def _plan_members(self, members: list[int]) -> frozenset[int]:
        """The plan's members as a set; computed once per plan."""
        if self.planned[0] is not members:
            self.planned = members, frozenset(members)
        return self.planned[1]

    def _note_stop(self, slot: int, agent: AgentView, status: RankStatus) -> None:
        """Notes a rank at rest that obeys no Break; one that obeys an earlier one has not got its plan yet."""
        state = self.state
        inside = slot in state.members
        joins = slot in state.joining and (state.offer is None or status.broken >= state.offer.generation)
        if inside or joins:
            self.stopped[slot] = agent.progress.get(slot, agent.last_heard)
        else:
            self.stopped.pop(slot, None)

    def notice_agent(self, agent: AgentView) -> None:
        """Takes in that one of the agent's ranks changed, or whether it lives."""
        if agent.waits and agent.alive:
            self.ready.add(agent.element)
            self.came = agent.element
        else:
            self.ready.discard(agent.element)
