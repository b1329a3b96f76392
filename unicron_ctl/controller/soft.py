"""What the controller knows for now: what agents say, and when they said it. Lost with the process, rebuilt from
their messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from unicron_ctl.controller.machine import State
from unicron_ctl.controller.state import Identity, JobState
from unicron_ctl.protocol.wire import RankStatus, Status

AT_REST = ("stopped", "waiting")


@dataclass
class AgentView:
    """One agent. `expired`: its lease ran out. `left`: it said that it ends by itself. `suspect_since`: Slurm says
    that it ended.
    """

    job: str
    element: int
    agent: str
    node: str
    route: tuple[bytes, ...]
    slots: list[int]
    last_heard: float
    store: str = ""
    sent: float = 0.0
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    progress: dict[int, float] = field(default_factory=dict)  # slot -> when its status last changed, our clock
    expired: bool = False
    left: str = ""
    suspect_since: float | None = None
    task_status: int | None = None  # of its task, as the plugin's hint says: a wait status (wait(2))
    last_registered: float = 0.0
    repeated: dict[str, float] = field(default_factory=dict)  # order -> when it was last sent

    @property
    def key(self) -> tuple[str, int]:
        return self.job, self.element

    @property
    def alive(self) -> bool:
        return not self.expired and not self.left

    def take(self, status: Status, now: float) -> bool:
        """A status of this agent; slots that are not its own are ignored. True when it says something that decisions
        hang on.
        """
        news = self.store != status.store
        self.last_heard, self.sent, self.store, self.suspect_since = now, status.sent, status.store, None
        self.left = status.leaving
        for slot in self.slots:
            rank = status.ranks.get(slot)
            if rank is None:
                continue
            old = self.ranks.get(slot)
            if old is None or old.changed != rank.changed or old.incarnation != rank.incarnation:
                self.progress[slot] = now
            news = news or old is None or _gist(old) != _gist(rank)
            self.ranks[slot] = rank
        return news


def _gist(rank: RankStatus) -> tuple:
    return (
        rank.state,
        rank.incarnation,
        rank.generation,
        rank.entering,
        rank.broken,
        rank.exit is None,
        rank.fault is None,
    )


@dataclass
class JobView:
    """A job's durable state together with its agents' statuses."""

    state: JobState
    agents: dict[int, AgentView]

    def status(self, slot: int) -> RankStatus | None:
        view = self.agents.get(self.state.element(slot))
        return view.ranks.get(slot) if view else None

    def identity(self, slot: int) -> Identity | None:
        view, status = self.agents.get(self.state.element(slot)), self.status(slot)
        return Identity(view.agent, status.incarnation) if view and status else None

    def all_ranks(self) -> Iterator[tuple[AgentView, int, RankStatus]]:
        for element in sorted(self.agents):
            view = self.agents[element]
            for slot in sorted(view.ranks):
                yield view, slot, view.ranks[slot]

    def finished(self, slot: int) -> bool:
        """The slot's present process trained to the end (or its script ended without an error).

        In restart mode nobody has while a world is breaking: all start again, until all end well together.
        """
        if self.state.restart_mode and self.state.phase == State.BREAKING:
            return False
        status, identity = self.status(slot), self.identity(slot)
        if status is None:
            record, member = self.state.agents.get(self.state.element(slot)), self.state.members.get(slot)
            return bool(record and member and record.gone == "finished" and record.agent == member.agent)
        if identity != self.state.members.get(slot):
            return False
        return status.state == "finished" or (
            status.state == "exited" and status.exit is not None and status.exit.code == 0
        )
