"""What the server does with a message before the core hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from detector.classify import Classifier
from tests.support.world import FakeAgent, World
from unicron_ctl.config import Config, ControllerConfig
from unicron_ctl.controller.log.store import Store
from unicron_ctl.controller.server import Server
from unicron_ctl.protocol import wire


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    store = Store(tmp_path / "events.db")
    config = Config(controller=ControllerConfig(auth="none"))
    server = Server(config, store, "tcp://127.0.0.1:0", None, Classifier())
    yield server
    server.close()
    store.close()


@pytest.mark.parametrize(("address", "host"), [("10.0.0.5", "10.0.0.5"), ("", "127.0.0.1")])
def test_an_agents_door_is_where_its_connection_comes_from(server: Server, address: str, host: str) -> None:
    """Defect: it could be any host and port, or a name for which everybody's threads waited."""
    message = FakeAgent(World(), "1", 0, "n1").registration()
    message.door = "a.name.that.takes.long:70"
    server._take((b"route",), wire.encode(message), "", address)
    assert server.core.state.jobs["1"].agents[0].door == f"{host}:70"
