"""One agent as the controller knows it for now: what it says of its ranks and its node."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron_ctl.shared.protocol.structs import RankStatus
from unicron_ctl.shared.protocol.wire import Status

CAN_ENTER = ("waiting", "standby")
Route = tuple[bytes, ...]


def keeps(status: RankStatus) -> bool:
    """A rank of this kind keeps its state when the job goes on without it, or is formed anew."""
    return status.replica > 1 or bool(status.shards)


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
    """Its CURVE public key; empty where nothing is encrypted."""
    door: str = ""
    """host:port at which others see that it lives."""
    status: Status = field(init=False)
    """The last that was taken in; an empty one before the first."""
    number: int = 0
    """Of that status; 0 when the agent has registered, for whatever it sends from then on is newer."""
    steps: int = 0
    """Number of the last report of a step that was taken in."""
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    progress: dict[int, float] = field(default_factory=dict)
    """slot -> when its status last changed."""
    came: dict[int, float] = field(default_factory=dict)
    """slot -> since when its process can enter a generation."""
    began: dict[int, float] = field(default_factory=dict)
    """slot -> when its process was first heard of, until it can enter one."""
    start_seconds: float = 0.0
    """From a process's start to when it could enter one, of the last that was started again here; 0 before."""
    longest_start: float = 0.0
    """The longest of all, the first start included."""
    expired: bool = False
    """Its lease ran out."""
    suspect_since: float | None = None
    """Since when Slurm says that it ended."""
    task_status: int | None = None
    """What a hint says of its task: a wait status (wait(2)). Anybody can send one, so it names no cause."""
    last_registered: float = 0.0
    repeated: dict[str, float] = field(default_factory=dict)
    """order -> when it was last sent."""
    newest: int = 0
    """The highest generation that one of its ranks is in, or enters."""
    broken: int = 0
    """The highest Break that all of its ranks know of."""
    before: dict[int, RankStatus] = field(default_factory=dict)
    """slot -> the last word of the process that was in it before the present one."""
    waits: bool = False
    """One of its ranks waits to enter, or would."""
    fresh: bool = False
    """Its last status told of a process that is not on record as ready."""
    announced: dict[int, int] = field(default_factory=dict)
    """slot -> the incarnation that is on record as ready."""
    noticed_at: float | None = None
    """Since when its element is to end."""
    shown: str = ""
    """The state in which Slurm has shown the element since then."""
    restarts: int = 0
    """How often Slurm had requeued it then."""
    grace: float = 0.0
    """Seconds for which its partition lets it go on if that is a preemption."""
    images_at: str = ""
    token: str = ""
    """host:port at which it takes and gives images of the training state, and what that takes."""

    def __post_init__(self) -> None:
        self.status = Status(job=self.job, element=self.element, agent=self.agent, sent=0.0)

    @property
    def alive(self) -> bool:
        return not self.expired and not self.status.leaving

    def start(self, slot: int) -> str:
        """Say whether the slot's process was started warm, or cold and why; empty while there is none."""
        if not self.ranks[slot].pid:
            return ""
        cold = self.status.cold
        return f"cold: {cold[slot]}" if slot in cold else "warm"

    def on_status(self, status: Status, now: float) -> list[int]:
        """Takes in a status of this agent; slots that are not its own are ignored. Returns the slots whose state has
        changed, none for a status that a newer one has overtaken.

        An agent dates every change of a rank (`changed`), so nothing else is compared.
        """
        self.last_heard = now
        if status.number and status.number <= self.number:
            return []
        self.status, self.number = status, status.number
        changed, waits, known = [], False, self.ranks
        self.fresh = False
        for slot in self.slots:
            rank = status.ranks.get(slot)
            if rank is None:
                continue
            old = known.get(slot)
            if old is None or old.changed != rank.changed or old.incarnation != rank.incarnation:
                changed.append(slot)
                self._note_change(slot, old, rank, now)
            waits = waits or rank.state in CAN_ENTER or (rank.state == "stopped" and keeps(rank))
            known[slot] = rank
        self.waits = waits
        self.broken = min([rank.broken for rank in known.values()], default=0)
        return changed

    def _note_change(self, slot: int, old: RankStatus | None, rank: RankStatus, now: float) -> None:
        """Notes what is new of a slot since its `old` status."""
        self.progress[slot] = now
        self.newest = max(self.newest, rank.generation, rank.entering)
        self.fresh = self.fresh or self.announced.get(slot) != rank.incarnation
        if old is not None and old.incarnation != rank.incarnation:
            self.before[slot], self.began[slot] = old, now
        elif old is None and rank.state == "starting":
            self.began[slot] = now
        if rank.state in CAN_ENTER and (slot in self.began or old is None or old.state not in CAN_ENTER):
            self._came(slot, rank.incarnation, now)

    def _came(self, slot: int, incarnation: int, now: float) -> None:
        """The slot's process can enter a generation from now on."""
        self.came[slot] = now
        began = self.began.pop(slot, None)
        if began is not None:
            self.longest_start = max(self.longest_start, now - began)
            self.start_seconds = now - began if incarnation else self.start_seconds
