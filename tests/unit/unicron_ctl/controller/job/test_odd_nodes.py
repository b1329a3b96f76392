"""A node that stands out among its peers gives its place to a spare if its job is slow with it, and only then."""

from __future__ import annotations

import pytest

from tests.support.scenarios import asked, boundary
from tests.support.slow_nodes import started, told
from tests.support.world import World
from unicron_ctl.controller.sense.outliers import Standing
from unicron_ctl.controller.sense.timing import Slow


def odd(world: World, node: str, metric: str = "packet_loss", since: float | None = None) -> None:
    """The node stands out among its peers."""
    since = world.now if since is None else since
    peers = world.core.runtimes["1"].sensors.peers
    peers.ill[node] = Standing(node, [node], None, metric, f"{node}: {metric} is 0.2", since)


def degraded(world: World, slot: int | None = None) -> None:
    """The job is slow, at twice the usual time; a slot may be to blame."""
    times = world.core.runtimes["1"].sensors.times
    node = world.job().node(slot) if slot is not None else ""
    times.degraded = Slow(world.now - 60.0, 9, slot, node, "", None, "the last 16 iterations took 2.00x the usual")
    times.monitor._window.extend([2.0] * 64)
    times.monitor._baseline = 1.0


def test_a_node_that_stands_out_leaves_when_its_job_is_slow_with_it(snapshot):
    world, _ = started()
    odd(world, "n2", since=world.now - 60.0)
    world.run(5.0)
    assert told(world) == [], "that it differs harms nobody"
    degraded(world)
    world.run(0.5)
    assert told(world) == snapshot
    boundary(world, 1.0)
    assert sorted(world.job().members) == [0, 2, 3] and asked(world.slurm, "requeue_hold") == ["n2"]


UNEXPLAINED = {
    "another rank is slow": lambda world: (odd(world, "n2"), degraded(world, 0)),
    "two stand out": lambda world: (odd(world, "n2"), odd(world, "n3"), degraded(world)),
    "either end of a link": lambda world: (odd(world, "n2", "link_loss"), degraded(world)),
    "it stood out for hours": lambda world: (odd(world, "n2", since=world.now - 7200.0), degraded(world)),
}


@pytest.mark.parametrize("case", UNEXPLAINED)
def test_a_node_that_does_not_explain_the_slowness_keeps_its_place(case):
    world, _ = started()
    UNEXPLAINED[case](world)
    world.run(2.0)
    assert told(world) == []
