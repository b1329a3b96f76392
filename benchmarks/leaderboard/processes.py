"""The processes of a run, found by variables in their environment, which their children inherit."""

from __future__ import annotations

import os
import signal
import time

import psutil

RUN, NODE = "LEADERBOARD_RUN", "LEADERBOARD_NODE"
LIMIT = 30.0  # seconds until killed processes must be gone


def find(run: str, node: str = "") -> list[int]:
    """Return the living processes of a run, or of one of its nodes."""
    return [pid for pid in psutil.pids() if belongs(pid, run, node)]


def belongs(pid: int, run: str, node: str = "") -> bool:
    """Return whether the process lives and belongs to this run, and to this node of it."""
    wanted = {RUN: run, NODE: node} if node else {RUN: run}
    try:
        process = psutil.Process(pid)
        return wanted.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kill(run: str, node: str = "") -> None:
    """SIGKILL the processes and what they start meanwhile. Raises TimeoutError if some are left."""
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
