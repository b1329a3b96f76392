"""Memory that is left within the limits of a process's cgroup. At a limit the kernel's out-of-memory killer ends a
process of the group, so check before you take much.

Source: Linux Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from unicron_detector.health.oom_kills import counter_file

# Files with the limit and the usage, and the entries of memory.stat that the kernel gives back before it kills: pages
# of files and, in version 2, reclaimable slabs, but not shared memory. Each number includes all groups below.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))


class MemoryLeft(NamedTuple):
    """The memory that is left for this process's group."""

    size: int  # bytes, below 0 for a group that is over its limit
    folder: Path  # the group with the nearest limit


def memory_left(pid: int | str = "self", proc: Path = Path("/proc")) -> MemoryLeft | None:
    """Return what the process's group and those above it leave; None if no limit is visible."""
    file = counter_file(pid, proc)
    if file is None:
        return None
    limit, usage, cache = _V1 if file.name == "memory.oom_control" else _V2
    limits = []
    for folder in (file.parent, *file.parent.parents):
        try:
            used = int((folder / usage).read_text())
            most = (folder / limit).read_text().strip()
        except (OSError, ValueError):
            break  # above the first group, which has no limit in version 2
        if most.isdecimal():  # "max" is none
            limits.append(MemoryLeft(int(most) - used + _sum(folder / "memory.stat", cache), folder))
    return min(limits, default=None)


def _sum(file: Path, names: tuple[str, ...]) -> int:
    try:
        lines = (line.split() for line in file.read_text().splitlines())
        return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in names)
    except (OSError, ValueError):
        return 0
