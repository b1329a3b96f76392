"""A job of fake ranks that trains and hangs, with the times that real ranks measure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tests.support.world import MICRO_BATCHES, World
from unicron_ctl.shared.consensus.survivors_plan import deal
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.protocol import structs, wire

USUAL = 0.4
ORDERS = (wire.Break, wire.StopRank, wire.StartRank)


def phases(count: int, slow: float = 1.0, outside: float = 0.0) -> list[float]:
    """Seconds of an iteration with so many micro-batches, in the order of `structs.PHASES`; slow: factor of the
    backward pass."""
    return [0.001 * count, 0.03 * count, 0.06 * count * slow, 0.02, 0.01, outside]


def train(
    world: World,
    iterations: int,
    seconds: float = USUAL,
    slow: Mapping[int, float] | None = None,
    first: int | None = None,
    outside: Mapping[int, float] | None = None,
) -> int:
    """All members train so many iterations of `seconds`, with 2 % noise; `slow`: slot -> factor of its backward;
    `outside`: slot -> seconds between two iterations. Returns the next iteration."""
    job = world.job("1")
    first = job.iteration + 1 if first is None else first
    rng = random.Random(first)
    agents = {slot: a for a in world.agents if a.job == "1" and not a.silent for slot in a.slots}
    for iteration in range(first, first + iterations):
        shares, took = deal(range(MICRO_BATCHES), sorted(job.members)), seconds * rng.gauss(1, 0.02)
        world.run(took)
        for slot in sorted(job.members):
            indices = shares[slot]
            times = phases(len(indices), (slow or {}).get(slot, 1.0), (outside or {}).get(slot, 0.0))
            agents[slot].report(iteration, structs.RankStep(slot, indices, took, 1.0, None, times))
            agents[slot].set(slot, iteration=iteration + 1, phase="computing", done=[])
    return first + iterations


def trained_world(nodes: int = 3, iterations: int = 20, **settings: Any) -> World:
    """A world without Slurm whose job has trained so many iterations."""
    world = World(**{"hang_floor_seconds": 0.5, **settings})
    world.start_job(nodes=nodes)
    train(world, iterations)
    return world


def hang(world: World, who: list[int], where: str = "computing", others: str = "reducing") -> None:
    """The others go on into the collective; those who hang stay where they are."""
    for agent in world.agents:
        for slot in agent.slots:
            if agent.ranks[slot].state == "running":
                agent.set(slot, phase=where if slot in who else others)


def events(world: World, kind: str) -> list[Event]:
    """The log's events of a kind."""
    return [event for event in world.log if event.kind == kind]


def sent(world: World, kind: type | tuple[type, ...]) -> list[Any]:
    """The messages of a kind that left the controller."""
    return [message for _, message in world.sent if isinstance(message, kind)]
