"""Signals that Slurm sends to every process of a step. They are for its ranks or its agent; no other process acts on
them. The zygote loads this file by its path, so it must run by itself."""

from __future__ import annotations

import _posixsubprocess
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from typing import Any

# SIGINT for Ctrl-C in srun
STEP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


def ignore_step_signals() -> list[signal.Signals]:
    """Ignore them from here on; return those that were not ignored before, as SIGHUP is under nohup(1)."""
    effective = [number for number in STEP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in effective:
        signal.signal(number, signal.SIG_IGN)
    return effective


# ---------------------------------------------------------------- a rank's own children
FOR_THE_RANK = (signal.SIGUSR1, signal.SIGUSR2)
_helpers_spared = False
_before_fork = threading.local()  # the signal mask of this thread before its fork


def spare_helpers() -> None:
    """Keep the signals for which this process has a handler from the processes that it starts.

    A fork, such as a worker that loads data, ignores them, and may set a handler of its own. An executed program has
    them blocked: it inherits no handler, and SIGUSR1 would end it. SIGTERM still reaches a fork, but it is held back
    until Python has set up the fork, which would otherwise forget it.
    """
    global _helpers_spared
    if _helpers_spared:
        return
    _helpers_spared = True
    os.register_at_fork(before=_block_handled, after_in_parent=_unblock, after_in_child=_ignore_handled)
    deaf = _blocking(_posixsubprocess.fork_exec)
    _posixsubprocess.fork_exec = deaf  # of multiprocessing
    if hasattr(subprocess, "_fork_exec"):
        subprocess._fork_exec = deaf
    os.posix_spawn = _blocking(os.posix_spawn)  # of subprocess, too, from Python 3.13 on
    os.posix_spawnp = _blocking(os.posix_spawnp)


def _with_handlers(numbers: Iterable[signal.Signals] = FOR_THE_RANK) -> list[signal.Signals]:
    return [number for number in numbers if callable(signal.getsignal(number))]


def _block_handled() -> None:
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _with_handlers((*FOR_THE_RANK, signal.SIGTERM)))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _ignore_handled() -> None:
    for number in _with_handlers():
        signal.signal(number, signal.SIG_IGN)
    _unblock()


def _blocking(start: Callable[..., int]) -> Callable[..., int]:
    def start_deaf(*arguments: Any, **more: Any) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _with_handlers())
        try:
            return start(*arguments, **more)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return start_deaf
