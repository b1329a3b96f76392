"""Reads a program's output up to a bound: an endless one must not fill this process's memory."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence

MOST_BYTES = 1 << 20  # of a program whose answer is short
READ_BYTES = 1 << 16


class TooMuchOutput(Exception):
    """A program has printed too much; the text says how much is allowed."""


class Output:
    """Collects at most `most` bytes of standard output and standard error of a process that has pipes for both."""

    def __init__(self, process: subprocess.Popen[bytes], most: int) -> None:
        self._process, self._most = process, most
        self._open = [stream.fileno() for stream in (process.stdout, process.stderr) if stream is not None]
        self._parts: dict[int, list[bytes]] = {descriptor: [] for descriptor in self._open}
        self._size = 0

    def read(self, timeout: float) -> None:
        """Read until the process has ended and its pipes are closed. Raises TooMuchOutput, and TimeoutExpired, after
        which it may be called again."""
        until = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for descriptor in self._open:
                selector.register(descriptor, selectors.EVENT_READ)
            while self._open:
                left = until - time.monotonic()
                if left <= 0.0:
                    raise subprocess.TimeoutExpired(self._process.args, timeout)
                for key, _ in selector.select(left):
                    data = os.read(key.fd, READ_BYTES)
                    if not data:
                        selector.unregister(key.fd)
                        self._open.remove(key.fd)
                    self._add_part(key.fd, data)
        self._process.wait(max(0.0, until - time.monotonic()))

    def _add_part(self, descriptor: int, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._most:
            raise TooMuchOutput(f"it printed more than {self._most >> 20} MiB")
        self._parts[descriptor].append(data)

    def texts(self) -> tuple[bytes, bytes]:
        """Return standard output and standard error as far as they were read."""
        out, err = (b"".join(parts) for parts in self._parts.values())
        return out, err


def run_program(
    command: Sequence[str], timeout: float, most: int = MOST_BYTES, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end, without input, as `subprocess.run` does, and capture its output. It is killed if it
    takes longer or prints more. Raises TooMuchOutput, TimeoutExpired and OSError."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        output = Output(process, most)
        try:
            output.read(timeout)
        except BaseException:
            process.kill()
            raise  # the end of the block waits for it
        out, err = output.texts()
        return subprocess.CompletedProcess(command, process.returncode, out, err)
