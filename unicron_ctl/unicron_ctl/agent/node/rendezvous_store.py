"""The node's rendezvous store: a child of the agent, since it needs torch, and the agent must not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from unicron_ctl.agent.ranks.warm_commands import python_of
from unicron_ctl.agent.ranks.zygote_client import Coming
from unicron_detector.processes.supervise import Child

TRIES = 3
AGAIN_SECONDS = 2.0  # before a store that found no descriptor is tried again
HOST = ["-m", "unicron_transition.generations.store_host"]


class Store(Protocol):
    """A rendezvous store, as the agent uses it. port: None until it answers. pid: of its process, if any."""

    port: int | None

    @property
    def pid(self) -> int | None: ...

    def start(self) -> None:
        """Start it."""

    def complete_start(self) -> None:
        """Take in the process that was forked for it."""

    def close(self) -> None:
        """End it."""


class StoreProcess:
    """`generations.store_host` under the interpreter that has torch: forked at first, a process of its own when it has
    ended.

    environment: for a process of its own. fork: a warm process that runs the words with that standard output, None
    where there is no zygote. watch, unwatch: a descriptor, and what to call when it can be read. told: the port has
    changed. warn: writes a line into the job's log.

    The ranks come from the same zygote, later than the store. So nobody waits for it longer than for them.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        fork: Callable[[list[str], int], Coming | None],
        watch: Callable[[int, Callable[[], object]], None],
        unwatch: Callable[[int], None],
        told: Callable[[], None],
        warn: Callable[[str], None],
    ):
        self._python = python_of(command)
        # -m puts the working folder first in sys.path; the user's `signal.py` there must not be taken.
        self._environment = {**environment, "PYTHONSAFEPATH": "1"}
        self._fork, self._watch, self._unwatch, self._told, self._warn = fork, watch, unwatch, told, warn
        self._coming: Coming | None = None
        self._process: Child | subprocess.Popen[bytes] | None = None
        self._output = self._its_output = -1  # the agent's end of a pipe, and the store's until it has begun
        self._tries = 0
        self._again: float | None = None  # when it is tried again (monotonic)
        self._short = False  # it could not be started, and that was said
        self.port: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it, unless it has ended too often."""
        self._again = None
        if self._tries >= TRIES:
            return
        try:
            self._output, self._its_output = os.pipe()
        except OSError as error:  # no descriptor is left: there may be one soon
            self._again = time.monotonic() + AGAIN_SECONDS
            if not self._short:
                self._warn(f"couldn't start the rendezvous store: {error.strerror}; it is tried again")
            self._short = True
            return
        self._tries += 1
        os.set_blocking(self._output, False)
        self._watch(self._output, self._read)
        try:
            self._coming = self._fork([*HOST, "forked"], self._its_output) if self._tries == 1 else None
        except OSError:
            self._coming = None
        if self._coming is None:
            self._begin_cold()

    def complete_start(self) -> None:
        """The process that was forked begins; where none was, the store starts cold."""
        if self._again is not None and time.monotonic() >= self._again:
            self.start()
        if self._coming is None or not self._coming.settled:
            return
        coming, self._coming = self._coming, None
        child = coming.child()
        if child is None:
            self._begin_cold()
            return
        self._process = child
        self._has_output()
        self._watch(child.stderr, partial(self._pass_stderr, child))

    def _begin_cold(self) -> None:
        with contextlib.suppress(OSError):  # then the pipe has no writer, and ends
            self._process = subprocess.Popen(
                [*self._python, *HOST], stdin=subprocess.PIPE, stdout=self._its_output, env=self._environment
            )
        self._has_output()

    def _has_output(self) -> None:
        os.close(self._its_output)
        self._its_output = -1

    def _pass_stderr(self, child: Child) -> None:
        if not child.pass_stderr():
            self._unwatch(child.stderr)

    def _read(self) -> None:
        """Take in what it printed, and its end."""
        try:
            data = os.read(self._output, 100)
        except BlockingIOError:
            return
        words = data.split()
        if len(words) == 2 and words[0] == b"port" and words[1].isdigit():
            self.port = int(words[1])
        if not data:
            self._on_end()
        self._told()

    def _on_end(self) -> None:
        again = self.port is not None or isinstance(self._process, Child)
        self.close()
        if again:
            self._warn("the rendezvous store ended, it is started again")
            self.start()
        else:
            self._warn(
                f"couldn't start the rendezvous store with {' '.join(self._python)}: is torch installed there? "
                "Other nodes' stores are used"
            )

    def close(self) -> None:
        """End it."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.drop()
        process, self._process, self.port = self._process, None, None
        match process:
            case Child():
                self._unwatch(process.stderr)
                process.signal(9)
                process.reap(1.0)
                process.close()
            case subprocess.Popen():
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()
        if self._its_output >= 0:
            self._has_output()
        if self._output >= 0:
            self._unwatch(self._output)
            os.close(self._output)
            self._output = -1
