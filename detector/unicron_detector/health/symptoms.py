"""Signs that a node is ill, which a healthy one does not show whatever its work: lost packets, a file system that does
not answer, processor time that is withheld.

They are read every second or two, since each read is cheap, and are told at once (:func:`notable`). Load, memory and
traffic depend on the work, and are compared more slowly (:mod:`unicron_detector.iterations.peer_metrics`). What the
kernel's files say is in docs/behaviour/node-counters.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from unicron_detector.health.cgroups import own_files
from unicron_detector.health.connections import Losses, PeerLoss
from unicron_detector.iterations.peer_metrics import MINIMA

# Symptom -> the value up to which it is none. The comparison with the peers decides above it.
LEAST = {name: MINIMA[name] for name in ("file_latency", "cpu_throttled", "packet_loss", "link_loss")}
WAIT_SHARE = 0.10  # share of the time in which somebody waited for a disk; then its latency is measured
BUSY_BYTES = 16e6  # written a second by the whole machine: a healthy disk is slow to sync then
LEAST_LOST = 0.5  # lost segments a second, of all connections, that are worth telling


def notable(values: Mapping[str, float], losses: Mapping[str, PeerLoss]) -> bool:
    """Say whether the peers should be compared now."""
    return sum(one.lost for one in losses.values()) >= LEAST_LOST or any(
        value > LEAST.get(name, 0.0) for name, value in values.items()
    )


class SymptomReader:
    """Reads the symptoms of this node, of this process's control groups and network namespace."""

    def __init__(self, file_latency: Callable[[], float | None], proc: Path = Path("/proc")) -> None:
        """file_latency: measures the latency, and may take some time; None if that failed."""
        self._file_latency, self._proc = file_latency, proc
        self._losses = Losses()
        self._counts: dict[str, float] = {}
        self._at = 0.0
        self._slow = False  # the last measured latency

    @property
    def addresses(self) -> list[str]:
        """The node's own addresses, as its connections show them."""
        return self._losses.addresses

    def read(self, now: float | None = None, probe_files: bool = False) -> tuple[dict[str, float], dict[str, PeerLoss]]:
        """Return the symptoms since the last call, and the lost segments by peer. probe_files: measure the latency even
        if nobody waits for a disk."""
        now = time.monotonic() if now is None else now
        losses, counts = self._losses.read(now), read_counts(self._proc)
        before, seconds = self._counts, now - self._at
        self._counts, self._at = counts, now
        change = {name: value - before[name] for name, value in counts.items() if name in before}
        found = {}
        if (periods := change.get("cpu_periods", 0.0)) > 0:
            found["cpu_throttled"] = max(0.0, min(1.0, change.get("cpu_throttled", 0.0) / periods))
        stalled = change.get("io_stalled", 0.0) > WAIT_SHARE * seconds or counts.get("io_blocked", 0.0) > 0
        if probe_files or self._slow or (change and stalled):
            latency = self._file_latency()
            if latency is not None and change.get("written", 0.0) <= BUSY_BYTES * seconds:
                found["file_latency"] = latency
            self._slow = found.get("file_latency", 0.0) > LEAST["file_latency"]
        return found, losses


def read_counts(proc: Path = Path("/proc")) -> dict[str, float]:
    """Read the counters: `cpu_periods` and `cpu_throttled` of this process's groups, of those the one that withholds
    most; `io_stalled` (seconds), `io_blocked` (processes now), `written` (bytes)."""
    counts: dict[str, float] = dict(_throttling(proc))
    with contextlib.suppress(OSError, ValueError, IndexError):
        some = (proc / "pressure" / "io").read_text().split("\n", 1)[0]
        counts["io_stalled"] = int(some.rpartition("total=")[2]) / 1e6
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(" ", 1) for line in (proc / "vmstat").read_text().splitlines())
        counts["written"] = float(lines["pgpgout"]) * 1024.0
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines_of = (proc / "stat").read_text().splitlines()
        counts["io_blocked"] = float(next(line for line in lines_of if line.startswith("procs_blocked")).split()[1])
    return counts


def _throttling(proc: Path) -> dict[str, float]:
    """Return the periods in which a group had work, and those in which its quota was used up."""
    worst: dict[str, float] = {}
    for file in own_files("cpu", "cpu.stat", "cpu.stat", proc=proc):
        for folder in (file.parent, *file.parent.parents):
            try:
                stat = dict(line.split() for line in (folder / file.name).read_text().splitlines())
                periods, throttled = float(stat["nr_periods"]), float(stat["nr_throttled"])
            except (OSError, ValueError):
                break  # above the first group
            except KeyError:
                continue  # a group without a quota, in version 2
            if throttled >= worst.get("cpu_throttled", 0.0):
                worst = {"cpu_periods": periods, "cpu_throttled": throttled}
    return worst
