"""Leaks: processes, descriptors, files and shared memory that must not grow, seen from outside."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

T = TypeVar("T")
WHAT = ("unicrond", "agent")
YOUNG = 6.0  # seconds of age until which a process still loads what it needs
FEWEST = 12  # samples of one process, from that age on, by which its life is judged
LIVES = 6  # judged lives of one kind from which they are compared with each other
SLACK = {"descriptors": 12.0, "megabytes": 40.0}  # a rise below it is none, however steady
SHARE = 0.2  # nor is one below this part of what was there


@dataclass(frozen=True)
class Sample:
    """A sample of one process. what: one of WHAT. started: with the pid it names the process for good.
    age: seconds since then."""

    time: float
    what: str
    pid: int
    started: int
    age: float
    descriptors: int
    megabytes: float


def sample(now: float, what: str, pid: int) -> Sample | None:
    """Return a sample of a living process; None when it is gone."""
    try:
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Sample(now, what, pid, started, age, len(os.listdir(f"/proc/{pid}/fd")), resident / 1e6)
    except OSError:
        return None


@dataclass(frozen=True)
class Growth:
    """Growth of the processes.

    lives: of each kind, how many were long enough to be judged. found: what grew, in one line each.
    """

    lives: Mapping[str, int]
    found: tuple[str, ...]


def growth(samples: Iterable[Sample]) -> Growth:
    """Find what a process holds more and more of in its life, and each life more of than those before it had at
    the same age: daemons are killed every minute here, and what one of them leaves the next one may take up."""
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
    """At an age that every judged life has reached."""
    return median(_held(each, name) for each in life[:FEWEST])


def _rising(items: Sequence[T], held: Callable[[T, str], float]) -> list[str]:
    """Return what the last third has more of than the middle one, and that one more than the first."""
    third, found = len(items) // 3, []
    parts = items[:third], items[third : 2 * third], items[2 * third :]
    for name, slack in SLACK.items():
        first, middle, last = (median(held(each, name) for each in part) for part in parts)
        if first < middle < last and last - first > max(slack, SHARE * first):
            found.append(f"{name} {first:.0f}, {middle:.0f}, {last:.0f}")
    return found


@dataclass(frozen=True)
class Inventory:
    """An inventory while no job runs. processes: by kind. files: path -> bytes, of the folders that are looked at.
    nodes: out of service, with why. held: elements that Slurm still knows, with their state."""

    processes: Mapping[str, int]
    files: Mapping[str, int]
    nodes: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


def files(folders: Mapping[str, Path]) -> dict[str, int]:
    """NAME/path -> bytes of all that lies below each of the named folders."""
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
    """Return what is there afterwards and was not before, in one line each."""
    found = [
        f"{count - before.processes.get(kind, 0)} {kind} more than before"
        for kind, count in sorted(after.processes.items())
        if count > before.processes.get(kind, 0)
    ]
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
