"""A need for an admin is on record once, and so is its end."""

from __future__ import annotations

from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.nodes import isolation
from unicron_ctl.shared.log.records import NeedsAdmin, TakeWithheld


def news(world: World) -> list[tuple[str, bool]]:
    return [(e.record.key, e.record.over) for e in world.log if isinstance(e.record, NeedsAdmin)]


def test_a_limit_is_on_record_once_and_so_is_its_end() -> None:
    world = World(FakeSlurm(2), isolation_window_seconds=100.0)
    world.run(2.0)
    world.core.append("1", 0, TakeWithheld(action="hold", element=2, reason="hold 1_2 is not done: a limit"))
    world.run(20.0)
    assert news(world) == [("take hold 1", False)] and world.core.state.attention.keys() == {"take hold 1"}
    world.run(100.0)
    assert news(world) == [("take hold 1", False), ("take hold 1", True)] and not world.core.state.attention


def test_after_a_restart_nothing_is_over_before_slurm_has_shown_its_nodes() -> None:
    world = World(FakeSlurm(2))
    world.run(2.0)
    world.core.state.attention["withheld n1"] = world.now
    world.core.view.slurm.seen = None
    assert not isolation.admin_news(world.core.view).records
    world.run(10.0)
    assert news(world) == [("withheld n1", True)]
