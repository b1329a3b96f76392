"""A unicrond process on one core, and what the kernel counts of it."""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SPARE_DESCRIPTORS = 200  # beside one for each connection: modules, the log, timers
START_SECONDS, STOP_SECONDS = 120.0, 30.0
ANSWER = "unicrond: listening on "
CONFIG = """[controller]
auth = "none"
slurm = "{slurm}"
heartbeat_period = 1.0
forming_settle_seconds = {settle}
metrics_seconds = {metrics}
state_dir = "{state}"
{lines}
[partition.default]
mode = "act"
"""
_TICK = float(os.sysconf("SC_CLK_TCK"))


class NotStarted(Exception):
    """The controller did not come up, or did not end; the text has its last line."""


def allow_descriptors(connections: int) -> str:
    """Raise this process's limit, and its children's, for so many connections; what is missing, or nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = connections + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < need:
        return f"{connections} connections need {need} descriptors, the system grants {hard}: raise `ulimit -Hn`"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, need), hard))
    return ""


def cores() -> tuple[set[int], set[int]]:
    """A core for the controller and one for the simulator; the same one where there is no other."""
    allowed = sorted(os.sched_getaffinity(0))
    return {allowed[0]}, {allowed[1] if len(allowed) > 1 else allowed[0]}


class Controller:
    """A real unicrond with the state folder `folder`/state, on the given cores.

    settle: how long it waits for further nodes before a job starts; metrics: the nodes' metrics come every so many
    seconds, 0 for never. slurm: how it asks Slurm. program: what is run with Python, unicrond's options follow.
    lines: further ones of [controller]. Raises :class:`NotStarted`.
    """

    def __init__(
        self,
        folder: Path,
        cpus: set[int],
        settle: float = 2.0,
        metrics: float = 0.0,
        slurm: str = "none",
        program: Sequence[str] = ("-m", "unicron_ctl.controller.unicrond"),
        lines: str = "",
    ) -> None:
        self.folder, self.cpus, self.program = folder, cpus, program
        self.state = folder / "state"
        config = CONFIG.format(settle=settle, metrics=metrics, state=self.state, slurm=slurm, lines=lines)
        (folder / "unicron.toml").write_text(config)
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> float:
        """Seconds from the start of the process until it listens."""
        began = time.monotonic()
        with (self.folder / "errors").open("ab") as errors:
            self._process = subprocess.Popen(
                self._command(),
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, self.cpus),
            )
        assert self._process.stdout is not None
        heard = select.poll()  # select(2) takes no descriptor above 1,023
        heard.register(self._process.stdout, select.POLLIN)
        ready = heard.poll(1e3 * START_SECONDS)
        line = self._process.stdout.readline().strip() if ready else ""
        if not line.startswith(ANSWER):
            self.kill()
            raise NotStarted(f"unicrond did not start within {START_SECONDS:g} s: {self.complaint() or 'no word'}")
        self.address = line.removeprefix(ANSWER)
        return time.monotonic() - began

    def _command(self) -> Sequence[str]:
        config = ["--config", str(self.folder / "unicron.toml"), "--state-dir", str(self.state)]
        return [sys.executable, *self.program, *config, "--listen", "tcp://127.0.0.1:0"]

    def stop(self) -> float:
        """SIGTERM; seconds until it has ended. Raises :class:`NotStarted` when it had to be killed."""
        process, began = self._process, time.monotonic()
        if process is None:
            return 0.0
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotStarted(f"unicrond did not end within {STOP_SECONDS:g} s of SIGTERM: killed") from None
        finally:
            self.kill()
        return time.monotonic() - began

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port to which it listens."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def complaint(self) -> str:
        """The last line that it wrote to its standard error."""
        lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def cpu_seconds(self) -> float:
        """Seconds of CPU time of all its threads so far."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def peak_mib(self) -> float:
        """The most memory that it has held, in MiB."""
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
