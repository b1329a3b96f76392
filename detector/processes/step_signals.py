"""Signals that Slurm sends to every process of a step. They are for its ranks or its agent; no other process acts on
them.

This file must run by itself: the zygote loads it by its path.
"""

from __future__ import annotations

import signal

# SIGINT for Ctrl-C in srun
STEP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


def ignore_step_signals() -> list[signal.Signals]:
    """This process ignores them from here on. Returns those that it did not ignore before, as SIGHUP under nohup(1)."""
    heard = [number for number in STEP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, signal.SIG_IGN)
    return heard
