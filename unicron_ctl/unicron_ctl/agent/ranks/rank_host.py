"""The ranks of an agent, with all that starts, watches and keeps warm their processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unicron_ctl.agent.connections.connections import Connections
from unicron_ctl.agent.connections.job_environment import Place
from unicron_ctl.agent.ranks.rank_logs import RankLogs
from unicron_ctl.agent.ranks.rank_processes import Processes
from unicron_ctl.agent.ranks.ranks import Environment, Rank, rank_environment, surroundings_of
from unicron_ctl.agent.ranks.warm_start import WarmStart


@dataclass
class RankHost:
    """An agent's ranks, and what runs their processes.

    ranks: by slot. environment: of a slot's process. logs: where the output of their processes goes.
    """

    ranks: dict[int, Rank]
    environment: Environment
    processes: Processes
    warm_start: WarmStart
    logs: RankLogs


def host_ranks(
    place: Place,
    command: Sequence[str],
    environment: Mapping[str, str],
    net: Connections,
    told: Callable[[], Mapping[str, str]],
    hear: Callable[[], None],
    ended: Callable[[Rank], None],
    tell: Callable[[], None],
) -> RankHost:
    """environment: the agent's. told(): what a process that starts now is told of the job. For the others see
    :class:`Processes`."""
    made = rank_environment(place, net.ranks.endpoint, dict(environment), told)
    around = surroundings_of(place)
    ranks = {
        slot: Rank(slot, local, command, made, surroundings=around[local]) for local, slot in enumerate(place.slots)
    }
    processes = Processes(net, hear, ended, tell)
    warm_start = WarmStart(ranks, command, net, processes.attend)
    logs = RankLogs(environment, place.job)
    for rank in ranks.values():
        rank.logs = logs
    return RankHost(ranks, made, processes, warm_start, logs)
