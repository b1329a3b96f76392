"""Runs Unicron on a local cluster: a unicrond beside slurmctld, and the plugin's line."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from unicron_ctl.lab.cluster import shipped
from unicron_ctl.lab.cluster.cluster_layout import Layout
from unicron_ctl.shared.settings.places import program
from unicron_ctl.shared.slurm import steps
from unicron_ctl.shared.system.errors import UserError

START_SECONDS = 60.0
STOP_SECONDS = 10.0
HANG_FLOOR_SECONDS = 5.0
# The virtual nodes share this machine's cores. So another node adds no throughput, and an iteration takes several times
# as long while another rank starts.
CONFIGURATION = """[controller]
listen = "{listen}"
auth = "none"
slurm = "command"
slurm_poll_seconds = 0.5
throughput = "linear"
hang_floor_seconds = {hang_floor}
allow_inject = true

[partition.default]
mode = "act"
max_weight = 10
"""


def plugin_line(address: str) -> str:
    """Return the line of plugstack.conf for jobs that report to `address`. Raises UserError if the plugin is not
    built."""
    plugin = shipped.plugin()
    if not plugin.is_file():
        raise UserError(f"no {plugin.name} in {plugin.parent}: build it with `make plugin`")
    return f"optional {plugin} agent={shipped.agent()} controller={address}"


def _unicrond() -> list[str]:
    return program("unicrond", "unicron_ctl.controller.unicrond")


def search_path(programs: Path | None = None) -> str:
    """Return a PATH with the programs first (by default this environment's), so that a script's `python` is theirs, and
    with Slurm's in sbin."""
    return os.pathsep.join([str(programs or sysconfig.get_path("scripts")), steps.search_path()["PATH"]])


def spawn(
    folder: Path, layout: Layout, listen: str = "tcp://127.0.0.1:0", hang_floor: float = HANG_FLOOR_SECONDS
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a unicrond with its files in `folder`, and return it with its address. Raises UserError if it fails.

    It asks Slurm only when a job registers, so it can start before the cluster, whose plugin must know its port.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, state = folder / "unicron.toml", folder / "controller"
    config.write_text(CONFIGURATION.format(listen=listen, hang_floor=hang_floor))
    added = {"SLURM_CONF": str(layout.slurm_conf), "PATH": search_path(), "UNICRON_CONFIG": str(config)}
    address = state / "address"
    address.unlink(missing_ok=True)
    command = [*_unicrond(), "--config", str(config), "--state-dir", str(state)]
    with (folder / "unicrond.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | added, start_new_session=True
        )
    complaint = f"unicrond did not start: see {folder / 'unicrond.log'}"
    try:
        _wait_until(lambda: address.is_file() or process.poll() is not None, START_SECONDS, complaint)
        if process.poll() is not None:
            raise UserError(complaint)
    except UserError:
        process.kill()
        raise
    return process, address.read_text().strip()


def start(layout: Layout) -> str:
    """Start the cluster's own unicrond if it does not run. Return its address, which stays the same."""
    folder = _folder(layout)
    if running(layout):
        return address(layout)
    known = folder / "listen"
    if not known.is_file():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        folder.mkdir(parents=True, exist_ok=True)
        known.write_text(f"tcp://127.0.0.1:{port}")
    return spawn(folder, layout, known.read_text())[1]


def forget(layout: Layout) -> None:
    """Remove the state of the cluster's own unicrond: a new Slurm gives its jobs the same ids again, and another
    program may have the port by now. The log stays."""
    shutil.rmtree(_folder(layout) / "controller", ignore_errors=True)
    (_folder(layout) / "listen").unlink(missing_ok=True)


def stop(layout: Layout) -> None:
    """End the cluster's own unicrond, if there is one. Raises UserError if it does not end."""
    for pid in running(layout):
        descriptor = os.pidfd_open(pid)
        try:
            if pid in running(layout):
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        finally:
            os.close(descriptor)
    complaint = f"the unicrond of {_folder(layout)} does not end: kill -9 it"
    _wait_until(lambda: not running(layout), STOP_SECONDS, complaint)


def address(layout: Layout) -> str:
    """Return the address of the cluster's own unicrond, "" if there is none."""
    try:
        return (_folder(layout) / "controller" / "address").read_text().strip()
    except OSError:
        return ""


def running(layout: Layout) -> list[int]:
    """Return the process id of the cluster's unicrond, if it runs, as its command line shows."""
    found, state, unicrond = [], str(_folder(layout) / "controller"), _unicrond()[-1]
    for entry in Path("/proc").glob("[1-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = os.fsdecode(entry.read_bytes()).split("\0")
            if unicrond in words and state in words:
                found.append(int(entry.parent.name))
    return found


def _folder(layout: Layout) -> Path:
    """Return the folder of the cluster's own unicrond, with its configuration, log and state."""
    return layout.state_dir / "unicron"


def _wait_until(done: Callable[[], bool], seconds: float, complaint: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise UserError(complaint)
        time.sleep(0.05)
