"""A rank ignores Slurm's request to end its element until its agent tells it to end.

Slurm sends SIGTERM to every process of a step. A rank that died of it would lose its micro-batches; so it continues to
the next iteration boundary, and its agent ends it then (`unicron_ctl/agent/loop/ending.py`). The same holds for
SIGUSR2, which asks the agent for a checkpoint. Processes of multiprocessing continue like the rank. Programs that it
executes end by SIGTERM, because ignoring a signal is inherited: `timeout 5 tool` in such a program would wait for ever.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import threading
from types import FrameType

from unicron_detector.processes.step_signals import spare_helpers
from unicron_transition.seams import workers

_rank = 0  # the process that outlives SIGTERM; of its children only those of multiprocessing do


def _outlive(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _rank:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def outlive_notice() -> None:
    """Keep SIGTERM and SIGUSR2 from ending this process, unless the script has handlers of its own."""
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
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # executed programs inherit that


def outlives_notice() -> bool:
    """Whether SIGTERM does nothing to this process now."""
    return signal.getsignal(signal.SIGTERM) is _outlive


def _outlive_in_process() -> None:
    """Make a process of multiprocessing outlive the notice."""
    global _rank
    if outlives_notice():
        _rank = os.getpid()
        workers.outlive_sigterm()
    workers.unblock_signals()


def _settle_process(outlives: bool) -> None:
    """Make a process of multiprocessing that is not a fork of the rank outlive the notice."""
    if outlives:
        outlive_notice()
    _outlive_in_process()
