"""The interface of replication to a job's training state: each kind of state has its strategy. Pure.

Here are also the failure domains: nodes behind a switch, and nodes of a block, which leave the job together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import View
from unicron_ctl.controller.replication.nearest import Way
from unicron_ctl.controller.replication.receivers import Away
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.protocol.structs import RankStatus

LEAD_SECONDS = 1.0  # for all ranks to hear of a cut before they reach its iteration

State = tuple[int, str]  # (iteration, mark)


class StoredState(NamedTuple):
    """A state of which every part is in some node's memory."""

    iteration: int
    nodes: int  # the fewest that have the same part
    fits: bool = True  # the present ranks can use it


@dataclass
class Pace:
    """The speed at which a script saves states."""

    generation: int = -1
    iteration: int = -1  # the newest one of this generation
    at: float = 0.0  # when it was first seen
    rate: float = 0.0  # iterations a second, 0 while not known


class ReplicationStrategy(ABC):
    """One kind of training state: its keepers, and the receivers of its copies. Strategies have no memory."""

    lead_seconds = LEAD_SECONDS
    removable = True
    """Copies are removed once they are not needed."""

    @abstractmethod
    def first_iteration(self, job: JobView) -> int:
        """The iteration that the first ranks are in."""

    @abstractmethod
    def rate(self, view: View, job: JobView, pace: Pace) -> float | None:
        """Return iterations a second; None while not known."""

    @abstractmethod
    def targets(
        self, view: View, job: JobView, waiting: Collection[int], away: Away
    ) -> dict[int, list[structs.Holder]]:
        """Return, by element, the receivers of its parts of a cut; empty if enough nodes have all of it, or none could.

        waiting: elements that are hot spares. away: by element, nodes to which its copies do not go.
        """

    @abstractmethod
    def stored_states(self, job: JobView) -> list[StoredState]:
        """Return states that are whole in the memory of living nodes."""

    @abstractmethod
    def parts(self, job: JobView, agent: AgentView) -> int:
        """Return the number of parts of a cut that the agent's ranks keep."""

    def kept_iterations(self, job: JobView, cut: int) -> set[int]:
        """Return the iterations that ranks have kept for this cut: none, or several if they heard of it too late."""
        return {image.iteration for agent in job.alive() for image in agent.status.images if image.iteration == cut}

    def without_memory(self, job: JobView) -> dict[int, list[str]]:
        """Return place -> nodes without a memory, because of which no cut would ever be whole."""
        return {}

    def begun(self, job: JobView) -> bool:
        """Whether ranks keep states; no cut is named before."""
        return True

    def alike(self, job: JobView) -> bool:
        """Whether all ranks keep the same state."""
        return False

    def sources(
        self, view: View, job: JobView, reports: Mapping[int, RankStatus]
    ) -> Iterator[tuple[State, Sequence[Way] | None]]:
        """Yield each state in memory, the newest first, and how the reporting ranks get what they lack of it; None if
        they cannot."""
        return iter(())


def with_memory(job: JobView) -> list[AgentView]:
    """Return living agents that keep training state in memory, in order of their elements. An agent that could make no
    folder for it keeps none, and its job's log says so."""
    return [agent for agent in job.alive() if agent.images_at]


def images_of(job: JobView, kind: str) -> Iterator[tuple[AgentView, structs.Image]]:
    """Yield the images of this kind in living nodes' memory, with the agents that have them, without those that are
    left of another layout."""
    for agent in with_memory(job):
        for image in agent.status.images:
            former = image.size != job.replica or 0 < image.base <= job.state.laid_out
            if image.kind == kind and not former:
                yield agent, image


def domains_of(view: View, job: JobState) -> Mapping[str, str]:
    """Return node -> its failure domain, for the job's nodes: the switch of its block's first node if the job's blocks
    are behind several, otherwise its block. Without blocks, the node's switch or its block in Slurm."""
    switches = view.slurm.domains
    if job.settings.block == 1:
        return switches
    first = {job.block_of(element): agent.node for element, agent in sorted(job.agents.items(), reverse=True)}
    of_block = {block: switches.get(node, "") for block, node in first.items()}
    several = len(set(of_block.values())) > 1
    blocks = ((agent.node, job.block_of(element)) for element, agent in job.agents.items())
    return {node: of_block[block] if several else str(block) for node, block in blocks}


def kinds_of(job: JobState) -> list[Callable[[AgentView], str]]:
    """Return functions that name an agent's node and block: copies should be in several of each kind."""
    nodes: Callable[[AgentView], str] = lambda agent: agent.node  # noqa: E731
    blocks: Callable[[AgentView], str] = lambda agent: str(job.block_of(agent.element))  # noqa: E731
    return [nodes] if job.settings.block == 1 else [nodes, blocks]
