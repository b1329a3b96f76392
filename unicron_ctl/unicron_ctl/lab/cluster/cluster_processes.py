"""Finds and ends the processes of one local cluster.

Nothing relies on remembered process ids, which the kernel uses again: each process is recognised at the moment of the
signal. A daemon has the cluster's path in its command line. A slurmstepd, whose command line and environment Slurm
overwrites with a title, holds a file of the cluster open. A task has SLURM_CONF and SLURMD_NODENAME in its environment,
or descends from a stepd. Where a cluster has links, everything in one of its network namespaces belongs to it. The
signal goes through a pidfd that is opened before the check.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unicron_ctl.lab.cluster import tombstone
from unicron_ctl.lab.cluster.network import MOUNTS

TOMBSTONE = tombstone.__file__
DAEMONS = ("slurmd", "slurmctld", "slurmdbd", "mariadbd", "munged")


@dataclass(frozen=True)
class Process:
    """One process of the cluster. `kind`: munged, slurmctld, slurmdbd, mariadbd, slurmd, stepd, task or tombstone (of a
    node that was switched off); the first four have no node. With links there are others on the head: tasks of the
    node `head`."""

    pid: int
    kind: str
    node: str | None
    started: int  # field 22 of /proc/PID/stat, clock ticks since boot: with the pid it names a process for good


@dataclass(frozen=True)
class Marks:
    """The marks of one cluster's processes: its slurm.conf, its munge socket, its folders of logs and database, and the
    prefix of its network namespaces."""

    slurm_conf: str
    munge_socket: str
    log_dir: str
    database_dir: str
    namespaces: str = ""


@dataclass(frozen=True)
class _Stat:
    parent: int
    started: int


def _stat(pid: int) -> _Stat | None:
    """Parent and start time of a process; None when it is gone or a zombie (which only waits for its parent)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in ("Z", "X") else _Stat(parent=int(fields[1]), started=int(fields[19]))


def _words(pid: int, file: str) -> list[str]:
    """/proc/PID/cmdline or environ as a list; empty when it cannot be read."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/{file}").read_bytes()).split("\0")
    except OSError:
        return []


def _open_files(pid: int) -> Iterator[str]:
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            links = [entry.path for entry in entries]
    except OSError:
        return
    for link in links:
        try:
            yield os.readlink(link)
        except OSError:
            continue


def _program(pid: int, command_line: list[str]) -> str:
    """Name of the executable; by the command line where /proc/PID/exe is not ours to read."""
    try:
        path = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        path = command_line[0].split(":")[0] if command_line else ""
    return os.path.basename(path).removesuffix("-wlm")  # Debian's slurmd is a link to slurmd-wlm


def _identify(pid: int, marks: Marks) -> tuple[str, str | None] | None:
    """(kind, node) when the process shows by itself that it belongs to the cluster."""
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
    """Recognises a process with a title over its command line: a slurmstepd, a forked slurmd, slurmctld's script
    runner."""
    kind = "stepd" if program == "slurmstepd" else program
    for path in _open_files(pid):
        if path in (f"{marks.log_dir}/slurmctld.log", f"{marks.log_dir}/slurmdbd.log"):
            return kind, None
        if path.startswith(f"{marks.log_dir}/slurmd-") and path.endswith(".log"):
            return kind, path[len(f"{marks.log_dir}/slurmd-") : -len(".log")]
    return None


def _namespaces(marks: Marks) -> dict[str, str]:
    """Return what processes in a host's network namespace show: NET:[INODE] by the kernel, or the way in -> the
    host."""
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
    """Recognises any other process in a namespace of the cluster, or on its way into one."""
    if not namespaces:
        return None
    try:
        host = namespaces.get(os.readlink(f"/proc/{pid}/ns/net"))
    except OSError:
        return None
    host = host or next((namespaces[word] for word in _words(pid, "cmdline") if word in namespaces), None)
    return ("task", host) if host else None


def find(marks: Marks) -> list[Process]:
    """All living processes of the cluster, tasks after the daemons that they descend from."""
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
    # Descendants of stepds and tasks that hide their environment; of slurmctld too (its script runner).
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
    """A signal to exactly this process, never to a later one with its number. False when it was gone already.

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
    """Kills what `look` finds until it finds nothing (processes fork while they are being killed).

    Returns everything that was killed. Raises TimeoutError when something is still there after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    killed: dict[tuple[int, int], Process] = {}
    while remaining := list(look()):
        for process in remaining:  # at once: none is to see another one's end, as an srun would its slurmstepd's
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
    """True for a process that runs; a zombie does not."""
    return _stat(pid) is not None
