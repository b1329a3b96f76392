"""The loop without its sockets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from unicron_ctl.controller.server import TICK_SECONDS, Server


def test_messages_that_take_long_to_handle_do_not_keep_the_next_tick_waiting(monkeypatch: Any) -> None:
    server, taken = Server.__new__(Server), []
    monkeypatch.setattr(server, "now", lambda: len(taken) * TICK_SECONDS / 3, raising=False)
    monkeypatch.setattr(server, "_take", lambda *frames: taken.append(frames), raising=False)
    server.key = ""
    server._router = SimpleNamespace(recv_multipart=lambda *options: [b"peer", b"a message"])  # type: ignore[assignment]
    server._receive()
    assert len(taken) == 3
    server._receive()
    assert len(taken) == 6, "what is left is taken in the next turn"
