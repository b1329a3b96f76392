"""Jobs with a spare, in which a node is slow."""

from __future__ import annotations

from tests.support.scenarios import recorded, trained
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.sense.timing import Slow
from unicron_ctl.shared.log import records


def started(nodes: int = 4, free: int | None = 1, wanted: int = 1, **settings) -> tuple[World, list[FakeAgent]]:
    world, agents = trained(nodes, free, spares=wanted, **settings)
    world.run(2.0)
    assert world.job().phase == "running" and spares.standing(world.core.view.job(world.job()))
    return world, agents


def slow(world: World, slot: int, cost: float = 100.0) -> None:
    """The slot has cost the job so many seconds, as its times have shown."""
    times = world.core.runtimes["1"].sensors.times
    node = world.job().node(slot)
    times.straggler = Slow(world.now, 9, slot, node, "backward", 2.0, f"slot {slot} takes twice as long")
    times.straggler_cost = cost


def told(world: World) -> list[tuple[str, str]]:
    return [(record.state, record.reason) for record in recorded(world, records.NodeSwap)]
