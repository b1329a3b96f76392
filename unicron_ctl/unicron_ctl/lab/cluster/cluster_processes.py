"""Finds and ends the processes of one local cluster.

Process ids are not remembered, since the kernel uses them again: each process is identified at the moment of the
signal, which goes through a pidfd that was opened before. A daemon has the cluster's path in its command line. A
slurmstepd, whose command line and environment Slurm overwrites with a title, has a file of the cluster open. A task has
SLURM_CONF and SLURMD_NODENAME in its environment, or descends from a stepd. If a cluster has links, all processes in
its network namespaces belong to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unicron_ctl.lab.cluster import tombstone
from unicron_ctl.lab.cluster.network import MOUNTS

TOMBSTONE = tombstone.__file__
DAEMONS = ("slurmd", "slurmctld", "slurmdbd", "mariadbd", "munged")


@dataclass(frozen=True)
class Process:
    """One process of the cluster."""

    pid: int
    kind: str
    """munged, slurmctld, slurmdbd, mariadbd, slurmd, stepd, task, or tombstone (of a node that is switched off)."""
    node: str | None
    """None for the first four kinds; with links, `head` for other processes on the head."""
    started: int
    """Clock ticks since boot, field 22 of /proc/PID/stat. With the pid it identifies a process for good."""


@dataclass(frozen=True)
class Marks:
    """The paths that identify a cluster's processes."""

    slurm_conf: str
    munge_socket: str
    log_dir: str
    database_dir: str
    namespaces: str = ""
    """The prefix of the names of its network namespaces."""


class _Stat(NamedTuple):
    parent: int
    started: int


def _stat(pid: int) -> _Stat | None:
    """Return the parent and start time of a process; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in ("Z", "X") else _Stat(parent=int(fields[1]), started=int(fields[19]))


def _words(pid: int, file: str) -> list[str]:
    """Read /proc/PID/cmdline or environ as a list; empty if it cannot be read."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/{file}").read_bytes()).split("\0")
    except OSError:
        return []


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")


def _program(pid: int, command_line: list[str]) -> str:
    """Return the name of the executable, from the command line if /proc/PID/exe is not readable."""
    try:
        path = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        path = command_line[0].split(":")[0] if command_line else ""
    return os.path.basename(path).removesuffix("-wlm")  # Debian's slurmd is a link to slurmd-wlm


def _identify(pid: int, marks: Marks) -> tuple[str, str | None] | None:
    """Return (kind, node) if the process's own data show that it belongs to the cluster."""
    command_line = _words(pid, "cmdline")
    program = _program(pid, command_line)
    if TOMBSTONE in command_line and marks.slurm_conf in command_line:
        return "tombstone", command_line[command_line.index(marks.slurm_conf) + 1]
    if program == "munged":
        return ("munged", None) if f"--socket={marks.munge_socket}" in command_line else None
    if program == "mariadbd":
        return ("mariadbd", None) if f"--datadir={marks.database_dir}" in command_line else None
    if program in ("slurmctld", "slurmd") and marks.slurm_conf in command_line:
        return program, command_line[command_line.index("-N") + 1] if "-N" in command_line else None
    if program in ("slurmctld", "slurmd", "slurmstepd", "slurmdbd"):
        return _identify_by_files(pid, program, marks)
    # SLURM_CONF alone is not enough: a user's shell has it too.
    environment = dict(word.partition("=")[::2] for word in _words(pid, "environ"))
    if environment.get("SLURM_CONF") == marks.slurm_conf and environment.get("SLURMD_NODENAME"):
        return "task", environment["SLURMD_NODENAME"]
    return None


def _identify_by_files(pid: int, program: str, marks: Marks) -> tuple[str, str | None] | None:
    """Identify a process whose command line has a title instead: a slurmstepd, a forked slurmd, slurmctld's script
    runner."""
    kind = "stepd" if program == "slurmstepd" else program
    for path in _open_files(pid):
        if path in (f"{marks.log_dir}/slurmctld.log", f"{marks.log_dir}/slurmdbd.log"):
            return kind, None
        if path.startswith(f"{marks.log_dir}/slurmd-") and path.endswith(".log"):
            return kind, path[len(f"{marks.log_dir}/slurmd-") : -len(".log")]
    return None


def _namespaces(marks: Marks) -> dict[str, str]:
    """Return the hosts of the cluster's network namespaces, by the kernel's name (net:[INODE]) and by the option of
    nsenter that leads there."""
    found: dict[str, str] = {}
    try:
        names = [name for name in os.listdir(MOUNTS) if marks.namespaces and name.startswith(marks.namespaces)]
    except OSError:
        return found
    for name in names:
        host, path = name.removeprefix(marks.namespaces), MOUNTS / name
        found[f"--net={path}"] = host
        with contextlib.suppress(OSError):
            found[f"net:[{path.stat().st_ino}]"] = host
    return found


def _inhabitant(pid: int, namespaces: dict[str, str]) -> tuple[str, str | None] | None:
    """Identify any other process in a namespace of the cluster, or on its way into one."""
    if not namespaces:
        return None
    try:
        host = namespaces.get(os.readlink(f"/proc/{pid}/ns/net"))
    except OSError:
        return None
    host = host or next((namespaces[word] for word in _words(pid, "cmdline") if word in namespaces), None)
    return ("task", host) if host else None


def find(marks: Marks) -> list[Process]:
    """Return all living processes of the cluster, tasks after the daemons that they descend from."""
    stats: dict[int, _Stat] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (stat := _stat(int(entry))) is not None:
            stats[int(entry)] = stat
    found: dict[int, Process] = {}
    me = os.getpid()
    namespaces = _namespaces(marks)
    for pid, stat in stats.items():
        identity = None if pid == me else _identify(pid, marks) or _inhabitant(pid, namespaces)
        if identity is not None:
            found[pid] = Process(pid, *identity, started=stat.started)
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    # Add descendants of stepds and tasks that hide their environment, and of slurmctld (its script runner).
    queue = list(found.values())
    while queue:
        parent = queue.pop()
        for pid in children.get(parent.pid, []):
            if pid not in found and pid != me:
                kind = parent.kind if parent.kind in DAEMONS else "task"
                found[pid] = Process(pid, kind, parent.node, stats[pid].started)
                queue.append(found[pid])
    order = ("slurmd", "stepd", "task", "tombstone", *DAEMONS[1:])
    return sorted(found.values(), key=lambda process: (order.index(process.kind), process.pid))


def kill(process: Process, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to exactly this process, never to a later one with its number. Return False if it was gone.

    Raises PermissionError for another user's process.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        stat = _stat(process.pid)
        if stat is None or stat.started != process.started:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def kill_all(look: Callable[[], Iterable[Process]], limit: float) -> list[Process]:
    """Kill what `look` finds until it finds nothing, since processes fork meanwhile. Return all that was killed.

    Raises TimeoutError if something is still there after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    killed: dict[tuple[int, int], Process] = {}
    while remaining := list(look()):
        for process in remaining:  # so that none sees the end of another, as an srun would see that of its slurmstepd
            kill(process, signal.SIGSTOP)
        # Children first: the kernel wakes a stopped process whose parent has ended, and an srun then cancels its step.
        for process in sorted(remaining, key=lambda process: (process.started, process.pid), reverse=True):
            if kill(process):
                killed[process.pid, process.started] = process
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in remaining]} survive SIGKILL")
        time.sleep(0.01)
    return list(killed.values())


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return _stat(pid) is not None
