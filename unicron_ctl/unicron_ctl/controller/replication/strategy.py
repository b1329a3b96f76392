"""The questions of replication about a job's training state. Each kind of state has its strategy (`strategies`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View
from unicron_ctl.controller.replication.nearest import Way
from unicron_ctl.controller.replication.receivers import Away
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.structs import RankStatus

LEAD_SECONDS = 1.0  # for a cut to be known to all ranks before they come by its iteration

State = tuple[int, str]  # (iteration, mark)


class StoredState(NamedTuple):
    """A state of which every part lies in some node's memory. nodes: the fewest that have the same part. fits: the
    present ranks can use it."""

    iteration: int
    nodes: int
    fits: bool = True


@dataclass
class Pace:
    """The speed at which a script saves states: the newest one of this generation, when it was seen, and iterations a
    second, 0 while that is not known."""

    generation: int = -1
    iteration: int = -1
    at: float = 0.0
    rate: float = 0.0


class ReplicationStrategy(ABC):
    """One kind of training state: who keeps which part of it, and who is given copies. Strategies keep nothing."""

    lead_seconds = LEAD_SECONDS
    removable = True
    """Copies are removed once they are not needed."""

    @abstractmethod
    def first_iteration(self, job: JobView) -> int:
        """The iteration that the first ranks are in."""

    @abstractmethod
    def rate(self, view: View, job: JobView, pace: Pace) -> float | None:
        """Iterations a second; None while that is not known."""

    @abstractmethod
    def targets(
        self, view: View, job: JobView, waiting: Collection[int], away: Away
    ) -> dict[int, list[structs.Holder]]:
        """By element, to whom it gives what it keeps of a cut; empty where enough nodes have all of it, or none could.

        waiting: elements that are hot spares. away: by element, nodes to which its copies do not go.
        """

    @abstractmethod
    def stored_states(self, job: JobView) -> list[StoredState]:
        """States that are whole in the memory of living nodes."""

    @abstractmethod
    def parts(self, job: JobView, agent: AgentView) -> int:
        """Return the number of parts of a cut that the agent's ranks keep."""

    def kept_iterations(self, job: JobView, cut: int) -> set[int]:
        """The iterations that ranks have kept for this cut: none, or several, where they heard of it too late."""
        return {image.iteration for agent in job.alive() for image in agent.status.images if image.iteration == cut}

    def without_memory(self, job: JobView) -> dict[int, list[str]]:
        """place -> nodes without a memory on whose account no cut would ever be whole."""
        return {}

    def begun(self, job: JobView) -> bool:
        """Ranks keep states; before that no cut is named."""
        return True

    def alike(self, job: JobView) -> bool:
        """All ranks keep the same state."""
        return False

    def sources(
        self, view: View, job: JobView, reports: Mapping[int, RankStatus]
    ) -> Iterator[tuple[State, Sequence[Way] | None]]:
        """Each state in memory, the newest first, and how the reporting ranks come by what they lack of it; None where
        they cannot."""
        return iter(())


def with_memory(job: JobView) -> list[AgentView]:
    """Living agents that keep training state in memory, in order of their elements. One that could make no folder for
    it does not, and its job's log says so."""
    return [agent for agent in job.alive() if agent.images_at]
