"""Never two worlds of plain programs that write: random faults in simulated time, with the real controller and lease.

`python -m benchmarks.fence.simulated` plays thousands of them, `python -m benchmarks.fence.cuts` real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fence import cuts, simulated
from tests.support.fenced import Worlds
from unicron_ctl.controller.sense import fencing
from unicron_ctl.shared.consensus.restart_lease import Lease

SEEDS = (0, 3, 1021)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_world_writes_after_a_later_one(seed: int) -> None:
    world, done = simulated.play(seed, faults=5)
    assert world.written == [] and sum(done.values()) >= 5 and world.worlds


def _node_cut_off() -> Worlds:
    """Four nodes train, and one is cut off from all."""
    world = Worlds(4, 1)
    world.go_on(5.0)
    world.cuts = {frozenset(("n4", other)) for other in ("", "n1", "n2", "n3")}
    world.go_on(12.0)
    assert len(world.worlds) == 2 and sorted(world.job().members) == [0, 1, 2]
    return world


@pytest.mark.parametrize("broken", ["nobody", "controller", "agent"])
def test_a_side_that_does_not_keep_to_the_lease_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "controller":
        monkeypatch.setattr(fencing, "holds", lambda view, job: False)
    if broken == "agent":
        monkeypatch.setattr(Lease, "expires_at", property(lambda lease: float("inf")))
    assert bool(_node_cut_off().written) == (broken != "nobody")


@pytest.mark.parametrize("seed", range(1, 4))
def test_who_waits_to_begin_keeps_its_door_for_those_that_have_begun(seed: int) -> None:
    """Defect: half of a world had begun, the others of their part not yet, when the controller lost sight of them. They
    kept each other's leases, while the controller counted only the silent ones with processes."""
    world = Worlds(6, seed)
    world.go_on(8.0)
    world.hosts[5].kill_at = world.now
    first = world.newest
    while len(begun := [agent for agent in world.hosts if agent.process > first]) < 3:
        world.go_on(0.1)
    waiting = [agent for agent in world.hosts if agent.coming is not None and not agent.process]
    far = {agent.node for agent in (*begun[:2], *waiting[:2])}
    assert len(far) == 4
    near = {agent.node for agent in world.hosts} - far | {""}
    world.cuts = {frozenset((one, other)) for one in far for other in near}
    world.go_on(130.0)
    assert world.written == [] and world.job().phase == "forming"
    world.go_on(20.0)
    assert world.written == [] and len(world.job().members) == 2 and world.job().phase == "running"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_world_of_one_node_is_waited_for_if_others_could_take_its_place(restarted: bool) -> None:
    """Defect: it holds no lease, for it has no others to miss; so another node began beside it at once."""
    world = Worlds(2, 1)
    world.go_on(8.0)
    world.cuts = {frozenset(("n2", other)) for other in ("", "n1")}
    world.go_on(30.0)
    assert world.job().members.keys() == {0} and world.hosts[0].process
    world.cuts = {frozenset(("n1", other)) for other in ("", "n2")}
    world.go_on(1.0)
    if restarted:
        world.begin_again()
    world.go_on(120.0)
    assert world.written == [] and world.hosts[0].process and 1 not in world.job().members
    world.cuts.clear()
    world.go_on(10.0)
    assert world.written == [] and world.job().phase == "running"


def test_a_node_whose_rank_has_ended_shuts_its_door_too() -> None:
    """Else a node that only the controller has lost keeps its processes by that door, for two minutes."""
    world = Worlds(3, 1)
    world.go_on(8.0)
    world.hosts[0].kill_at = world.now
    world.cuts = {frozenset(("", "n3"))}
    world.go_on(25.0)
    assert world.written == [] and sorted(world.job().members) == [0, 1]


def test_a_line_of_an_earlier_world_is_seen_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "written.0"
    path.write_text("1 n1 10.000\n1 n2 10.010\n3 n1 20.000\n3 n2 20.010\n")
    assert cuts.two_worlds(path) == [] and cuts.worlds(path) == 2 and cuts.last_written(path) == 20.01
    with path.open("a") as file:
        file.write("1 n2 20.020\n3 n1 20")
    assert cuts.two_worlds(path) == ["written.0:5: 1 n2 20.020 after generation 3"]
    assert cuts.last_written(path) == 20.02, "the last line is not whole yet"
    assert cuts.last_written(tmp_path / "none") == 0.0
