"""Out-of-memory kills as the memory cgroup counts them: `oom_kill` in memory.oom_control (version 1) or memory.events
(version 2). The kernel counts a kill in the cgroup of the process that it killed, no matter whose limit was reached.

Source: Linux Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unicron_detector.health.cgroups import own_files

KILL_CODES = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit codes of a killed process; shells report the second
CLAIM_SECONDS = 60.0  # a process with much memory takes long to end after the kill
REPORT_SECONDS = 3.0  # if no rank has ended by then, the kill hit another process of the cgroup


def counter_file(pid: int | str = "self", proc: Path = Path("/proc")) -> Path | None:
    """Return the file with the oom_kill count of the process's own memory cgroup; None if there is none."""
    files = own_files("memory", "memory.oom_control", "memory.events", pid, proc)
    return next((file for file in files if read_count(file) is not None), None)


def read_count(file: Path) -> int | None:
    """Return how many processes of the cgroup were killed for want of memory; None if that cannot be read."""
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


@dataclass(eq=False)
class _Kill:
    """A kill that no rank has claimed."""

    seen_at: float
    reported: bool = False


class OomKills:
    """The kills of one cgroup. Each explains the end of one process by SIGKILL. Threads may share it."""

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self._clock, self._lock = file, clock, threading.Lock()
        self._count = read_count(file) if file else None
        self._open: list[_Kill] = []

    def claim(self) -> bool:
        """Claim a kill for a rank that ended by SIGKILL. Return whether there was one left to claim."""
        with self._lock:
            self._read_kills()
            if not self._open:
                return False
            self._open.pop()
            return True

    def unclaimed_kills(self) -> int:
        """Return how many new kills no rank's end explains: they hit other processes. Each is counted once."""
        with self._lock:
            self._read_kills()
            fresh = [kill for kill in self._open if not kill.reported and self._clock() - kill.seen_at > REPORT_SECONDS]
            for kill in fresh:
                kill.reported = True
            return len(fresh)

    def _read_kills(self) -> None:
        """Read the count. New kills can be claimed from then on."""
        now, count = self._clock(), read_count(self.file) if self.file else None
        if count is not None:
            rise = count - (self._count if self._count is not None else count)
            self._open += [_Kill(now) for _ in range(min(max(0, rise), 1000))]
            self._count = count
        self._open = [kill for kill in self._open if now - kill.seen_at <= CLAIM_SECONDS]
