"""torch's workers that load data, and others of multiprocessing, where they ignore SIGTERM: they do so until they are
to end."""

from __future__ import annotations

import multiprocessing.popen_fork
import re
import signal
import subprocess
from typing import Any

from torch.utils.data._utils import signal_handling


def keep_what_is_ignored() -> None:
    """A worker that ignores SIGTERM goes on to, whatever torch sets. `terminate` ends such a process all the same: to
    what ignores SIGTERM it is SIGKILL, also at the end of the interpreter, which waits for its processes."""
    own = signal_handling._set_worker_signal_handlers

    def set_handlers(*arguments: Any) -> None:
        ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        own(*arguments)
        if ignored:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    signal_handling._set_worker_signal_handlers = set_handlers
    for process in (multiprocessing.popen_fork.Popen, subprocess.Popen):
        _end_what_ignores(process)


def _end_what_ignores(process: Any) -> None:
    terminate = process.terminate

    def terminate_or_kill(self: Any) -> None:
        if self.returncode is None and _ignores(self.pid, signal.SIGTERM):
            self.kill()
        else:
            terminate(self)

    process.terminate = terminate_or_kill


def _ignores(pid: int, number: int) -> bool:
    """Whether a child ignores the signal (proc(5), SigIgn)."""
    try:
        with open(f"/proc/{pid}/status") as file:
            mask = re.search(r"^SigIgn:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    except OSError:
        return False
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)
