"""One agent as the controller knows it for now: what it says of its ranks and its node."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron.ctl.protocol.wire import Agreed, Failing, Image, RankStatus, Status

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
    store: str = ""
    number: int = 0
    """Of the last status that was taken in."""
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
    left: str = ""
    """It said that it ends by itself, and why."""
    suspect_since: float | None = None
    """Since when Slurm says that it ended."""
    task_status: int | None = None
    """What a hint says of its task: a wait status (wait(2)). Anybody can send one, so it names no cause."""
    last_registered: float = 0.0
    repeated: dict[str, float] = field(default_factory=dict)
    """order -> when it was last sent."""
    pinged: int = 0
    """The number of the last Ping that its last status answers."""
    agreed: Agreed | None = None
    """What it and others have agreed on without this controller, until a plan of this controller's."""
    over: int = 0
    """It votes no more on what follows generations up to this one."""
    newest: int = 0
    """The highest generation that one of its ranks is in, or enters."""
    broken: int = 0
    """The highest Break that all of its ranks know of."""
    before: dict[int, RankStatus] = field(default_factory=dict)
    """slot -> the last word of the process that was in it before the present one."""
    fenced: bool = False
    """Restart mode: its processes end by themselves where it is cut off."""
    waits: bool = False
    """One of its ranks waits to enter, or would."""
    fresh: bool = False
    """Its last status told of a process that is not on record as ready."""
    announced: dict[int, int] = field(default_factory=dict)
    """slot -> the incarnation that is on record as ready."""
    images_at: str = ""
    token: str = ""
    """host:port at which it takes and gives images of the training state, and what that takes."""
    cut: int = 0
    """The number of the last cut that it has heard of."""
    images: list[Image] = field(default_factory=list)
    """What lies in its node's memory."""
    saved: Image | None = None
    """The newest that a script without a session keeps there."""
    moved: int = 0
    """Bytes of images that it has sent and received."""
    unmoved: int = 0
    """Images that came to nothing on their way."""
    rates: dict[int, float] = field(default_factory=dict)
    """element -> bytes a second of the last image that went between it and this one."""
    failing: dict[str, Failing] = field(default_factory=dict)
    """address -> an agent (its `images_at`) from which it could not get images of late."""
    refusing: dict[str, Failing] = field(default_factory=dict)
    """address -> an agent to which it could not give images of late."""
    cold: dict[int, str] = field(default_factory=dict)
    """slot -> why its process was started cold; others that have a process were started warm."""

    @property
    def alive(self) -> bool:
        return not self.expired and not self.left

    def start(self, slot: int) -> str:
        """How the slot's process was started: warm, or cold and why; empty while there is none."""
        if not self.ranks[slot].pid:
            return ""
        return f"cold: {self.cold[slot]}" if slot in self.cold else "warm"

    def on_status(self, status: Status, now: float) -> list[int]:
        """Takes in a status of this agent; slots that are not its own are ignored. Returns the slots whose state has
        changed, none for a status that a newer one has overtaken.

        An agent dates every change of a rank (`changed`), so nothing else is compared.
        """
        self.last_heard = now
        if status.number and status.number <= self.number:
            return []
        self.number, self.store, self.left = status.number, status.store, status.leaving
        self.pinged, self.agreed, self.over, self.cold = status.pinged, status.agreed, status.over, status.cold
        self.cut, self.images, self.saved = status.cut, status.images, status.saved
        self.moved, self.unmoved, self.rates = status.moved, status.unmoved, status.rates
        self.failing, self.refusing, self.fenced = status.failing, status.refusing, status.fenced
        changed, waits, fresh, known, announced = [], False, False, self.ranks, self.announced
        newest = self.newest
        for slot in self.slots:
            rank = status.ranks.get(slot)
            if rank is None:
                continue
            old = known.get(slot)
            if old is None or old.changed != rank.changed or old.incarnation != rank.incarnation:
                self.progress[slot] = now
                changed.append(slot)
                newest = max(newest, rank.generation, rank.entering)
                fresh = fresh or announced.get(slot) != rank.incarnation
                if old is not None and old.incarnation != rank.incarnation:
                    self.before[slot], self.began[slot] = old, now
                elif old is None and rank.state == "starting":
                    self.began[slot] = now
                if rank.state in CAN_ENTER and (slot in self.began or old is None or old.state not in CAN_ENTER):
                    self._came(slot, rank.incarnation, now)
            if not waits and (rank.state in CAN_ENTER or (rank.state == "stopped" and keeps(rank))):
                waits = True
            known[slot] = rank
        self.waits, self.fresh, self.newest = waits, fresh, newest
        self.broken = min([rank.broken for rank in known.values()], default=0)
        return changed

    def _came(self, slot: int, incarnation: int, now: float) -> None:
        """The slot's process can enter a generation from now on."""
        self.came[slot] = now
        began = self.began.pop(slot, None)
        if began is not None:
            self.longest_start = max(self.longest_start, now - began)
            self.start_seconds = now - began if incarnation else self.start_seconds
