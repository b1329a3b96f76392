"""The processes of a run, known by variables in their environment: whatever they fork, and whatever session it makes
its own, has them too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

RUN, NODE = "LEADERBOARD_RUN", "LEADERBOARD_NODE"
LIMIT = 30.0  # seconds for what was killed to be gone


def find(run: str, node: str = "") -> list[int]:
    """The living ones of a run, or of one of its nodes."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if belongs(pid, run, node)]


def belongs(pid: int, run: str, node: str = "") -> bool:
    """Return whether the process lives and is of this run, and of this node of it."""
    wanted = {f"{RUN}={run}".encode(), *([f"{NODE}={node}".encode()] if node else [])}
    path = Path("/proc") / str(pid)
    try:
        variables = (path / "environ").read_bytes()
        dead = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return False
    return not dead and wanted <= set(variables.split(b"\0"))


def kill(run: str, node: str = "") -> None:
    """SIGKILL to all of them, and to what they start meanwhile. Raises TimeoutError when some are left."""
    deadline = time.monotonic() + LIMIT
    while pids := find(run, node):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"still there {LIMIT:g} s after SIGKILL: {pids}")
        time.sleep(0.01)
