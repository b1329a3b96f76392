"""What must not grow: processes, descriptors, files, shared memory. Looked at from outside, and judged."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FEWEST = 12  # samples of one process from which a trend is judged
SLACK = {"descriptors": 12.0, "megabytes": 40.0}  # a rise below it is none, however steady
SHARE = 0.2  # nor is one below this part of what was there


@dataclass(frozen=True)
class Sample:
    """What one process held at a time. what: unicrond or agent. started: with the pid it names the process for good."""

    time: float
    what: str
    pid: int
    started: int
    descriptors: int
    megabytes: float


def sample(now: float, what: str, pid: int) -> Sample | None:
    """Of a living process; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Sample(now, what, pid, int(stat[19]), len(os.listdir(f"/proc/{pid}/fd")), resident / 1e6)
    except OSError:
        return None


def rising(samples: Iterable[Sample]) -> list[str]:
    """The processes that held more in the last third of their life than in the middle one, and there more than in the
    first; in one line each."""
    lives: dict[tuple[str, int, int], list[Sample]] = defaultdict(list)
    for each in samples:
        lives[each.what, each.pid, each.started].append(each)
    found = []
    for (what, pid, _), life in sorted(lives.items()):
        if len(life) < FEWEST:
            continue
        for name, slack in SLACK.items():
            first, middle, last = (median(getattr(one, name) for one in part) for part in _thirds(life))
            if first < middle < last and last - first > max(slack, SHARE * first):
                found.append(f"{what} {pid}: {name} {first:.0f}, {middle:.0f}, {last:.0f} in the thirds of its life")
    return found


def _thirds(life: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample], Sequence[Sample]]:
    ordered = sorted(life, key=lambda one: one.time)
    third = len(ordered) // 3
    return ordered[:third], ordered[third : 2 * third], ordered[2 * third :]


@dataclass(frozen=True)
class Inventory:
    """What is there while no job runs. processes: by kind. files: path -> bytes, of the folders that are looked at.
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
    """What is there afterwards and was not before, in one line each."""
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
