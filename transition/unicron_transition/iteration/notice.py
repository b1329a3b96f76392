"""A rank does nothing when Slurm asks its element to end, until its agent says so.

Slurm sends SIGTERM to every process of a step. A rank that died of it would take its micro-batches along; so it goes on
to the next iteration boundary, and its agent ends it then (`unicron_ctl/agent/loop/ending.py`). So with SIGUSR2, which
asks the agent for a checkpoint. Processes of multiprocessing go on like the rank. Programs that it executes end by
SIGTERM: one that ignores it gives that on to all that it starts, and `timeout 5 tool` in there would wait for ever.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import threading
from types import FrameType

from unicron_detector.processes.step_signals import spare_helpers
from unicron_transition.seams import workers

_rank = 0  # the process that outlives SIGTERM; its children do not, but for those of multiprocessing, each in itself


def _outlive(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _rank:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def outlive_notice() -> None:
    """Let SIGTERM and SIGUSR2 not end this process any more, unless the script has handlers of its own."""
    global _rank
    if threading.current_thread() is not threading.main_thread():
        return
    if not _rank:
        spare_helpers()
        multiprocessing.util.register_after_fork(_outlive_in_process, lambda settle: settle())
        workers.keep_handler(_outlive, _settle_process)
    _rank = os.getpid()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _outlive)
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # what it executes inherits that


def outlives_notice() -> bool:
    """Whether SIGTERM does nothing to this process now."""
    return signal.getsignal(signal.SIGTERM) is _outlive


def _outlive_in_process() -> None:
    """Outlive the notice in a process of multiprocessing."""
    global _rank
    if outlives_notice():
        _rank = os.getpid()
        workers.outlive_sigterm()
    workers.unblock_signals()


def _settle_process(outlives: bool) -> None:
    """Outlive it in a process of multiprocessing that is no fork of the rank."""
    if outlives:
        outlive_notice()
    _outlive_in_process()
