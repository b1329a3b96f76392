"""Signals as bytes in a pipe, so that a poller sees them among everything else."""

from __future__ import annotations

import os
import signal

ENDING = (signal.SIGTERM, signal.SIGINT)
ENDING_SECONDS = 10.0  # for a script that saves something when it is told to end; Slurm's KillWait is 30 s
SAVES = signal.SIGUSR2  # a checkpoint is wanted, and the training goes on; in restart mode it is the script's
# What Slurm's --signal sends before a time limit is for the training script.
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


class SignalPipe:
    """Catches the signals above in this process; :meth:`fileno` becomes readable when one has come. One per process."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in (*ENDING, *FORWARDED)}

    def fileno(self) -> int:
        return self._read

    def read(self) -> bytes:
        """The numbers of the signals that have come, one byte each."""
        try:
            return os.read(self._read, 64)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Everything is as it was before."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
