"""Parts of the volatile knowledge about a job (`model.job_view`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

SECONDS_EACH = 5e-5  # for each rank or agent looked at: 16,384 of them are looked at every 0.8 s
FIRST_NUMBER = 1 << 32  # of rounds of surveys; suspicions have smaller numbers
READY = ("waiting", "entering", "running", "standby")


@dataclass
class LastStep:
    """The newest iteration that a member reported as ended."""

    iteration: int = -1
    at: float = 0.0
    """When the report came."""
    before: float = 0.0
    """When the previous iteration had certainly ended: the newest began after that, with all members."""

    def note_iteration(self, iteration: int, now: float, held: float) -> None:
        """Notes a report. held: seconds for which an agent may have held it back."""
        if iteration > self.iteration:
            self.iteration, self.at, self.before = iteration, now, self.at - held


class ImageRoute(NamedTuple):
    """The way of an image to a rank."""

    receiver: int
    """The element."""
    source: str
    """The address."""
    words: str
    """The way, for people."""


@dataclass
class Fetching:
    """Images of a state that are being copied to ranks that lack them."""

    state: tuple[int, str] = (-1, "")
    began: float | None = None
    moved: int = 0
    """Bytes that all agents together have moved."""
    moved_at: float = 0.0
    """When `moved` last rose, or an image last arrived."""
    most: float = 0.0
    """Seconds to wait in all."""
    again_at: float = 0.0
    left: int = 0
    """Ranks that still lack them."""
    words: dict[tuple[str, int, int], ImageRoute] = field(default_factory=dict)
    """(kind, place, shard) of each image -> its route."""


@dataclass(frozen=True)
class Fence:
    """The processes of an agent of restart mode that fell silent."""

    element: int
    heard: float
    """When the agent was last heard."""
    fenced: bool
    """Its processes end by themselves if the agent is cut off."""
    lease: float = 0.0
    """So many seconds after the last message that was answered; 0.0 as release 0.2 did it."""


@dataclass
class ProgressWatch:
    """Findings about members for which the others wait in the present phase."""

    overdue: str = ""
    """Why the time to enter the present plan or offer is over."""
    enter_check_at: float = 0.0
    """When to check all members for that next."""
    blocked: frozenset[int] = frozenset()
    """Ranks that have stopped at a point where the rest of their replica cannot go on without them."""
    blocked_check_at: float = 0.0
    majority_until: float = 0.0
    """Until when a majority counts as able to train on without the controller."""
    votes_check_at: float = 0.0
    """When to look next for agents that have a vote and no rank that goes on."""

    def reset(self) -> None:
        """A new phase began."""
        self.overdue, self.blocked = "", frozenset()
        self.enter_check_at = self.blocked_check_at = self.majority_until = self.votes_check_at = 0.0


@dataclass
class Survey:
    """Questions to one job's agents about which others they reach. Times are seconds on the controller's clock."""

    number: int = 0
    """The round whose answers are awaited; 0 when none are."""
    last_number: int = FIRST_NUMBER
    begun: float = 0.0
    asked: dict[int, list[int]] = field(default_factory=dict)
    """element -> the elements in the question to it, in the order of its answer."""
    unreachable: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (witness, other): the witness got no answer."""
    last_unreachable: set[tuple[int, int]] | None = None
    """The unreachable pairs of the previous round, which this round should confirm."""
    left_out_answers: set[int] | None = None
    """Elements that have answered, in a round about elements that were left out; None in others."""
    generation: int = -1
    """The last generation for which a survey was made because entering took long."""
    rounds_left: int = 0
    """Rounds to come for that generation. In a large job one round covers only some of the pairs."""
    last_attempt: float = -1.0
    """When the last round was begun, even if there was no agent to ask."""
    rounds_done: int = 0
    """Each round of a large job asks about other pairs."""
    retry_at: float = 0.0
    """When to ask again about the elements that were left out."""

    @property
    def open(self) -> bool:
        return self.number > 0

    def begin_round(self, now: float, asked: dict[int, list[int]]) -> None:
        self.last_number += 1
        self.number, self.begun, self.asked, self.unreachable = self.last_number, now, asked, set()


def look_again(now: float, count: int, least: float = 0.0) -> float:
    """When to look next at `count` ranks or agents, at least `least` seconds after `now`."""
    return now + least + SECONDS_EACH * count
