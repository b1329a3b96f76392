"""The node's rendezvous store: a child of the agent, since it needs torch, and the agent must not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

TRIES = 3


class Store(Protocol):
    """What an agent needs of a store. port: None until it answers. python: the interpreter that runs it, if any."""

    python: str
    port: int | None

    def start(self) -> int | None:
        """Start it; returns the descriptor to poll, None when there is none."""

    def read(self, descriptor: int) -> bool:
        """Take in what it printed; False when it has ended."""

    def close(self) -> None:
        """End it."""


class StoreProcess:
    """`transition.store_host` under the interpreter that has torch. The agent polls its standard output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self.python = python_of(command)
        # -m puts the working folder first in sys.path; a folder `transition` of the user's there must not be taken.
        self._environment = {**environment, "PYTHONSAFEPATH": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._tries = 0
        self.port: int | None = None

    def start(self) -> int | None:
        """Start it; returns the descriptor to poll, None when it cannot be started or has ended too often."""
        self.port = None
        self._tries += 1
        if self._tries > TRIES:
            return None
        command = [self.python, "-m", "transition.store_host"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment
            )
        except OSError:
            return None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self, descriptor: int) -> bool:
        """Take in what it printed; False when it has ended."""
        data = os.read(descriptor, 100)
        words = data.split()
        if len(words) == 2 and words[0] == b"port" and words[1].isdigit():
            self.port = int(words[1])
        return bool(data)

    def close(self) -> None:
        """End it."""
        process, self._process, self.port = self._process, None, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


def python_of(command: Sequence[str]) -> str:
    """The interpreter that has torch: the user's when the command names one, else this one."""
    return command[0] if os.path.basename(command[0]).startswith("python") else sys.executable
