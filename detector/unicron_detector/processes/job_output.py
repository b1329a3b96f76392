"""Writes a supervisor's output to the job's log, and never waits for it: the file system may not answer, the disk may
be full, the reader may be stopped.

A thread of its own writes the buffer. While the log accepts output and the buffer fills, less is read from the ranks,
and nothing is lost. Once it has accepted nothing for STALL_SECONDS, training continues and the newest output is
dropped; the log reports how much when it accepts output again.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque

from unicron_detector.processes.log_format import log_line

FULL_BYTES = 4 << 20  # from here on writers should hold back
MOST_BYTES = 2 * FULL_BYTES
STALL_SECONDS = 5.0
PIECE = 1 << 16
LONGEST_FLUSH = 60.0  # at the end, for a slow log


class JobOutput:
    """Output for one descriptor, from any thread."""

    def __init__(self, descriptor: int, stall: float = STALL_SECONDS):
        self._descriptor, self._stall = descriptor, stall
        self._waiting: deque[bytes] = deque()
        self._size = self._dropped = 0
        self._why = ""
        self._moved = time.monotonic()  # when the log last accepted output, or had none to accept
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Write without ever waiting or failing."""
        if not data:
            return
        with self._changed:
            if not self._has_thread():
                self._write_now(data)
            elif self._size + len(data) > MOST_BYTES:
                self._dropped += len(data)
            else:
                if not self._waiting:
                    self._moved = time.monotonic()
                self._waiting.append(data)
                self._size += len(data)
                self._changed.notify_all()

    @property
    def full(self) -> bool:
        """Whether writers should wait: much is in the buffer, and the log accepts it."""
        return self._size > FULL_BYTES and time.monotonic() - self._moved < self._stall

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, as long as something is written every `seconds`; False if not."""
        limit = time.monotonic() + max(seconds, LONGEST_FLUSH)
        with self._changed:
            while self._size:
                now = time.monotonic()
                left = min(limit, self._moved + seconds) - now
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _has_thread(self) -> bool:
        if self._thread is None or not self._thread.is_alive():  # none yet, or this process is a fork
            self._waiting.clear()
            self._size = 0
            thread = threading.Thread(target=self._run, name="unicron-output", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started
                return False
            self._thread = thread
        return True

    def _write_now(self, data: bytes) -> None:
        """Write what the log accepts at once, without a thread."""
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            while data and poll.poll(0):
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        self._dropped += len(data)

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = self._waiting[0]
            lost = self._put(data)
            with self._changed:
                self._waiting.popleft()
                self._size -= len(data)
                self._dropped += lost
                self._moved = time.monotonic()
                self._changed.notify_all()
            if self._dropped and not lost:
                self._tell_loss()

    def _put(self, data: bytes) -> int:
        """Write, and return the number of bytes that the log refused."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left[:PIECE]) :]
                except BlockingIOError:  # another process has made it non-blocking
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
                else:
                    self._moved = time.monotonic()
        except OSError as error:
            self._why = error.strerror or str(error)
        return len(left)

    def _tell_loss(self) -> None:
        with self._changed:
            lost, self._dropped = self._dropped, 0
            why, self._why = self._why or "it took nothing for too long", ""
        text = f"{lost} bytes of output were lost here, for the job's log did not take them: {why}"
        with contextlib.suppress(OSError):
            os.write(self._descriptor, f"{log_line('warning', 'unicron', text)}\n".encode())


standard_output, standard_error = JobOutput(1), JobOutput(2)
