"""Whether something answers at a port, and what says nothing of it."""

from __future__ import annotations

import errno
import socket
from typing import NoReturn

import pytest

from unicron_ctl.controller.worker import connects


def test_answers_and_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connects("127.0.0.1", port, 5.0) is True
    assert connects("127.0.0.1", port, 5.0) is False


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENFILE, "Too many open files in system"),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        UnicodeError("label too long"),
    ],
)
def test_our_own_trouble_is_no_word_about_the_node(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*words: object) -> NoReturn:
        raise error

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert connects("n1", 6818, 0.1) is None
