"""Signals as bytes in a pipe, so that a poller sees them among everything else."""

from __future__ import annotations

import functools
import os
import re
import select
import signal
import subprocess
from pathlib import Path

from unicron_detector.health.program_output import TooMuchOutput, run_program

ENDING = (signal.SIGTERM, signal.SIGINT)
ENDING_SECONDS = 10.0  # for a script that saves something when it has to end; Slurm's KillWait is 30 s
SAVES = signal.SIGUSR2  # asks session mode for a checkpoint; in restart mode it is the script's
FOR_THE_SCRIPT = (signal.SIGUSR1, signal.SIGUSR2)  # what Slurm's --signal sends before a time limit
CONFIG_SECONDS = 5.0  # for Slurm to show its configuration
CONFIG_TRIES = 4  # Slurm sends SIGTERM twice


@functools.cache
def slurm_signals_all() -> bool:
    """Say whether a signal for this step has reached the ranks, too, so that passing it on would double it: with
    proctrack/linuxproc Slurm signals all descendants of a task, else only the task."""
    pid, stepd = os.getppid(), False
    while pid > 1 and not stepd:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
        except OSError:
            return False
        stepd, pid = "(slurmstepd" in name, int(rest.split()[1])
    return stepd and proctrack_type() == "proctrack/linuxproc"


def proctrack_type() -> str:
    """Return Slurm's ProctrackType, or an empty text. Slurm's signals may end scontrol, so it is called again."""
    for _ in range(CONFIG_TRIES):
        try:
            shown = run_program(["scontrol", "show", "config"], CONFIG_SECONDS)
        except (OSError, subprocess.TimeoutExpired, TooMuchOutput):
            return ""
        if shown.returncode >= 0:
            break
    found = re.search(r"^ProctrackType\s*=\s*(\S+)", shown.stdout.decode(errors="replace"), re.MULTILINE)
    return found[1] if found else ""


class SignalPipe:
    """Catches the signals above in this process; its descriptor becomes readable when one comes. One per process."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in (*ENDING, *FOR_THE_SCRIPT)}

    def fileno(self) -> int:
        return self._read

    def read(self) -> bytes:
        """Return the numbers of the signals that have come, one byte each."""
        try:
            return os.read(self._read, 64)
        except BlockingIOError:
            return b""

    def read_within(self, seconds: float) -> bytes:
        """Return the numbers of the signals that have come, or come within `seconds`."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.poll(seconds * 1000)
        return self.read()

    def close(self) -> None:
        """Restore the signal handlers."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
