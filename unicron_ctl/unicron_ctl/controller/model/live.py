"""Parts of what the controller knows of a job for now (`model.job_view`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

SECONDS_EACH = 5e-5  # for each rank or agent looked at: 16,384 of them are looked at every 0.8 s
FIRST_NUMBER = 1 << 32  # of rounds of surveys: smaller numbers are those of suspicions
READY = ("waiting", "entering", "running", "standby")


@dataclass
class LastStep:
    """The newest iteration that a member reported as ended, when that was heard, and when the one before it had ended,
    at the latest that is certain: the newest began after that, with all members."""

    iteration: int = -1
    at: float = 0.0
    before: float = 0.0

    def note_iteration(self, iteration: int, now: float, held: float) -> None:
        """held: seconds for which an agent may have kept the report to itself."""
        if iteration > self.iteration:
            self.iteration, self.at, self.before = iteration, now, self.at - held


class ImageRoute(NamedTuple):
    """The way of an image to a rank: to which element, from which address, and the same for people."""

    receiver: int
    source: str
    words: str


@dataclass
class Fetching:
    """Images of a state on their way to ranks that lack them."""

    state: tuple[int, str] = (-1, "")
    began: float | None = None
    moved: int = 0
    """Bytes that all agents had moved."""
    moved_at: float = 0.0
    """When that rose, or an image came, last."""
    most: float = 0.0
    """Seconds that are waited in all."""
    again_at: float = 0.0
    left: int = 0
    """How many ranks lack them."""
    words: dict[tuple[str, int, int], ImageRoute] = field(default_factory=dict)
    """(kind, place, shard) of each -> where it comes from."""


@dataclass(frozen=True)
class Fence:
    """The processes of an agent of restart mode that fell silent."""

    element: int
    heard: float
    """When the agent was, last."""
    nodes: int
    """Of its world."""
    fenced: bool
    """Its processes end by themselves where it is cut off."""


@dataclass
class ProgressWatch:
    """Findings about members that do not come where the others wait for them, in the present phase."""

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
class Survey:
    """The questions to one job's agents about whom they reach. Times are seconds on the controller's clock."""

    number: int = 0
    """The round whose answers are awaited; 0 when none are."""
    last_number: int = FIRST_NUMBER
    begun: float = 0.0
    asked: dict[int, list[int]] = field(default_factory=dict)
    """element -> the elements that it was asked about, in the order of its answer."""
    unreachable: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (witness, other): the witness got no answer."""
    last_unreachable: set[tuple[int, int]] | None = None
    """The unreachable pairs of the round before, which this round is to confirm."""
    left_out_answers: set[int] | None = None
    """Who has answered, while elements that were left out are asked about; None otherwise."""
    generation: int = -1
    """The generation for which the job was last asked because entering took long."""
    rounds_left: int = 0
    """Rounds that are still to be asked for that generation. One round covers only some pairs of a large job."""
    last_attempt: float = -1.0
    """When the last round was begun, whether anybody could be asked or not."""
    rounds_done: int = 0
    """The rounds of a large job ask about other pairs each."""
    retry_at: float = 0.0
    """When the elements that were left out are asked about again."""

    @property
    def open(self) -> bool:
        """Whether answers are awaited."""
        return self.number > 0

    def begin_round(self, now: float, asked: dict[int, list[int]]) -> None:
        """Begins a round with new questions."""
        self.last_number += 1
        self.number, self.begun, self.asked, self.unreachable = self.last_number, now, asked, set()


def look_again(now: float, count: int, least: float = 0.0) -> float:
    """When to look next at `count` ranks or agents, after a look at `now`; not before `least` seconds."""
    return now + least + SECONDS_EACH * count
