"""What a rank does when Slurm asks its element to end: nothing, until its agent says so.

Slurm sends SIGTERM to every process of a step. A rank that died of it would take its micro-batches along; so it goes on
to the next iteration boundary, and its agent ends it then (`unicron_ctl/agent/loop/ending.py`). So with SIGUSR2, which
asks the agent for a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_rank = 0  # the process that outlives SIGTERM; its children do not


def _outlive(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _rank:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def outlive_notice() -> None:
    """SIGTERM and SIGUSR2 end this process no more, unless the script has handlers of its own."""
    global _rank
    if threading.current_thread() is not threading.main_thread():
        return
    _rank = os.getpid()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _outlive)


def outlives_notice() -> bool:
    """Whether SIGTERM does nothing to this process now."""
    return signal.getsignal(signal.SIGTERM) is _outlive
