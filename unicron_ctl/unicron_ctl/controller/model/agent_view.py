"""The controller's volatile view of one agent: its reports about its ranks and its node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.structs import Progress, RankStatus

CAN_ENTER = ("waiting", "standby")
Route = tuple[bytes, ...]


def keeps(status: RankStatus) -> bool:
    """Whether the rank keeps its state when the job goes on without it, or is formed anew."""
    return status.replica > 1 or bool(status.shards)


class LastWord(NamedTuple):
    """The point that a process had reached by its last status. The status itself is eight times as large, and after a
    failure of all ranks it would be kept for each."""

    incarnation: int
    iteration: int
    phase: str
    done: list[int]
    share: int = 0


def _is_news(old: RankStatus, rank: RankStatus) -> bool:
    """Whether the status says more than the old one, but for its time and the vitals of the process."""
    if rank.iteration != old.iteration or rank.phase != old.phase:  # the usual case; the comparison takes long
        return True
    return rank != old.with_vitals_of(rank)


class Common(NamedTuple):
    """The standing that all ranks of an agent have in common."""

    state: str
    generation: int
    entering: int
    broken: int
    incarnation: int


@dataclass
class AgentView:
    """One agent. Times in seconds on the controller's clock."""

    job: str
    element: int
    agent: str
    node: str
    route: Route
    slots: list[int]
    last_heard: float
    key: str = ""
    """Its CURVE public key; empty if nothing is encrypted."""
    door: str = ""
    """host:port at which other agents check that it lives."""
    status: wire.Status = field(init=False)
    """The last accepted one; an empty one before the first."""
    number: int = 0
    """The number of the last status or heartbeat; 0 when the agent has registered: any status after that is newer."""
    whole: int = 0
    """The number of `status`, to which brief heartbeats refer."""
    whole_at: float = 0.0
    """When that status came."""
    in_step: int = -1
    """The count of the job's phases in which all of its ranks were found to train in the job's generation; -1 after
    a whole status."""
    steps: int = 0
    """Number of the last accepted step report."""
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    progress: dict[int, float] = field(default_factory=dict)
    """slot -> when its status last changed."""
    came: dict[int, float] = field(default_factory=dict)
    """slot -> when its process became able to enter a generation."""
    began: dict[int, float] = field(default_factory=dict)
    """slot -> when its process was first reported, until it can enter a generation."""
    start_seconds: float = 0.0
    """From start to readiness, of the process restarted last on this agent; 0 before the first restart."""
    longest_start: float = 0.0
    """The longest of all starts, the first ones included."""
    expired: bool = False
    """Whether its lease ran out."""
    suspect_since: float | None = None
    """When Slurm first reported that it ended."""
    task_status: int | None = None
    """The wait status (wait(2)) of its task by a hint. Anyone can send a hint, so it names no cause."""
    last_registered: float = 0.0
    repeated: dict[str, float] = field(default_factory=dict)
    """order -> when it was last sent."""
    newest: int = 0
    """The highest generation among its ranks, entered or being entered."""
    broken: int = 0
    """The highest Break that has reached all of its ranks."""
    before: dict[int, LastWord] = field(default_factory=dict)
    """slot -> the process before the present one."""
    waits: bool = False
    """Whether one of its ranks waits to enter, or would."""
    common: Common | None = None
    """If its ranks are all there, and none reports an end, a fault or a note; None if they differ."""
    one_incarnation: int | None = None
    """The incarnation of all its processes, by the last whole status; None if they differ."""
    quiet: bool = False
    """Whether none did in the last whole status."""
    keeps: bool = False
    """Whether one of its ranks keeps its state, by that status."""
    stored_at: float | None = None
    """When its last status with a rendezvous store came, or its first status."""
    can_enter: tuple[tuple[object, ...], bool] | None = None
    """Whether all of its ranks can enter, and what of the job that rests on (`job.candidates`). None after a change."""
    fresh: bool = False
    """Whether its last status showed a process not yet recorded as ready."""
    announced: dict[int, int] = field(default_factory=dict)
    """slot -> the incarnation recorded as ready."""
    noticed_at: float | None = None
    """When its element was asked to end."""
    shown: str = ""
    """The element's state in Slurm's listing since then."""
    restarts: int = 0
    """Slurm's requeues of it up to then."""
    grace: float = 0.0
    """Seconds that its partition grants it in a preemption."""
    images_at: str = ""
    """host:port at which it stores and serves images of the training state."""
    token: str = ""
    """The token to present there."""

    def __post_init__(self) -> None:
        self.status = wire.Status(job=self.job, element=self.element, agent=self.agent, sent=0.0)

    @property
    def alive(self) -> bool:
        return not self.expired and not self.status.leaving

    def start(self, slot: int) -> str:
        """Say whether the slot's process was started warm, or cold and why; empty while there is none."""
        if not self.ranks[slot].pid:
            return ""
        cold = self.status.cold
        return f"cold: {cold[slot]}" if slot in cold else "warm"

    def on_status(self, status: wire.Status, now: float) -> list[int]:
        """Takes in a status of this agent, except for slots of others. Returns the slots whose state has changed, none
        if a newer status came before it.

        An agent dates every change of a rank (`changed`), so a rank with the same date is not looked at closely.
        """
        self.last_heard = now
        if status.number and status.number <= self.number:
            return []
        self.status, self.number, self.whole, self.in_step = status, status.number, status.number, -1
        self.whole_at, self.can_enter = now, None
        if status.store or self.stored_at is None:
            self.stored_at = now
        ranks, said, changed = self.ranks, status.ranks, []
        self.quiet, self.keeps, self.fresh = len(said) == len(self.slots), False, False
        for slot in self.slots:
            rank = said.get(slot)
            if rank is None:
                self.quiet = False
                continue
            old = ranks.get(slot)
            if old is None or old.incarnation != rank.incarnation:
                differs = True
            else:  # a brief form does not say when a rank changed
                differs = old.changed != rank.changed and _is_news(old, rank)
            if differs:
                changed.append(slot)
                self._note_change(slot, old, rank, now)
            if rank.exit is not None or rank.fault is not None or rank.note is not None:
                self.quiet = False
            if rank.replica > 1 or rank.shards:
                self.keeps = True
            ranks[slot] = rank
        self._sum_up()
        self.one_incarnation = self.common.incarnation if self.common is not None else None
        return changed

    def _sum_up(self) -> None:
        """Sum up where its ranks stand."""
        found = {(r.state, r.generation, r.entering, r.broken, r.incarnation) for r in self.ranks.values()}
        if len(found) == 1:
            self._agree(Common(*found.pop()))
            return
        self.common = None
        self.broken = min([rank.broken for rank in self.ranks.values()], default=0)
        self.waits = any(
            rank.state in CAN_ENTER or (rank.state == "stopped" and keeps(rank)) for rank in self.ranks.values()
        )

    def _agree(self, common: Common) -> None:
        """Take in that all of its ranks stand alike."""
        self.common = common if self.quiet else None
        self.broken = common.broken
        self.waits = common.state in CAN_ENTER or (common.state == "stopped" and self.keeps)

    def on_going(self, message: wire.Going, now: float) -> list[int] | None:
        """Takes in a heartbeat with nothing but progress. Returns the slots that went on; None if it refers to a status
        that has not come."""
        self.last_heard = now
        if message.number <= self.number:
            return []
        if message.on != self.whole or not self.whole:
            return None
        self.number, self.status.moved = message.number, message.moved
        if message.progress[0].states:
            return self._on_standing(message, now)
        changed: list[int] = []
        for part, slots in self._parts(message):
            changed += self._take_in_point(part, slots, now)
        for slot, done in message.done.items():
            rank = self.ranks.get(slot)
            if rank is not None and rank.done != done:
                rank.done, self.progress[slot] = done, now
                changed.append(slot)
        return changed

    def _parts(self, message: wire.Going) -> Iterator[tuple[Progress, Iterable[int]]]:
        """Yields each part of a brief form with its slots."""
        apart = {slot for part in message.progress for slot in part.slots}
        for part in message.progress:
            yield part, part.slots or (self.ranks.keys() - apart if apart else self.ranks)

    def _take_in_point(self, part: Progress, slots: Iterable[int], now: float) -> list[int]:
        """Brings the slots to this point, and returns those that were not there yet."""
        ranks, progress, iteration, phase = self.ranks, self.progress, part.iteration, part.phase
        changed: list[int] = []
        for slot in slots:
            rank = ranks.get(slot)
            if rank is None:
                continue
            if rank.iteration != iteration:
                rank.iteration = iteration
                if rank.done:
                    rank.done = []
            elif rank.phase == phase:
                continue
            rank.phase, progress[slot] = phase, now
            changed.append(slot)
        return changed

    def _on_standing(self, message: wire.Going, now: float) -> list[int]:
        """Takes in where its ranks stand. Returns the slots of which that is new."""
        self.in_step, self.can_enter = -1, None
        changed, parts = list[int](), message.progress
        for part, slots in self._parts(message):
            changed += self._take_in_standing(part, slots, message.done, now)
            self.newest = max(self.newest, part.generation, part.entering)
        self.progress.update(dict.fromkeys(changed, now))
        stands = {(part.state, part.generation, part.entering, part.broken) for part in parts}
        if len(stands) == 1 and self.one_incarnation is not None and not all(part.slots for part in parts):
            self._agree(Common(*stands.pop(), self.one_incarnation))
        else:
            self._sum_up()
        return changed

    def _take_in_standing(
        self, part: Progress, slots: Iterable[int], done: Mapping[int, list[int]], now: float
    ) -> list[int]:
        """Brings the slots to this standing, and returns those of which that is new."""
        ranks, kept, changed = self.ranks, part.kept, list[int]()
        stand = part.state, part.generation, part.entering, part.broken
        where, can_enter = (*stand, part.iteration, part.phase), part.state in CAN_ENTER
        moved = self.common is not None and self.common[:4] != stand  # all of them
        for slot in slots:
            rank = ranks.get(slot)
            if rank is None:
                continue
            mine = done.get(slot, [])
            if not moved:
                stood = rank.state, rank.generation, rank.entering, rank.broken, rank.iteration, rank.phase
                if stood == where and rank.done == mine and rank.kept == kept:
                    continue
            changed.append(slot)
            if can_enter and (slot in self.began or rank.state not in CAN_ENTER):
                self._came(slot, rank.incarnation, now)
            rank.state, rank.generation, rank.entering, rank.broken, rank.iteration, rank.phase = where
            rank.done, rank.kept = mine, kept
        return changed

    def _note_change(self, slot: int, old: RankStatus | None, rank: RankStatus, now: float) -> None:
        """Notes the changes of a slot since its `old` status."""
        self.progress[slot] = now
        if rank.generation > self.newest or rank.entering > self.newest:
            self.newest = max(rank.generation, rank.entering)
        if self.announced.get(slot) != rank.incarnation:
            self.fresh = True
        if old is None:
            if rank.state == "starting":
                self.began[slot] = now
        elif old.incarnation != rank.incarnation:
            self.before[slot] = LastWord(old.incarnation, old.iteration, old.phase, old.done, old.share)
            self.began[slot] = now
        if rank.state in CAN_ENTER and (slot in self.began or old is None or old.state not in CAN_ENTER):
            self._came(slot, rank.incarnation, now)

    def _came(self, slot: int, incarnation: int, now: float) -> None:
        """Notes that the slot's process can enter a generation from now on."""
        self.came[slot] = now
        began = self.began.pop(slot, None)
        if began is not None:
            self.longest_start = max(self.longest_start, now - began)
            self.start_seconds = now - began if incarnation else self.start_seconds
