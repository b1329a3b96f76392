"""A fixture for tests of the controller: after each test, the log of every world gives its state back.

A folder's `conftest.py` imports it. A test that changes the state by hand takes the fixture and clears the list.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.world import World


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[World]]:
    """The worlds that are checked after the test."""
    worlds: list[World] = []
    begin = World.__init__

    def begin_and_note(world: World, *args: object, **more: object) -> None:
        begin(world, *args, **more)  # type: ignore[arg-type]
        worlds.append(world)

    monkeypatch.setattr(World, "__init__", begin_and_note)
    yield worlds
    for world in worlds:
        world.deliver()
        world.check_replay()
