"""Starts a cluster's daemons, and reports why one did not start."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from unicron_ctl.lab.cluster import binaries
from unicron_ctl.lab.cluster import cluster_processes as processes
from unicron_ctl.lab.cluster.cluster_layout import Layout
from unicron_ctl.shared.system.errors import UserError


def launch(layout: Layout, name: str, command: list[str]) -> int:
    """Start a daemon in its own session, as a child of init, and return its process id."""
    # A shell starts the daemon in the background: its id is known before anything can fail, and init reaps it, not a
    # caller that may live long. It inherits no stream: whoever reads the caller's output would wait for its end.
    script = 'out=$1; shift; setsid "$@" </dev/null >"$out" 2>&1 & echo $!'
    words = ["/bin/sh", "-c", script, "sh", str(layout.log_dir / f"{name}.out"), *command]
    env = {"PATH": binaries.SEARCH_PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": str(layout.slurm_conf)}
    return int(subprocess.check_output(words, env=env, cwd="/", stderr=subprocess.PIPE, text=True, timeout=10))


def wait_until_ready(layout: Layout, name: str, pid: int, ready: Callable[[], bool], limit: float) -> None:
    """Wait until a daemon is ready. Raises UserError with the end of its output if it ends or takes too long."""
    deadline = time.monotonic() + limit
    while not ready():
        alive = processes.is_alive(pid)
        if not alive or time.monotonic() > deadline:
            what = f"does not answer after {limit:.0f} s" if alive else "ended at once"
            raise UserError(f"{name} {what}: {last_words(layout, name)}")
        time.sleep(0.03)


def last_words(layout: Layout, name: str) -> str:
    """Return the last three lines of a daemon's output, or its last errors if there are any."""
    path = layout.log_dir / f"{name}.out"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    errors = [line for line in lines if "error:" in line or "fatal:" in line] or lines
    return f"{'; '.join(line.strip() for line in errors[-3:]) or 'it said nothing'} (all of it: {path})"


def accepts(address: int | Path) -> bool:
    """Whether something accepts connections on this port of this host, or on this Unix socket."""
    family = socket.AF_INET if isinstance(address, int) else socket.AF_UNIX
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", address) if isinstance(address, int) else str(address)) == 0
