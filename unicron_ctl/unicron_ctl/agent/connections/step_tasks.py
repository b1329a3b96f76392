"""The other tasks of this node in a step of several tasks: each waits for its rank and ends as the rank does.

The plugin joins this process with each of them by a socket pair (slurm_plugin/spank/tasks.h), with unicron-launch at
the other end (slurm_plugin/spank/wait.h has the messages). Only the standard library is imported here, so that the
tasks get their messages whatever is broken.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

CHANNELS = "_UNICRON_TASKS"  # the channels' descriptors, of the local tasks 1, 2, ... in this order
FORMAT = "_UNICRON_LAUNCH"  # the version of unicron-launch's messages; absent if a user runs the agent by hand
OF_THE_LAUNCHER = (FORMAT, CHANNELS, "_UNICRON_TASK", "UNICRON_LAUNCH_AGENT", "UNICRON_LAUNCH_COMMAND")
MESSAGE_BYTES = 1 << 16
TASKS_SECONDS = 300.0  # for all tasks of a node to begin: Slurm starts them together, each after its TaskProlog


@dataclass(frozen=True)
class StepTask:
    """A task of this node, in whose place a rank runs."""

    environment: Mapping[str, str]
    cpus: frozenset[int]
    devices: tuple[str, ...]
    """The GPUs' files that it may open."""
    stdout: int
    """The descriptor of its standard output."""
    stderr: int


class TasksMissing(Exception):
    """Not all tasks of the node have begun; the text says which are missing."""


class StepTasks:
    """The channels to the other tasks. In the end each task is told to run the command itself, or how its rank has
    ended. One that is told nothing before this process ends dies by SIGKILL."""

    def __init__(self) -> None:
        self._channels: list[socket.socket] = []
        self._codes: Mapping[int, int] = {}
        self.launcher = ""
        """The version of unicron-launch's messages; empty without unicron-launch."""

    def adopt(self, environment: MutableMapping[str, str]) -> None:
        """Take the channels, and the variables of unicron-launch."""
        names, self.launcher = environment.get(CHANNELS, ""), environment.get(FORMAT, "")
        for name in OF_THE_LAUNCHER:
            environment.pop(name, None)
        for name in filter(None, names.split(",")):
            os.set_inheritable(int(name), False)
            self._channels.append(socket.socket(fileno=int(name)))

    @property
    def count(self) -> int:
        """Tasks of this node, this one included."""
        return len(self._channels) + 1

    def receive(self, seconds: float = TASKS_SECONDS) -> list[StepTask]:
        """Return all tasks of this node in their order, this one first; none if it is the only one. Raises
        TasksMissing."""
        deadline = time.monotonic() + seconds
        for channel in self._channels:
            with contextlib.suppress(OSError):  # its end is found below
                channel.send(b"H")
        waiting = [self._receive(local, channel, deadline) for local, channel in enumerate(self._channels, 1)]
        own = StepTask(os.environ, frozenset(os.sched_getaffinity(0)), (), 1, 2)
        return [own, *waiting] if waiting else []

    @staticmethod
    def _receive(local: int, channel: socket.socket, deadline: float) -> StepTask:
        channel.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            data, files, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise TasksMissing(f"task {local} of this node has not begun: {error}") from None
        finally:
            channel.settimeout(None)
        if len(files) != 3:
            raise TasksMissing(f"task {local} of this node has ended before it began")
        cpus, devices = (line.split(",") if line else [] for line in data.decode().split("\n"))
        with os.fdopen(files[2], "rb") as file:
            file.seek(0)
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
            environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        for name in OF_THE_LAUNCHER:
            environment.pop(name, None)
        return StepTask(environment, frozenset(map(int, cpus)), tuple(devices), files[0], files[1])

    def run_themselves(self, environments: Sequence[Mapping[str, str]] = ()) -> None:
        """Tell the tasks to run the command themselves, without this process. environments: for each of them, if not
        Slurm's."""
        for number, channel in enumerate(self._channels):
            files = []
            if environments:
                files = [os.memfd_create("unicron-environment")]
                with open(files[0], "wb", closefd=False) as file:
                    file.writelines(os.fsencode(f"{name}={value}\0") for name, value in environments[number].items())
            with contextlib.suppress(OSError):
                socket.send_fds(channel, [b"R"], files)
            for descriptor in files:
                os.close(descriptor)
        self.close()

    def tell_codes(self, codes: Mapping[int, int]) -> None:
        """Note the exit codes of ranks by local rank, negative for a signal."""
        self._codes = codes

    def end(self, code: int) -> None:
        """Tell the tasks to end as their ranks have; those without a code end with the agent's."""
        for local, channel in enumerate(self._channels, 1):
            with contextlib.suppress(OSError):
                channel.send(f"E{self._codes.get(local, code) if code else 0}".encode())
        self.close()

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            channel.close()
        self._channels = []


others = StepTasks()
