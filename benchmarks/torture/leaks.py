"""Leaks of processes, descriptors, files and shared memory, seen from outside."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import psutil

T = TypeVar("T")
WHAT = ("unicrond", "agent")
YOUNG = 6.0  # seconds of age at which a process has loaded its modules
FEWEST = 12  # samples of one process after that by which its life is judged
LIVES = 6  # judged lives of one kind that are compared with each other
SLACK = {"descriptors": 12.0, "megabytes": 40.0}  # a smaller rise does not count
SHARE = 0.2  # nor does a rise by a smaller part of the first value


@dataclass(frozen=True)
class Sample:
    """A sample of one process."""

    time: float
    what: str
    """One of WHAT."""
    pid: int
    started: float
    """Seconds since the epoch; with the pid it names the process for good."""
    age: float
    """Seconds since its start."""
    descriptors: int
    megabytes: float


def sample(now: float, what: str, pid: int) -> Sample | None:
    """Return a sample of a process; None if it is gone."""
    try:
        process = psutil.Process(pid)
        started, held = process.create_time(), process.memory_info().rss / 1e6
        return Sample(now, what, pid, started, time.time() - started, process.num_fds(), held)
    except psutil.Error:
        return None


@dataclass(frozen=True)
class Growth:
    """Growth of the processes."""

    lives: Mapping[str, int]
    """Lives of each kind that were long enough to be judged."""
    found: tuple[str, ...]
    """A line for each kind of growth."""


def growth(samples: Iterable[Sample]) -> Growth:
    """Find what grows in the life of a process, or from one life to the next at the same age.

    Daemons are killed every minute here, and the next one may take over a leak.
    """
    by_process: dict[tuple[int, int, str], list[Sample]] = defaultdict(list)
    for each in sorted(samples, key=lambda one: one.time):
        if each.age >= YOUNG:
            by_process[each.started, each.pid, each.what].append(each)
    lives: dict[str, list[list[Sample]]] = defaultdict(list)
    found = []
    for (_, pid, what), life in sorted(by_process.items()):
        if len(life) >= FEWEST:
            lives[what].append(life)
            found += [f"{what} {pid}: {rise} in the thirds of its life" for rise in _rising(life, _held)]
    for what, of in sorted(lives.items()):
        if len(of) >= LIVES:
            found += [f"{what}: {rise} in the thirds of its {len(of)} lives" for rise in _rising(of, _early)]
    return Growth({what: len(of) for what, of in lives.items()}, tuple(found))


def _held(each: Sample, name: str) -> float:
    return float(getattr(each, name))


def _early(life: Sequence[Sample], name: str) -> float:
    """Return the value at an age that every judged life has reached."""
    return median(_held(each, name) for each in life[:FEWEST])


def _rising(items: Sequence[T], held: Callable[[T, str], float]) -> list[str]:
    """Return what rises from the first third to the middle one and to the last."""
    third, found = len(items) // 3, []
    parts = items[:third], items[third : 2 * third], items[2 * third :]
    for name, slack in SLACK.items():
        first, middle, last = (median(held(each, name) for each in part) for part in parts)
        if first < middle < last and last - first > max(slack, SHARE * first):
            found.append(f"{name} {first:.0f}, {middle:.0f}, {last:.0f}")
    return found


@dataclass(frozen=True)
class Inventory:
    """An inventory while no job runs."""

    processes: Mapping[str, int]
    """Processes by kind."""
    files: Mapping[str, int]
    """Bytes of each file of the watched folders."""
    nodes: tuple[str, ...] = ()
    """Nodes out of service, with their states."""
    held: tuple[str, ...] = ()
    """Elements that Slurm still knows, with their states."""


def files(folders: Mapping[str, Path]) -> dict[str, int]:
    """Return the bytes of each file below the named folders, by NAME/path."""
    found = {}
    for name, folder in folders.items():
        for root, _, names in os.walk(folder):
            for each in names:
                path = Path(root) / each
                try:
                    found[f"{name}/{path.relative_to(folder)}"] = path.lstat().st_blocks * 512
                except OSError:
                    continue
    return found


def leaked(before: Inventory, after: Inventory) -> list[str]:
    """Return a line for each process, node, element and folder of files that is new."""
    more = Counter(after.processes) - Counter(before.processes)
    found = [f"{count} {kind} more than before" for kind, count in sorted(more.items())]
    found += [f"node {node}" for node in after.nodes if node not in before.nodes]
    found += [f"element {element}" for element in after.held if element not in before.held]
    new = sorted(set(after.files) - set(before.files))
    by_place: dict[str, list[str]] = defaultdict(list)
    for path in new:
        by_place[path.partition("/")[0]].append(path)
    for place, paths in sorted(by_place.items()):
        size = sum(after.files[path] for path in paths)
        found.append(f"{len(paths)} files in {place}, {size} bytes: {', '.join(paths[:3])}")
    return found
