"""A real unicrond on one core, and what the kernel counts of it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

from tests.support.controller import COMMAND, Controller
from unicron_ctl.shared.system.errors import UserError

SPARE_DESCRIPTORS = 200  # beside one for each connection: modules, the log, timers


def allow_descriptors(connections: int) -> None:
    """Raise this process's limit, and its children's, for so many connections. Raises UserError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = connections + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UserError(f"{connections} connections need {need} descriptors, not {hard}: raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, need), hard))


def cores() -> tuple[int, int]:
    """Return a core for the controller and one for the simulator; the same one twice if there is no other."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


class PinnedController(Controller):
    """A unicrond with the product's own time limits on core `core`; `program` starts it."""

    usual = 'auth = "none"\nslurm = "none"\nforming_settle_seconds = 2.0\nmetrics_seconds = 0.0\n'

    def __init__(self, folder: Path, core: int, settings: str = "", program: list[str] = COMMAND) -> None:
        self._prefix = ["taskset", "--cpu-list", str(core), *program]
        super().__init__(folder, settings)

    @property
    def command(self) -> list[str]:
        return [*self._prefix, *self.options]

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port at which it listens."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def descriptors(self) -> int:
        """Return how many descriptors it has open."""
        return psutil.Process(self.process.pid).num_fds()

    def peak_mib(self) -> float:
        """Return the most memory that it has held, in MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
