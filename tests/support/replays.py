"""A fixture for tests of the controller: after each test, the log of every world gives its state back.

A folder's `conftest.py` imports it. Tests that change the state by hand have the mark `by_hand`, and those of random
cases check each world themselves: a failure after the test would not be made smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.world import World


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Check the worlds after the test."""
    if request.node.get_closest_marker("by_hand") or getattr(request.function, "is_hypothesis_test", False):
        yield
        return
    worlds: list[World] = []
    begin = World.__init__

    def begin_and_note(world: World, *args: object, **more: object) -> None:
        begin(world, *args, **more)  # type: ignore[arg-type]
        worlds.append(world)

    monkeypatch.setattr(World, "__init__", begin_and_note)
    yield
    for world in worlds:
        world.deliver()
        world.check_replay()
