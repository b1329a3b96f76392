"""Lines of JSON from an agent or a rank to lm_manager.py. A broken link shows the manager a death."""

from __future__ import annotations

import json
import os
import socket
from typing import Any


class Link:
    """A connection that is made again after the manager's restart; what is said meanwhile is lost."""

    def __init__(self, **hello: Any) -> None:
        self._hello, self._socket = hello, None
        self._connect()

    def _connect(self) -> None:
        try:
            self._socket = socket.create_connection(("127.0.0.1", int(os.environ["LEADERBOARD_MANAGER"])))
        except OSError:
            self._socket = None
        else:
            self.say(**self._hello)

    def say(self, **words: Any) -> None:
        if self._socket is None:
            self._connect()
        if self._socket is not None:
            try:
                self._socket.sendall(json.dumps(words).encode() + b"\n")
            except OSError:
                self._socket = None

    def wait(self) -> None:
        """Wait for the end of the connection."""
        if self._socket is not None:
            self._socket.recv(1)
            self._socket = None
