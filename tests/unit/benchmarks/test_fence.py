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


def test_a_line_of_an_earlier_world_is_seen_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "written.0"
    path.write_text("1 n1 10.000\n1 n2 10.010\n3 n1 20.000\n3 n2 20.010\n")
    assert cuts.two_worlds(path) == [] and cuts.worlds(path) == 2 and cuts.last_written(path) == 20.01
    with path.open("a") as file:
        file.write("1 n2 20.020\n3 n1 20")
    assert cuts.two_worlds(path) == ["written.0:5: 1 n2 20.020 after generation 3"]
    assert cuts.last_written(path) == 20.02, "the last line is not whole yet"
    assert cuts.last_written(tmp_path / "none") == 0.0
