"""Ends a node's ranks when their lease is over, by the kernel alone: also when agent, ranks and this program are all
stopped, as by `scontrol suspend`, and before a single one of them runs again.

A timer of the kernel kills this program at the time that the agent has told. Its end closes the only writing end of a
pipe, and the kernel sends SIGKILL to the ranks' process groups, which wait for that (`fence.Tether`). The clock is
CLOCK_BOOTTIME, which goes on while a node is suspended.

The program imports nothing slow. The agent starts it as a child, which dies with the agent. It reads the lines
`until SECONDS`, and writes a byte to its standard output when its timer works, and for each line when the timer is set.
Its arguments are the numbers of the signals that it ignores.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from ctypes import POINTER, Structure, byref, c_int, c_long, c_void_p

CLOCK_BOOTTIME = 7  # time.h
TIMER_ABSTIME = 1
NEVER = 1e18


class _Event(Structure):
    _fields_ = [("value", c_void_p), ("signal", c_int), ("notify", c_int), ("rest", c_int * 12)]


class _Times(Structure):
    _fields_ = [("every", c_long * 2), ("at", c_long * 2)]


class KillTimer:
    """A timer of timer_create(2) that kills this process. Raises OSError if the kernel refuses it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.timer_settime.argtypes = [c_void_p, c_int, POINTER(_Times), c_void_p]
        self._timer = c_void_p()
        event = _Event(None, signal.SIGKILL, 0)
        if self._libc.timer_create(CLOCK_BOOTTIME, byref(event), byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def set(self, until: float) -> None:
        """Let it go off then, or never. Raises OSError."""
        at = (0, 0) if until >= NEVER else (int(max(0.0, until)), int(until % 1.0 * 1e9) + 1)
        if self._libc.timer_settime(self._timer, TIMER_ABSTIME, byref(_Times((0, 0), at)), None):
            raise OSError(ctypes.get_errno(), "timer_settime")


def main() -> None:
    """Set the timer as the standard input says, until that closes."""
    for number in sys.argv[1:]:
        signal.signal(int(number), signal.SIG_IGN)
    timer, rest = KillTimer(), b""
    timer.set(NEVER)
    os.write(1, b".")
    while data := os.read(0, 65536):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            timer.set(float(lines[-1].split()[1]))
            os.write(1, b"." * len(lines))


if __name__ == "__main__":
    main()
