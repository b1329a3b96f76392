"""Stack traces of a rank that does not answer: the rank's side (a signal whose C handler writes them) and the agent's.

Standard library only. faulthandler's handler needs no GIL, so it answers for a rank whose GIL is held. A process that
was stopped by a signal (state T) runs nothing at all, and only py-spy can look into it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 1
SPY_SECONDS = 1.5  # py-spy's time to look at one process
SETTLE_SECONDS = 0.05  # a trace that has not grown for this long is complete
ANSWER_SECONDS = 0.5  # faulthandler's time to begin
MAX_TEXT = 16_000
_file = None  # kept open for the life of the rank


def register(path: str) -> None:
    """Write all threads' stacks to `path` whenever SIGNAL comes. Called in the rank."""
    global _file
    _file = open(path, "ab", buffering=0)
    faulthandler.register(SIGNAL, file=_file, all_threads=True)


def register_from_environment() -> None:
    """Call `register` if the agent asks for it (UNICRON_STACKS). Called in the rank."""
    path = os.environ.get("UNICRON_STACKS")
    if path:
        try:
            register(path)
        except (OSError, ValueError, RuntimeError):
            os.environ.pop("UNICRON_STACKS")  # a rank can do without traces


def process_state(pid: int) -> str:
    """Return the state letter of proc(5), and where the kernel has the process waiting; empty if it is gone."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0 \n")
    except OSError:
        where = ""
    words = {
        "T": "stopped by a signal",
        "t": "stopped by a debugger",
        "D": "in uninterruptible sleep",
        "Z": "dead",
        "R": "running",
        "S": "sleeping",
    }
    return f"{letter} ({words.get(letter, 'see proc(5)')}{f', in {where}' if where else ''})"


def handles_signal(pid: int) -> bool:
    """Whether the process has a handler for SIGNAL; without one it would die of it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (SIGNAL - 1) & 1)


class Dump:
    """One trace in the making: call `done()` until it is true, then read `text`. Never blocks."""

    def __init__(self, pid: int, path: str):
        self.pid, self.path = pid, Path(path)
        self.state = process_state(pid)
        self.how = "none"  # or the program that makes it: py-spy, faulthandler
        self.text = ""
        self._spy: subprocess.Popen[bytes] | None = None
        self._offset = self._last = self._size()
        self._began = self._grown = time.monotonic()
        program = shutil.which("py-spy")
        if program and self.state:
            self.how = "py-spy"
            nonblocking = ["--nonblocking"] if self.state[0] in "Tt" else []
            with self.path.open("ab") as file:
                self._spy = subprocess.Popen(
                    [program, "dump", *nonblocking, "--pid", str(self.pid)],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                )
        else:
            self._signal()

    def _signal(self) -> None:
        self.how = "none"
        if self.state and self.state[0] not in "TtZ" and handles_signal(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, SIGNAL)
                self.how = "faulthandler"

    def done(self) -> bool:
        """Whether the trace is complete."""
        now = time.monotonic()
        if self._spy is not None:
            if self._spy.poll() is None and now - self._began < SPY_SECONDS:
                return False
            if self._spy.poll() is None:
                self._spy.kill()
            failed = self._spy.wait() != 0
            self._spy = None
            if failed:  # most often for lack of permission to trace
                self._offset = self._last = self._size()
                self._began = self._grown = now
                self._signal()
        if self.how == "faulthandler" and not self._complete(now):
            return False
        self._read()
        return True

    def _complete(self, now: float) -> bool:
        size = self._size()
        if size != self._last:
            self._last, self._grown = size, now
        if size > self._offset:
            return now - self._grown >= SETTLE_SECONDS
        return now - self._began >= ANSWER_SECONDS

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _read(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                self.text = file.read(MAX_TEXT).decode(errors="replace").strip()
        except OSError:
            self.text = ""
        if not self.text:
            self.how = "none"
