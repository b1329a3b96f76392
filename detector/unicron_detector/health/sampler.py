"""``python -m unicron_detector.health.sampler``: the node's metrics and symptoms, a line of JSON every few
seconds, from a process of its own.

A thread that waits for a hung file system or GPU driver keeps its whole process from ending, so the agent uses a child,
which it can leave behind. In the child each reader that may hang has its own thread: the other metrics go on, and the
latency of a hung file system is the time since it last answered. Standard library only, and pynvml if installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from unicron_detector.health.symptoms import SymptomReader
from unicron_detector.iterations import peer_metrics

PROBE_LOOKS = 2  # lines between two looks at a local disk's latency


class Patient:
    """Calls a reader that may hang in its own thread, and waits for it up to `seconds`."""

    def __init__(self, reader: Callable[[], dict[str, float]], seconds: float) -> None:
        self._reader, self._seconds = reader, seconds
        self._thread: threading.Thread | None = None
        self._result: dict[str, float] = {}
        self.began = 0.0

    def read(self) -> dict[str, float] | None:
        """Return the values, empty if they could not be read; None while the reader hangs. `began`: since when."""
        if self._thread is None:
            self._result, self.began = {}, time.monotonic()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._thread.join(self._seconds)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._result

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a metric that cannot be read is left out
            self._result = self._reader()


class Sampler:
    """Makes the lines."""

    def __init__(self, directory: str, patience: float = 1.0) -> None:
        self._files = Patient(lambda: peer_metrics.read_file_latency(directory), patience)
        self._gpus = Patient(peer_metrics.read_worst_gpu, patience)
        self._rates = peer_metrics.Rates()
        self._symptoms = SymptomReader(self._file_latency)
        self.host = machine()

    def sample(self, whole: bool = True, probe: bool = False) -> dict[str, object]:
        """Return a line. whole: with the metrics that depend on the work, not only with symptoms. probe: with the
        latency of files, even if nobody waits for a disk."""
        symptoms, losses = self._symptoms.read(probe_files=whole or probe)
        line: dict[str, object] = {"host": self.host, "whole": whole, "symptoms": symptoms, "losses": losses}
        line["addresses"] = self._symptoms.addresses
        if whole:
            values = peer_metrics.read_node() | (self._gpus.read() or {})
            line["node"] = self._rates(values, time.monotonic())
        return line

    def _file_latency(self) -> float | None:
        latency = self._files.read()
        return time.monotonic() - self._files.began if latency is None else latency.get("file_latency")


def machine() -> str:
    """Return the machine's identity, which nodes that are only containers or daemons of one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser("python -m unicron_detector.health.sampler", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="between two lines with all metrics")
    parser.add_argument("--symptoms", type=float, default=0.0, help="between two lines, 0: as --seconds")
    parser.add_argument("--often", action="store_true", help="measure that folder's latency at every other line")
    parser.add_argument("--directory", default=".", help="whose latency is measured")
    parser.add_argument("--count", type=int, default=0, help="lines until the end, 0 for no end")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: the agent decides when to end
    with contextlib.suppress(OSError):
        os.nice(5)
    pause = min(options.seconds, options.symptoms or options.seconds)
    every = max(1, round(options.seconds / pause))
    sampler, sent = Sampler(options.directory, min(1.0, pause / 4)), 0
    due = time.monotonic()
    while True:
        try:
            line = sampler.sample(whole=sent % every == 0, probe=options.often and sent % PROBE_LOOKS == 0)
            print(json.dumps(line), flush=True)
        except BrokenPipeError:
            return 0
        sent += 1
        if sent == options.count:
            return 0
        due = max(due + pause, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
