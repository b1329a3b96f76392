"""A node that holds its job up gives its place to a ready spare, at a boundary, and only if that pays."""

from __future__ import annotations

import pytest

from tests.support.plain_agent import PlainAgent
from tests.support.scenarios import asked, boundary, power_off, recorded, trained
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.sense.outliers import Standing
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


def test_the_spare_is_in_before_the_slow_node_leaves_and_nobody_stops(snapshot):
    world, agents = started()
    slow(world, 1)
    world.run(0.5)
    offer = world.job().offer
    assert offer is not None and offer.boundary and sorted(offer.members) == [0, 2, 3]
    assert not world.slurm.calls, "it trains until the boundary"
    assert told(world) == snapshot
    boundary(world, 1.0)
    assert sorted(world.job().members) == [0, 2, 3] and world.job().swap is None
    assert asked(world.slurm, "requeue_hold") == ["n2"]
    assert not world.job().failures and "break" not in world.kinds()
    (avoided,) = recorded(world, records.NodeAvoided)
    assert avoided.suspect and "slot 1 takes twice as long" in avoided.reason
    assert "n2" in world.core.view.avoided_nodes(world.job()) and world.core.state.node("n2").suspicion


def test_without_slurm_it_waits_outside_and_is_no_spare():
    world, agents = started(free=None)
    slow(world, 1)
    world.run(0.5)
    boundary(world, 5.0)
    view = world.core.view.job(world.job())
    assert sorted(world.job().members) == [0, 2, 3] and recorded(world, records.NodeAvoided)[0].suspect
    power_off(world, "n1")
    world.run(20.0)
    boundary(world, 5.0)
    assert sorted(world.job().members) == [2, 3] and world.job().offer is None, "it does not come back"
    assert spares.standing(view) == {}


def lose_the_spare(world: World, agents: list[FakeAgent]) -> None:
    agents[3].die(3)
    world.run(0.2)


WITHHELD = {
    "no spare": (lambda world, agents: lose_the_spare(world, agents), {}, 100.0),
    "costs too little": (lambda world, agents: None, {}, 4.0),
    "switched off": (lambda world, agents: None, {"swap_slow_nodes": "off"}, 100.0),
    "bounds": (lambda world, agents: None, {"max_requeues_per_minute": 0}, 100.0),
}


@pytest.mark.parametrize("why", WITHHELD)
def test_it_keeps_its_place_and_the_log_says_why(why: str, snapshot):
    prepare, config, cost = WITHHELD[why]
    world, agents = started(config=config)
    prepare(world, agents)
    slow(world, 1, cost)
    world.run(10.0)
    assert world.job().swap is None and sorted(world.job().members) == [0, 1, 2]
    assert told(world) == snapshot, "once"


def test_a_spare_that_is_lost_before_the_boundary_drops_the_swap():
    world, agents = started()
    slow(world, 1)
    world.run(0.5)
    agents[3].die(3)
    world.run(1.0)
    assert world.job().phase == "running" and sorted(world.job().members) == [0, 1, 2] and world.job().swap is None
    assert [state for state, _ in told(world)] == ["planned", "dropped", "withheld"]
    agents[3].set(3, state="waiting")
    world.run(2.0)
    boundary(world, 1.0)
    assert sorted(world.job().members) == [0, 2, 3], "it is ready again"


def test_a_lost_node_has_the_spare_before_a_slow_one():
    world, agents = started(nodes=5)
    power_off(world, "n1")
    slow(world, 1)
    world.run(10.0)
    boundary(world, 3.0)
    assert 1 in world.job().members and 4 in world.job().members


def test_all_nodes_of_a_replica_leave_together_and_only_the_slow_one_is_a_suspect():
    world, agents = started(nodes=6, wanted=2, free=1, ranks=1, replica=2)
    slow(world, 1)
    world.run(0.5)
    boundary(world, 3.0)
    assert sorted(world.job().members) == [2, 3, 4, 5]
    assert [record.node for record in recorded(world, records.NodeAvoided)] == ["n2"]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_plain_program_starts_again_for_it_only_where_the_admin_allows_that(allowed: bool):
    config = {"swap_slow_nodes": "always"} if allowed else {}
    world, agents = started(kind=PlainAgent, config=config)
    slow(world, 1, 10_000.0)
    world.run(20.0)
    if not allowed:
        assert "break" not in world.kinds() and "always" in told(world)[-1][1]
        return
    assert "break" in world.kinds() and asked(world.slurm, "requeue_hold") == ["n2"]


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
    world, agents = started()
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
    world, agents = started()
    UNEXPLAINED[case](world)
    world.run(2.0)
    assert told(world) == []
