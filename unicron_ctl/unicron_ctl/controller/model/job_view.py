"""One job for the deciders: its durable state together with what its agents say, and the sets of :class:`LiveJob` that
follow from both, kept up slot by slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from unicron_ctl.controller.model.agent_view import CAN_ENTER, AgentView
from unicron_ctl.controller.model.job_state import Identity, JobState, Phase
from unicron_ctl.controller.model.live import LiveJob, Stepped
from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_transition.generations.layout import parse_layout

AT_REST = ("stopped", "waiting", "standby")
PUT_BACK_SECONDS = 1.0  # a newcomer that does not acknowledge a Break by then has not got in


@dataclass
class JobView:
    """A job's durable state together with its agents' statuses: what deciders read."""

    state: JobState
    live: LiveJob
    per_node: int = 1
    planned: tuple[list[int], frozenset[int]] = field(default_factory=lambda: ([], frozenset()))

    def __post_init__(self) -> None:
        self.per_node = max(1, self.state.settings.ranks_per_node)

    @property
    def agents(self) -> dict[int, AgentView]:
        return self.live.agents

    def agent(self, slot: int) -> AgentView | None:
        return self.live.agents.get(slot // self.per_node)

    def status(self, slot: int) -> RankStatus | None:
        agent = self.live.agents.get(slot // self.per_node)
        return agent.ranks.get(slot) if agent else None

    def last_word(self, slot: int, process: Identity) -> RankStatus | None:
        """The last status of that process, which may have been replaced since."""
        agent = self.agent(slot)
        if agent is None or agent.agent != process.agent:
            return None
        found = (agent.ranks.get(slot), agent.before.get(slot))
        return next((status for status in found if status and status.incarnation == process.incarnation), None)

    def identity(self, slot: int) -> Identity | None:
        agent = self.agent(slot)
        status = agent.ranks.get(slot) if agent else None
        return Identity(agent.agent, status.incarnation) if agent and status else None

    def cold(self) -> dict[str, list[int]]:
        """reason -> slots whose processes were not started warm for it."""
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

    @property
    def replica(self) -> int:
        """Ranks of a replica, as planned; before there is a plan, of the layout in which they are started, or as the
        ranks say it."""
        if self.state.plan is not None:
            return self.state.plan.replica
        return parse_layout(self.state.layout).layout.size if self.state.layout else self.live.replica

    @property
    def wanted(self) -> int:
        """Elements that are to train when all are there."""
        return self.state.wanted(self.replica)

    @property
    def room(self) -> int:
        """How many more of them there may be. Without spares whoever comes is wanted."""
        settings = self.state.settings
        return self.wanted - len(self.state.inside) if settings.spares else settings.max_nodes

    @property
    def complete(self) -> bool:
        """Every element with a member has all of its ranks inside."""
        return len(self.state.members) == len(self.state.inside) * self.per_node

    def reports(self) -> dict[int, RankStatus]:
        """The statuses of survivors that have stopped, by slot."""
        members, lost, plan = self.state.members, self.state.lost, self.state.plan
        came: set[int] = set()  # with a state of their own, which is not that of the present plan until they are in
        if plan is not None and plan.replica > 1:
            came = {*plan.joiners, *(members.keys() - self._planned(plan.members))}
        return {
            slot: status
            for _, agent in sorted(self.agents.items())
            for slot, status in agent.ranks.items()
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
        return any(agent.status.store for agent in self.agents.values() if agent.alive)

    # ------------------------------------------------------------ one slot
    def finished(self, slot: int) -> bool:
        """The slot's present process trained to the end (or its script ended without an error).

        Where ranks do not finish alone nobody has while a world is breaking: all start again, until all end well
        together.
        """
        status = self.status(slot)
        if status is not None and status.state not in ("finished", "exited"):
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
        agent = self.agent(slot)
        unchanged = agent is not None and agent.last_heard > state.since + PUT_BACK_SECONDS
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
        live.stalled, live.stepped = 0.0, Stepped()
        live.progress.reset()
        live.ready_look_at = live.nobody_until = 0.0
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
        state, agent = self.state, self.agent(slot)
        status = agent.ranks.get(slot) if agent else None
        here = slot in state.members or slot in state.joining
        if (
            here
            and agent is not None
            and status is not None
            and status.state in AT_REST
            and status.broken > state.broken  # else it obeys an earlier Break and has not got its plan yet
            and (slot in state.members or state.offer is None or status.broken >= state.offer.generation)
            and not self.finished(slot)
        ):
            self.live.stopped[slot] = agent.progress.get(slot, agent.last_heard)
        else:
            self.live.stopped.pop(slot, None)

    def notice_agent(self, agent: AgentView) -> None:
        """One of the agent's ranks, or its being alive, changed."""
        if agent.waits and agent.alive:
            self.live.ready.add(agent.element)
        else:
            self.live.ready.discard(agent.element)
