"""Waiting, processes, and the environment of a process that is not inside Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("detector", "planner", "sbatch_templates", "transition", "unicron", "unicron_ctl")  # what a wheel is made of
LIMIT = 90.0  # generous: the tests are about what happens, and the machine may be busy with something else
COLD_LIMIT = 300.0  # where a process imports torch anew: on a machine with little left for it that takes minutes
UNICRONCTL = [sys.executable, "-c", "from unicron_ctl.cli.unicronctl import main; main()"]
# Variables that would tell a process where it is, or that torch has set in this one.
FOREIGN = ("SLURM", "SBATCH", "UNICRON", "TINY", "PLAIN", "TORCHINDUCTOR", "TRITON")
T = TypeVar("T")


def wait_for(
    look: Callable[[], T],
    what: str | Callable[[], object],
    limit: float = LIMIT,
    now: Callable[[], object] | None = None,
) -> T:
    """The first true thing that `look` gives. `what`: what is waited for; `now`: what there is instead."""
    deadline = time.monotonic() + limit
    while not (found := look()):
        if time.monotonic() > deadline:
            wanted = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {limit:g} s: {wanted}" + (f"; now: {now()}" if now else ""))
        time.sleep(0.05)
    return found


def line_in(path: Path) -> str:
    """The file's text once a line of it is whole, else empty: a shell makes a file before it fills it."""
    text = path.read_text() if path.exists() else ""
    return text.strip() if text.endswith("\n") else ""


def is_alive(pid: int) -> bool:
    """A process that is there and no zombie."""
    return state_of(pid) not in ("", "Z")


def state_of(pid: int) -> str:
    """The letter of proc(5), empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def outside_slurm() -> dict[str, str]:
    """This environment without anything that would tell a process where it is, and with this repository's packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def undated(log: str) -> str:
    """The lines of a log without their times: "WARNING unicron job=20_0 node=n0: text"."""
    return re.sub(r"(?m)^(<\d>)?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d ", r"\1", log)


def of_a_world(ranks: int) -> list[dict[str, str]]:
    """The environment of each process of a world of its own on this machine, as torchrun makes it.

    Nobody holds the port until rank 0 listens there, so it is none that Linux gives to outgoing connections.
    """
    from unicron_ctl.lab.cluster import ports  # the unit tests need no lab

    port = str(ports.choose(1, uuid.uuid4().hex)[0])
    world = outside_slurm() | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def call(
    *command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None, limit: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; `environment` is that outside Slurm unless given."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=outside_slurm() if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def unicronctl(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """One command; `settings` are environment variables."""
    return call(*UNICRONCTL, *words, environment=outside_slurm() | {"COLUMNS": "200"} | settings)


def children(pid: int) -> set[int]:
    """Processes whose parent it is."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(path.parent.name))
        except (OSError, IndexError):
            continue
    return found


def signal_step(pid: int, number: int) -> None:
    """Send a signal as Slurm does with proctrack/linuxproc: to the task and all its descendants."""
    for child in children(pid):
        signal_step(child, number)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
