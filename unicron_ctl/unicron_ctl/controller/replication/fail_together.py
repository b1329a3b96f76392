"""Failure domains: nodes behind a switch, and nodes of a block, which leave the job together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unicron_ctl.controller.model.agent_view import AgentView
from unicron_ctl.controller.model.job_state import JobState
from unicron_ctl.controller.model.view import View


def domains_of(view: View, job: JobState) -> Mapping[str, str]:
    """Return node -> its failure domain, for the job's nodes: the switch of its block's first node if the job's blocks
    are behind several, otherwise its block. Without blocks, the node's switch or its block in Slurm."""
    switches = view.slurm.domains
    if job.settings.block == 1:
        return switches
    first = {job.block_of(element): agent.node for element, agent in sorted(job.agents.items(), reverse=True)}
    found = {block: switches.get(node, "") for block, node in first.items()}
    several = len(set(found.values())) > 1
    blocks = ((agent.node, job.block_of(element)) for element, agent in job.agents.items())
    return {node: found[block] if several else str(block) for node, block in blocks}


def kinds_of(job: JobState) -> list[Callable[[AgentView], str]]:
    """Return functions that name an agent's node and block: copies should be in several of each kind."""
    nodes: Callable[[AgentView], str] = lambda agent: agent.node  # noqa: E731
    blocks: Callable[[AgentView], str] = lambda agent: str(job.block_of(agent.element))  # noqa: E731
    return [nodes] if job.settings.block == 1 else [nodes, blocks]
