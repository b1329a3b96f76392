"""The node's metrics, read by a child of the agent, since reading them may hang.

:meth:`Sampling.read_sample` never blocks. A child that falls silent is replaced; one that cannot be killed, because it
waits in the kernel, is left behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import msgspec

from unicron_ctl.agent.ranks.ranks import package_path
from unicron_detector.health.connections import PeerLoss
from unicron_detector.health.symptoms import notable

TRIES = 3  # children that end or fall silent; then this node sends no metrics
SILENT_PERIODS = 5.0
LINE_BYTES = 65536


class Sample(msgspec.Struct):
    """One line of `unicron_detector.health.sampler`."""

    host: str
    whole: bool
    """Whether it has all metrics, not only symptoms."""
    node: dict[str, float] = {}
    symptoms: dict[str, float] = {}
    losses: dict[str, PeerLoss] = {}
    """By peer; segments a second."""
    addresses: list[str] = []
    """The node's own."""


class Sampling:
    """Starts the child and reads its samples."""

    def __init__(self, folder: str) -> None:
        """Measure the latency of `folder`, unless the controller names another."""
        self._symptoms = 0.0
        self._told = False  # the last sample was worth telling
        self._folder, self._directory, self._seconds = folder, folder, 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._due = self._heard = 0.0
        self._tries = 0

    def configure(self, seconds: float, directory: str, now: float, symptoms: float = 0.0) -> None:
        """Take a sample every so many seconds from now on; 0 for none. symptoms: the same for symptoms."""
        directory = directory or self._folder
        wanted = seconds, directory, symptoms
        if wanted == (self._seconds, self._directory, self._symptoms) or not 0 <= seconds < float("inf"):
            return
        self.close()
        self._seconds, self._directory, self._symptoms = seconds, directory, symptoms
        self._due, self._tries = now + seconds, 0

    def read_sample(self, now: float) -> Sample | None:
        """Return the newest sample, if there is a new one. now: seconds, as for :meth:`configure`."""
        if self._child is None:
            if self._seconds and now >= self._due and self._tries < TRIES:
                self._start(now)
            return None
        try:
            data = os.read(self._child_output(), LINE_BYTES)
        except BlockingIOError:
            if now - self._heard > SILENT_PERIODS * self._seconds:
                self._drop(now)
            return None
        if not data:
            self._drop(now)
            return None
        *lines, self._buffer = (self._buffer + data)[-LINE_BYTES:].split(b"\n")
        self._heard = now if lines else self._heard
        try:
            samples = [msgspec.json.decode(line, type=Sample) for line in lines]
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return self._worth_telling(samples)

    def _worth_telling(self, samples: list[Sample]) -> Sample | None:
        """Return the newest of the samples that the controller should have: a whole one, one with symptoms, or the
        first without."""
        found = None
        for sample in samples:
            told, self._told = self._told, notable(sample.symptoms, sample.losses)
            if sample.whole or self._told or told:
                found = sample
        return found

    def _start(self, now: float) -> None:
        self._tries += 1
        command = [sys.executable, "-m", "unicron_detector.health.sampler", f"--seconds={self._seconds}"]
        command += [f"--symptoms={self._symptoms}"] if self._symptoms else []
        command += ["--often"] if self._directory == self._folder else []  # a shared one has many visitors
        # The working folder leads with -m; a module of the user's there, such as `signal.py`, must not be taken.
        environment = {**os.environ, "PYTHONPATH": package_path({}), "PYTHONSAFEPATH": "1"}
        environment.pop("PYTHONHOME", None)  # the user's may be another Python's
        try:
            self._child = subprocess.Popen(
                [*command, f"--directory={self._directory}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self._due = now + self._seconds
            return
        os.set_blocking(self._child_output(), False)
        self._buffer, self._heard = b"", now

    def _drop(self, now: float) -> None:
        self.close()
        self._due = now + self._seconds

    def _child_output(self) -> int:
        assert self._child is not None and self._child.stdout is not None  # it was started with a pipe
        return self._child.stdout.fileno()

    def close(self) -> None:
        """End the child, without waiting for one that cannot end."""
        child, self._child = self._child, None
        if child is not None and child.stdout is not None:
            child.kill()
            child.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
