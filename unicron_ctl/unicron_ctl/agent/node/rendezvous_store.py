"""The node's rendezvous store. It needs torch, which the agent must not import, so it is a child of the agent."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from unicron_ctl.agent.ranks.static_world import FIRST_PORT, PORTS
from unicron_ctl.agent.ranks.warm_commands import python_of
from unicron_ctl.agent.ranks.zygote_client import Coming
from unicron_detector.processes.supervise import Child

TRIES = 3
AGAIN_SECONDS = 2.0  # before the next try, if no file descriptor was free
HOST = ["-m", "unicron_transition.generations.store_host"]


class StoreProcess:
    """Runs `generations.store_host` under the interpreter that has torch: first as a fork of the zygote, and if that
    ends, as a new process.

    The ranks are forked after the store by the same zygote, so the job waits no longer for the store than for them.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],  # for a new process
        fork: Callable[[list[str], int], Coming | None],  # (words, standard output); None without a zygote
        watch: Callable[[int, Callable[[], object]], None],  # (descriptor, called when it can be read)
        unwatch: Callable[[int], None],
        on_change: Callable[[], None],  # called when the port changes
        warn: Callable[[str], None],  # writes a line into the job's log
    ):
        self._python = python_of(command)
        # -m puts the working folder first in sys.path; the user's `signal.py` there must not be imported.
        self._environment = {**environment, "PYTHONSAFEPATH": "1"}
        self._fork, self._watch, self._unwatch, self._on_change, self._warn = fork, watch, unwatch, on_change, warn
        self._coming: Coming | None = None
        self._process: Child | subprocess.Popen[bytes] | None = None
        self._output = self._its_output = -1  # the agent's end of a pipe, and the store's end until it has started
        self._tries = 0
        self._again: float | None = None  # the time of the next try (monotonic)
        self._warned = False  # the log says that it could not be started
        self.port: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the store, unless it has ended too often."""
        self._again = None
        if self._tries >= TRIES:
            return
        try:
            self._output, self._its_output = os.pipe()
        except OSError as error:  # no descriptor is free now
            self._again = time.monotonic() + AGAIN_SECONDS
            if not self._warned:
                self._warn(f"couldn't start the rendezvous store: {error.strerror}; it is tried again")
            self._warned = True
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
        """Take over the forked process, or start a new one if the fork failed."""
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
        self._close_its_output()
        self._watch(child.stderr, partial(self._pass_stderr, child))

    def _begin_cold(self) -> None:
        with contextlib.suppress(OSError):  # then the pipe has no writer, and its end is seen
            self._process = subprocess.Popen(
                [*self._python, *HOST], stdin=subprocess.PIPE, stdout=self._its_output, env=self._environment
            )
        self._close_its_output()

    def _close_its_output(self) -> None:
        os.close(self._its_output)
        self._its_output = -1

    def _pass_stderr(self, child: Child) -> None:
        if not child.pass_stderr():
            self._unwatch(child.stderr)

    def _read(self) -> None:
        try:
            data = os.read(self._output, 100)
        except BlockingIOError:
            return
        words = data.split()
        if len(words) == 2 and words[0] == b"port" and words[1].isdigit():
            self.port = int(words[1])
        if not data:
            self._on_end()
        self._on_change()

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
        """End the store."""
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
            self._close_its_output()
        if self._output >= 0:
            self._unwatch(self._output)
            os.close(self._output)
            self._output = -1


class FreePort:
    """A free port of this node, held until a world takes it: restart mode's counterpart of the store."""

    pid = None

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._used: deque[int] = deque(maxlen=200)
        self._wanted = False
        self.port: int | None = None

    def start(self) -> None:
        """Find a new port: none of the last 200, whose late clients may still connect."""
        self.close()
        self._wanted = True
        for _ in range(PORTS):
            port = FIRST_PORT + random.randrange(PORTS)
            if port in self._used:
                continue
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                holder.bind(("", port))
            except OSError:
                holder.close()
            else:
                self._socket, self.port = holder, port
                self._used.append(port)
                return

    def complete_start(self) -> None:
        """Look for a port again if there was none."""
        if self._wanted and self.port is None:
            self.start()

    def close(self) -> None:
        """Give the port up."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self.port = None, None


Store = StoreProcess | FreePort
