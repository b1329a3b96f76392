"""Starts a cluster's daemons, and says why one did not start."""

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
    """Starts a daemon in a session of its own, as a child of init, and returns its process id."""
    # The daemons run in the foreground of a background shell job: the id is known before anything can fail, and
    # init, not a long-living caller, collects what is left of them. No stream is inherited: a reader would hang.
    script = 'out=$1; shift; setsid "$@" </dev/null >"$out" 2>&1 & echo $!'
    out = layout.log_dir / f"{name}.out"
    env = {"PATH": binaries.SEARCH_PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": str(layout.slurm_conf)}
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", str(out), *command],
        env=env,
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
        timeout=10,
    )
    return int(done.stdout)


def wait_until_ready(layout: Layout, name: str, pid: int, ready: Callable[[], bool], limit: float) -> None:
    """Waits until a daemon is ready. Raises UserError with the end of its output when it ends or takes too long."""
    deadline = time.monotonic() + limit
    while not ready():
        alive = processes.is_alive(pid)
        if not alive or time.monotonic() > deadline:
            what = f"does not answer after {limit:.0f} s" if alive else "ended at once"
            raise UserError(f"{name} {what}: {last_words(layout, name)}")
        time.sleep(0.03)


def last_words(layout: Layout, name: str) -> str:
    """Return what a daemon said last, its errors where it named any."""
    path = layout.log_dir / f"{name}.out"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    telling = [line for line in lines if "error:" in line or "fatal:" in line] or lines
    return f"{'; '.join(line.strip() for line in telling[-3:]) or 'it said nothing'} (all of it: {path})"


def serves(port: int) -> bool:
    """Whether something accepts connections on this port of this host."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def connects(path: Path) -> bool:
    """Whether something accepts connections on this Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
