"""torch's workers that load data, and others of multiprocessing, where they ignore SIGTERM: they do so until they are
to end."""

from __future__ import annotations

import multiprocessing.popen_fork
import os
import re
import signal
import subprocess
from typing import Any

from torch.utils.data._utils import signal_handling

ENDS = signal.SIGRTMIN + 9  # ends a worker that ignores SIGTERM, with status 0, as torch's own handler does
END_SECONDS = 1.0  # for a worker to act on it


def keep_what_is_ignored() -> None:
    """A worker that ignores SIGTERM goes on to, whatever torch sets. `terminate` ends such a process all the same: to
    what ignores SIGTERM it is SIGKILL, also at the end of the interpreter, which waits for its processes. torch calls a
    worker that is killed a failure: its workers end by themselves before that."""
    own = signal_handling._set_worker_signal_handlers

    def set_handlers(*arguments: Any) -> None:
        ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        own(*arguments)
        if ignored:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(ENDS, lambda *_: os._exit(0))

    signal_handling._set_worker_signal_handlers = set_handlers
    for process in (multiprocessing.popen_fork.Popen, subprocess.Popen):
        _end_what_ignores(process)


def _end_what_ignores(process: Any) -> None:
    terminate = process.terminate

    def terminate_or_kill(self: Any) -> None:
        if self.returncode is not None or not _has(self.pid, "SigIgn", signal.SIGTERM):
            terminate(self)
            return
        if _has(self.pid, "SigCgt", ENDS):
            os.kill(self.pid, ENDS)
            self.wait(END_SECONDS)
        self.kill()

    process.terminate = terminate_or_kill


def _has(pid: int, mask: str, number: int) -> bool:
    """Whether a child ignores the signal (SigIgn), or has a handler for it (SigCgt; proc(5))."""
    try:
        with open(f"/proc/{pid}/status") as file:
            found = re.search(rf"^{mask}:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)
