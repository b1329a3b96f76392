"""Parts of what the controller knows of a job for now (`model.job_view`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

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
