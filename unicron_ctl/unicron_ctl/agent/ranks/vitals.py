"""Reads from /proc whether the ranks' processes are stopped, how long they and their children have been idle, and what
they use. Reading takes no lock that a stuck process could hold, so it never blocks the agent."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from unicron_ctl.agent.ranks.ranks import Rank

WINDOW = 0.9  # seconds, at least, over which activity is judged: a kernel tick of CPU time is 0.01 s
BUSY_CPU = 0.05  # of one core; threads that only wait for messages stay far below
BUSY_BYTES = 65536.0  # read or written per second
BUSY_STATES = "RD"  # computing, or waiting for a disk or a file system
# Kernel functions in which a process waits for another's answer (wchan of proc(5)), unlike one that sleeps or waits
# for a lock
ANSWERS = re.compile(
    r"poll|select|wait_woken|recv|pipe|accept|lock_page|\b(ep|sk|skb|unix|inet|tcp|rpc|nfs)_|\bdo_wait"
)
MOST_CHILDREN = 256
_TICK = float(os.sysconf("SC_CLK_TCK"))
_PAGE = float(os.sysconf("SC_PAGE_SIZE"))


@dataclass(frozen=True)
class Usage:
    """A process at one moment."""

    state: str
    """Its letter in /proc."""
    cpu: float
    """Seconds of CPU time."""
    memory: float
    """Bytes in memory."""
    transferred: float
    """Bytes read and written so far."""


def usage_of(pid: int) -> Usage | None:
    """Return the process as it is now; None if it is gone."""
    try:
        usage = _stat(pid)
    except (OSError, IndexError, ValueError):
        return None
    with contextlib.suppress(OSError, IndexError, ValueError):  # not every kernel counts transferred bytes
        lines = _text(f"/proc/{pid}/io").split()
        usage = replace(usage, transferred=float(lines[1]) + float(lines[3]))
    return usage


def _stat(pid: int | str) -> Usage:
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return Usage(fields[0], (int(fields[11]) + int(fields[12])) / _TICK, int(fields[21]) * _PAGE, 0.0)


def children_cpu(pid: int) -> float:
    """Return the seconds of CPU time of the living descendants that its main thread has started."""
    found, seconds = [str(pid)], 0.0
    for parent in found:
        with contextlib.suppress(OSError, IndexError, ValueError):
            found += _text(f"/proc/{parent}/task/{parent}/children").split()
            seconds += _stat(parent).cpu if parent is not found[0] else 0.0
        if len(found) > MOST_CHILDREN:
            break
    return seconds


def awaits_answer(pid: int) -> bool:
    """Say whether its main thread waits for an answer: from a socket, a pipe, a child or a file server."""
    try:
        return bool(ANSWERS.search(_text(f"/proc/{pid}/wchan")))
    except OSError:
        return False


def _text(path: str) -> str:
    """Return the text of a small file of /proc, by system calls alone, since each status reads two files for each rank.
    Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)


class Activity:
    """Tells how long one process has been idle. All times are seconds on a clock that does not jump."""

    def __init__(self, usage: Usage, now: float) -> None:
        self._usage, self._time, self._busy_at = usage, now, now
        self._children: float | None = None  # their CPU time at the last window, while the process itself is idle

    def idle(self, usage: Usage, now: float, children: Callable[[], float] = float) -> float:
        """Return the seconds since the process was last busy, up to the last window. children: returns the CPU time of
        its children, which counts while the process itself does nothing."""
        elapsed = now - self._time
        if elapsed >= WINDOW:
            cpu = (usage.cpu - self._usage.cpu) / elapsed
            moved = (usage.transferred - self._usage.transferred) / elapsed
            if cpu >= BUSY_CPU or moved >= BUSY_BYTES or usage.state in BUSY_STATES:
                self._busy_at, self._children = now, None
            else:
                before, self._children = self._children, children()
                if before is not None and (self._children - before) / elapsed >= BUSY_CPU:
                    self._busy_at = now
            self._usage, self._time = usage, now
        return now - self._busy_at


class Vitals:
    """The activity of an agent's ranks."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, Activity]] = {}  # slot -> (pid, its activity)
        self._before: dict[int, tuple[int, float, Usage]] = {}  # slot -> (pid, when, what) of the last sample

    def update(self, ranks: Iterable[Rank], now: float) -> None:
        """Put state and idle time into the ranks' statuses."""
        for rank in ranks:
            trainer = rank.trainer
            usage = usage_of(trainer) if rank.alive else None
            if usage is None:
                rank.status.process, rank.status.idle, rank.status.waits = "", 0.0, False
                self._of.pop(rank.slot, None)
                continue
            pid, activity = self._of.get(rank.slot, (0, None))
            if activity is None or pid != trainer:
                activity = Activity(usage, now)
                self._of[rank.slot] = trainer, activity
            idle = round(activity.idle(usage, now, partial(children_cpu, trainer)), 1)
            rank.status.process, rank.status.idle = usage.state, idle
            rank.status.waits = idle > WINDOW and awaits_answer(trainer)

    def sample(self, ranks: Iterable[Rank], now: float) -> dict[int, dict[str, float]]:
        """Return by slot `rank_cpu` (cores, since the last sample; not for a new process) and `rank_memory` (bytes)."""
        found = {}
        for rank in ranks:
            usage = usage_of(rank.status.pid) if rank.alive else None
            if usage is None:
                continue
            pid, at, before = self._before.get(rank.slot, (0, now, usage))
            self._before[rank.slot] = rank.status.pid, now, usage
            found[rank.slot] = {"rank_memory": usage.memory}
            if pid == rank.status.pid and now > at:
                found[rank.slot]["rank_cpu"] = (usage.cpu - before.cpu) / (now - at)
        return found
