"""Processes of multiprocessing, such as torch's workers that load data: where SIGTERM does nothing to the process that
starts them, it does nothing to them either, until they are to end."""

from __future__ import annotations

import multiprocessing.popen_fork
import multiprocessing.popen_forkserver
import multiprocessing.popen_spawn_posix
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

ENDS = signal.SIGRTMIN + 9  # ends such a process, as SIGTERM would
END_SECONDS = 1.0  # for it to act on it
_POPEN: Any = multiprocessing.popen_fork.Popen
_LATER: tuple[Any, ...] = (multiprocessing.popen_spawn_posix.Popen, multiprocessing.popen_forkserver.Popen)
_handler: Callable[..., None]  # of SIGTERM, which does nothing
_of_torch = False  # this is a worker of torch's


def outlive_sigterm() -> None:
    """From here on SIGTERM does nothing to this process, and :data:`ENDS` ends it."""
    signal.signal(ENDS, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end(*_: object) -> None:
    signal.signal(ENDS, signal.SIG_IGN)  # so whoever sent it knows that it came
    if signal.getsignal(signal.SIGTERM) is _handler:
        if _of_torch:
            os._exit(0)  # as torch's own handler does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)  # another handler is its user's


def keep_handler(handler: Callable[..., None], settle: Callable[[bool], None]) -> None:
    """What multiprocessing starts while this is the handler of SIGTERM gets it, too. A fork blocks the signal until it
    calls :func:`outlive_sigterm`, and any other process (`spawn`, `forkserver`) until it has called `settle`, before it
    does anything else. `terminate` ends them all the same."""
    global _handler
    _handler = handler
    _keep_in_torch()
    _POPEN.terminate = _ending(_POPEN.terminate)
    for kind in (_POPEN, *_LATER):
        kind._launch = _deaf(kind._launch, settle if kind in _LATER else None)


def _outlives() -> bool:
    return signal.getsignal(signal.SIGTERM) is _handler


def _keep_in_torch() -> None:
    """torch's workers set another handler. When one is killed torch calls that a failure: they end by themselves."""
    torch: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if torch is None:
        return
    own = torch._set_worker_signal_handlers

    def set_handlers(*arguments: Any) -> None:
        global _of_torch
        _of_torch = _outlives()
        own(*arguments)
        if _of_torch:
            signal.signal(signal.SIGTERM, _handler)

    torch._set_worker_signal_handlers = set_handlers


def _ending(terminate: Callable[..., None]) -> Any:
    def terminate_or_kill(self: Any) -> None:
        if self.returncode is None and _has(self.pid, "SigCgt", ENDS):
            os.kill(self.pid, ENDS)
            self.wait(END_SECONDS)
            if _has(self.pid, "SigCgt", ENDS):
                self.kill()
        elif self.returncode is None and _has(self.pid, "SigBlk", signal.SIGTERM):  # it begins
            self.kill()
        else:
            terminate(self)

    return terminate_or_kill


def _deaf(launch: Callable[..., None], settle: Callable[[bool], None] | None) -> Any:
    def launch_deaf(self: Any, process: Any) -> None:
        outlives = _outlives()
        if settle is not None:
            process.unicron_settling = _Settling(settle, outlives)  # read last: behind its target
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM] if outlives else [])
        try:
            launch(self, process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return launch_deaf


class _Settling:
    """Calls a function where it is unpickled."""

    def __init__(self, settle: Callable[[bool], None], outlives: bool) -> None:
        self._call = (settle, (outlives,))

    def __reduce__(self) -> tuple[Callable[[bool], None], tuple[bool]]:
        return self._call


def _has(pid: int, mask: str, number: int) -> bool:
    """Whether a child blocks the signal (SigBlk), or has a handler for it (SigCgt; proc(5))."""
    try:
        with open(f"/proc/{pid}/status") as file:
            found = re.search(rf"^{mask}:\s*([0-9a-f]+)", file.read(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)
