"""Several metrics at once of each rank and node, against the job's own peers (TRANSOM's TEE; docs/design/paper.md,
section 7).

Collectors read counters of the node (standard library; NVML through pynvml if it is installed), which :class:`Rates`
converts. In the controller :class:`PeerWatch` (numpy) judges one round of metrics of all peers: robust z-scores for
each metric, and a robust multi-dimensional distance that finds a node with small deviations in many metrics at once.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# Metric -> (bad direction, largest difference without consequence). +1: only high is bad, -1: only low, 0: both.
METRICS: dict[str, tuple[int, float]] = {
    "data": (+1, 0.0),
    "forward": (+1, 0.0),
    "backward": (+1, 0.0),
    "step": (+1, 0.0),
    "reduce": (0, 0.0),
    "iteration": (+1, 0.0),
    "cpu_busy": (0, 0.15),
    "cpu_pressure": (+1, 0.10),
    "memory_used": (+1, 0.05),
    "memory_pressure": (+1, 0.05),
    "shm_used": (+1, 0.05),
    "rank_cpu": (0, 0.5),
    "rank_memory": (+1, 2.0 * 2**30),
    "nic_receive": (0, 2e7),
    "nic_transmit": (0, 2e7),
    "nic_errors": (+1, 1.0),
    "nic_drops": (+1, 10.0),
    "carrier_changes": (+1, 0.001),
    "file_latency": (+1, 0.25),
    "cpu_throttled": (+1, 0.25),
    "packet_loss": (+1, 0.03),
    "link_loss": (+1, 0.03),
    "gpu_busy": (-1, 0.15),
    "gpu_memory": (0, 2.0 * 2**30),
    "gpu_power": (0, 60.0),
    "gpu_temperature": (+1, 8.0),
    "gpu_clock": (-1, 60.0),
    "gpu_corrected_ecc": (+1, 0.1),
    "pcie_replays": (+1, 0.1),
}
DIRECTIONS = {name: direction for name, (direction, _) in METRICS.items()}
MINIMA = {name: least for name, (_, least) in METRICS.items() if least}
MIN_PEERS = 4  # fewer have no majority to compare with
FLOOR = 0.02  # smallest spread, as a share of the median: tiny differences between equal peers are no anomaly
_NIC_COUNTERS = ("nic_receive", "nic_transmit", "nic_errors", "nic_drops", "carrier_changes")
COUNTERS = (*_NIC_COUNTERS, "cpu_busy_seconds", "gpu_corrected_ecc", "pcie_replays")


def read_cpu(root: Path = Path("/proc")) -> dict[str, float]:
    """Read ``cpu_busy_seconds`` (counter, over all cores), ``cpu_count``, ``cpu_pressure`` (0 to 1, last 10 s)."""
    fields = (root / "stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields[:8]]
    idle = ticks[3] + ticks[4]
    busy = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
    return {"cpu_busy_seconds": busy, "cpu_count": float(os.cpu_count() or 1), **_pressure(root, "cpu")}


def read_memory(root: Path = Path("/proc")) -> dict[str, float]:
    """Read ``memory_used`` and ``shm_used`` (shares of the total, 0 to 1), ``memory_pressure`` (0 to 1, last 10 s)."""
    values = {}
    for line in (root / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = float(rest.split()[0])
    total = values["MemTotal"] or 1.0
    used = 1.0 - values.get("MemAvailable", total) / total
    return {"memory_used": used, "shm_used": values.get("Shmem", 0.0) / total, **_pressure(root, "memory")}


def _pressure(root: Path, what: str) -> dict[str, float]:
    """Read pressure stall information, if the kernel has it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        line = (root / "pressure" / what).read_text().split("\n", 1)[0]
        average = next(field for field in line.split() if field.startswith("avg10="))
        return {f"{what}_pressure": float(average[6:]) / 100.0}
    return {}


def read_nics(root: Path = Path("/proc"), classes: Path = Path("/sys/class/net")) -> dict[str, float]:
    """Sum the counters of the node's real interfaces: bytes, errors, drops, and changes of the carrier."""
    result = dict.fromkeys(_NIC_COUNTERS, 0.0)
    for line in (root / "net" / "dev").read_text().splitlines()[2:]:
        name, _, rest = line.partition(":")
        name, fields = name.strip(), rest.split()
        if name == "lo" or name.startswith(("veth", "docker", "br-", "virbr")) or len(fields) < 12:
            continue
        result["nic_receive"] += float(fields[0])
        result["nic_transmit"] += float(fields[8])
        result["nic_errors"] += float(fields[2]) + float(fields[10])
        result["nic_drops"] += float(fields[3]) + float(fields[11])
        with contextlib.suppress(OSError, ValueError):
            result["carrier_changes"] += float((classes / name / "carrier_changes").read_text())
    return result


def read_file_latency(directory: str | Path) -> dict[str, float]:
    """Measure ``file_latency``: seconds to write, sync and read back a small file in the directory. Raises OSError."""
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=directory, prefix=".unicron-") as file:  # without a name, if possible
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        file.read()
    return {"file_latency": time.perf_counter() - start}


def read_gpus() -> list[dict[str, float]]:
    """Read one mapping for each GPU through NVML; none without GPUs, driver or pynvml."""
    try:
        import pynvml
    except ImportError:
        return []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return [_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    return []


def _read_gpu(nvml: Any, index: int) -> dict[str, float]:
    """Return the metrics of a card, without those that it does not support."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    queries: dict[str, Callable[[], float]] = {
        "gpu_busy": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        "gpu_memory": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "gpu_power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
        "gpu_temperature": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "gpu_clock": lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "gpu_corrected_ecc": lambda: float(
            nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC)
        ),
        "pcie_replays": lambda: float(nvml.nvmlDeviceGetPcieReplayCounter(handle)),
    }
    result = {}
    for name, query in queries.items():
        with contextlib.suppress(nvml.NVMLError):
            result[name] = query()
    return result


def read_worst_gpu() -> dict[str, float]:
    """Return the worst value of each metric over the node's GPUs; nothing without any."""
    gpus = read_gpus()
    result = {}
    for name in {name for gpu in gpus for name in gpu}:
        values = [gpu[name] for gpu in gpus if name in gpu]
        result[name] = min(values) if DIRECTIONS.get(name, 0) < 0 else max(values)
    return result


def read_node() -> dict[str, float]:
    """Read the kernel's counters of the node, which never hang, without collectors that fail."""
    result: dict[str, float] = {}
    for collector in (read_cpu, read_memory, read_nics):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            result.update(collector())
    return result


class Rates:
    """Converts counters to rates per second, and leaves gauges as they are. The first call returns only gauges."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._time: float | None = None

    def __call__(self, values: Mapping[str, float], now: float) -> dict[str, float]:
        result = {name: value for name, value in values.items() if name not in COUNTERS}
        if self._time is not None and now > self._time:
            for name in COUNTERS:
                if name in values and name in self._last:
                    # a driver resets its counters
                    result[name] = max(0.0, values[name] - self._last[name]) / (now - self._time)
        if "cpu_busy_seconds" in result:
            result["cpu_busy"] = result.pop("cpu_busy_seconds") / result.get("cpu_count", 1.0)
        result.pop("cpu_count", None)
        self._last, self._time = dict(values), now
        return result


@dataclass(frozen=True)
class Anomaly:
    """A peer that stands out."""

    peer: str
    metric: str
    distance: float  # robust distance over all metrics
    scores: Mapping[str, float]
    """Metric -> signed robust z-score of those that count, the largest first."""
    rounds: int  # in a row
    reason: str


class PeerWatch:
    """Judges rounds of metrics of the peers of one job: ranks of one group, or its nodes."""

    def __init__(
        self,
        threshold: float = 8.0,
        rounds: int = 3,
        minima: Mapping[str, float] = MINIMA,
    ) -> None:
        """Each limit must be exceeded in `rounds` rounds in a row, since one sample proves nothing. threshold: limit of
        robust z-scores and of the scaled distance. minima: metric -> difference under which nothing counts."""
        self.threshold, self.rounds, self.minima = threshold, rounds, minima
        self._streaks: dict[str, int] = {}

    def judge(self, values: Mapping[str, Mapping[str, float]], fresh: Collection[str] | None = None) -> list[Anomaly]:
        """Judge one round, peer -> metric -> value; return the peers that stood out for ``rounds`` rounds, worst
        first. fresh: the peers of which there is news, if not of all; the others' rounds do not count."""
        scores = robust_scores(values, self.minima)
        outliers: dict[str, tuple[float, dict[str, float]]] = {}
        for peer, (distance, by_metric) in scores.items():
            bad = {metric: score for metric, score in by_metric.items() if _is_bad(metric, score, self.threshold)}
            if bad or distance > self.threshold:
                ranked = bad or by_metric
                outliers[peer] = (distance, dict(sorted(ranked.items(), key=lambda item: -abs(item[1]))[:5]))
        before, new = self._streaks, values.keys() if fresh is None else fresh
        self._streaks = {peer: before[peer] for peer in before if peer not in new}
        self._streaks |= {peer: before.get(peer, 0) + 1 for peer in outliers if peer in new}
        anomalies = [
            self._anomaly(peer, distance, ranked, values)
            for peer, (distance, ranked) in outliers.items()
            if self._streaks.get(peer, 0) >= self.rounds
        ]
        return sorted(anomalies, key=lambda anomaly: -max(anomaly.distance, *map(abs, anomaly.scores.values())))

    def _anomaly(
        self, peer: str, distance: float, ranked: dict[str, float], values: Mapping[str, Mapping[str, float]]
    ) -> Anomaly:
        metric, score = next(iter(ranked.items()))
        others = median(row[metric] for name, row in values.items() if name != peer and metric in row)
        reason = (
            f"{peer}: {metric} is {values[peer][metric]:.4g}, its peers' median {others:.4g} "
            f"(robust z {score:+.1f}, distance {distance:.1f}, {self._streaks[peer]} rounds)"
        )
        return Anomaly(peer, metric, distance, ranked, self._streaks[peer], reason)


def _is_bad(metric: str, score: float, threshold: float) -> bool:
    direction = DIRECTIONS.get(metric, 0)
    return abs(score) > threshold and (direction == 0 or score * direction > 0)


def robust_scores(
    values: Mapping[str, Mapping[str, float]], minima: Mapping[str, float] = MINIMA
) -> dict[str, tuple[float, dict[str, float]]]:
    """Return peer -> (distance, metric -> z). z: distance from the median in units of the median absolute deviation.

    The distance is the Mahalanobis distance of the clipped z-scores, with a covariance shrunk towards the identity, and
    scaled so that sqrt(number of metrics) is usual and the result reads like a z-score. Deviations in the good
    direction (a cool GPU) do not count in it. Metrics from fewer than MIN_PEERS peers are left out, and so are values
    that are not finite or beyond 1e100.
    """
    import numpy as np

    peers = sorted(values)
    if len(peers) < MIN_PEERS:
        return {}
    names = sorted({name for row in values.values() for name in row})
    table = np.array([[values[peer].get(name, np.nan) for name in names] for peer in peers], dtype=float)
    table[~(np.abs(table) < 1e100)] = np.nan  # squares must stay finite
    keep = np.sum(~np.isnan(table), axis=0) >= MIN_PEERS
    names, table = [name for name, kept in zip(names, keep, strict=True) if kept], table[:, keep]
    if not names:
        return {}
    center = np.nanmedian(table, axis=0)
    spread = 1.4826 * np.nanmedian(np.abs(table - center), axis=0)
    least = np.array([minima.get(name, 0.0) / 8.0 for name in names])
    spread = np.maximum.reduce([spread, FLOOR * np.abs(center), least, np.full(len(names), 1e-12)])
    scores = (table - center) / spread
    directions = np.array([DIRECTIONS.get(name, 0) for name in names])
    good = scores * directions < 0.0
    distances = _distances(np.where(good, 0.0, np.nan_to_num(scores)))
    return {
        peer: (
            float(distances[row]),
            {n: float(scores[row, i]) for i, n in enumerate(names) if not np.isnan(scores[row, i])},
        )
        for row, peer in enumerate(peers)
    }


def _distances(scores: Any) -> Any:
    """Return robust distances of the rows. Clipped scores make the covariance, so one bad peer cannot hide itself."""
    import numpy as np

    rows, columns = scores.shape
    clipped = np.clip(scores, -2.5, 2.5)
    weight = rows / (rows + 4.0 * columns)
    covariance = weight * (clipped.T @ clipped / rows) + (1.0 - weight) * np.eye(columns)
    squared = np.einsum("ij,jk,ik->i", scores, np.linalg.pinv(covariance), scores)
    lengths = np.sqrt(np.maximum(squared, 0.0))
    # Chi with k degrees of freedom is nearly normal around sqrt(k) with deviation 1/sqrt(2), wider for heavy tails.
    return np.maximum(0.0, (lengths - np.sqrt(columns)) / 1.4)
