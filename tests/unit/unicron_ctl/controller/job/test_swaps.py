"""A node that holds its job up gives its place to a ready spare, at a boundary, and only if that pays."""

from __future__ import annotations

import pytest

from tests.support.plain_agent import PlainAgent
from tests.support.scenarios import asked, boundary, power_off, recorded, restart_controller
from tests.support.slow_nodes import slow, started, told
from tests.support.world import FakeAgent, World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.job import spares
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.log import records
from unicron_ctl.shared.settings.config import PartitionConfig
from unicron_ctl.shared.settings.partitions import OBSERVE


def test_the_spare_is_in_before_the_slow_node_leaves_and_nobody_stops(snapshot):
    world, _ = started()
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
    world, _ = started(free=None)
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


def test_it_leaves_when_it_has_cost_as_much_as_the_swap():
    world, _ = started()
    slow(world, 1, 4.0)
    world.run(5.0)
    assert world.job().swap is None and told(world) == [], "it waits, which is no news"
    slow(world, 1, 5.5)
    world.run(0.3)
    assert world.job().swap is not None


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
    world, _ = started(nodes=5)
    power_off(world, "n1")
    slow(world, 1)
    world.run(10.0)
    boundary(world, 3.0)
    assert 1 in world.job().members and 4 in world.job().members


def test_the_last_one_with_the_state_stays_until_a_spare_has_it_too():
    """The other one was lost once the swap was planned: all spares would enter beside the slow one, and none was left
    for its place."""
    world, _ = started(nodes=4, wanted=2)
    slow(world, 1)
    world.run(0.5)
    assert world.job().swap is not None
    power_off(world, "n1")
    for _ in range(8):
        world.run(3.0)
        boundary(world, 1.0)
    assert sorted(world.job().members) == [2, 3] and asked(world.slurm, "requeue_hold") == ["n2"]


def test_all_nodes_of_a_replica_leave_together_and_only_the_slow_one_is_a_suspect():
    world, _ = started(nodes=6, wanted=2, free=1, ranks=1, replica=2)
    slow(world, 1)
    world.run(0.5)
    boundary(world, 3.0)
    assert sorted(world.job().members) == [2, 3, 4, 5]
    assert [record.node for record in recorded(world, records.NodeAvoided)] == ["n2"]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_plain_program_starts_again_for_it_only_where_the_admin_allows_that(allowed: bool):
    config = {"swap_slow_nodes": "always"} if allowed else {}
    world, _ = started(kind=PlainAgent, config=config)
    slow(world, 1, 10_000.0)
    world.run(20.0)
    if not allowed:
        assert "break" not in world.kinds() and "always" in told(world)[-1][1]
        return
    assert "break" in world.kinds() and asked(world.slurm, "requeue_hold") == ["n2"]


def test_the_status_says_why_it_keeps_its_place(snapshot):
    world, agents = started()
    lose_the_spare(world, agents)
    slow(world, 1)
    world.run(1.0)
    (job,) = answers.answer(world.core, None, "status", {}, EVERYBODY).jobs
    assert job.degraded.swap == "no spare is ready"
    assert [note for note in status_tables.job_notes(job) if "slow" in note] == snapshot
    explained = answers.answer(world.core, None, "explain", {"job": "1"}, EVERYBODY)
    assert "node_swap" in [decision.kind for decision in explained.decisions]


def test_what_nothing_tells_apart_stays_together():
    """A pipeline over two nodes goes at the pace of its slowest stage."""
    world, _ = started(nodes=6, wanted=2, free=1, ranks=1, replica=2)
    slow(world, 0)
    world.core.runtimes["1"].sensors.times.unclear = "its replica is on n1, n2"
    world.run(1.0)
    assert world.job().swap is None and "its replica is on" in told(world)[-1][1]


def test_a_spare_that_comes_and_goes_is_told_once():
    world, agents = started()
    slow(world, 1, 1.0)
    for _ in range(4):
        agents[3].die(3)
        world.run(0.5)
        agents[3].set(3, state="waiting")
        world.run(0.5)
    assert [state for state, _ in told(world)] == ["withheld"]


def test_a_restarted_controller_ends_the_swap():
    world, _ = started()
    slow(world, 1)
    world.run(0.5)
    assert world.job().swap is not None
    restart_controller(world)
    assert world.job().swap is not None
    world.run(3.0)
    boundary(world, 3.0)
    assert sorted(world.job().members) == [0, 2, 3] and world.job().swap is None
    assert asked(world.slurm, "requeue_hold") == ["n2"]


def test_where_the_admin_only_observes_nothing_moves():
    world, _ = started(config={"partitions": {"default": PartitionConfig(max_weight=100.0, mode=OBSERVE)}})
    slow(world, 1)
    world.run(10.0)
    boundary(world, 3.0)
    assert world.job().swap is None and sorted(world.job().members) == [0, 1, 2] and not world.slurm.calls
    assert [state for state, _ in told(world)] == ["withheld"]
    assert [record.node for record in recorded(world, records.ActionObserved) if record.node] == ["n2"]
