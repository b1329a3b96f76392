"""A memory cgroup around one process, for fault injection: the kernel's out-of-memory killer ends the process there and
touches no other.

Only memory that the process takes from then on counts. Version 1: a child of this process's own group. Version 2: a
sibling, since a group with processes cannot have children with limits. Sources: Linux
Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import os
import time

from unicron_detector.health.oom_kills import counter_file, read_count

ROOM = 64 << 20  # bytes that the process may still take


class CageError(RuntimeError):
    """No such group can be made here; one line with the reason."""


class Cage:
    """Puts process `pid` into its own group with `room` bytes. If it raises CageError, nothing has changed."""

    def __init__(self, pid: int, room: int = ROOM):
        file = counter_file()
        if file is None:
            raise CageError("this process has no memory cgroup: nothing would limit the memory to this rank")
        first = file.name == "memory.oom_control"
        own = file.parent
        self.folder = (own if first else own.parent) / f"unicron-oom-{pid}"
        limits = ["memory.limit_in_bytes"] if first else ["memory.swap.max", "memory.max"]
        try:
            self.folder.mkdir()
        except OSError as error:
            raise CageError(f"cannot make the cgroup {self.folder}: {error.strerror}; it takes root") from None
        try:
            for name in limits:
                path = self.folder / name
                if name != "memory.swap.max" or path.exists():
                    path.write_text("0" if name == "memory.swap.max" else str(room))
            with contextlib.suppress(OSError):  # not every kernel has it
                if first:
                    (self.folder / "memory.swappiness").write_text("0")
            (self.folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            self.close()
            raise CageError(f"cannot limit memory in {self.folder}: {error.strerror}") from None
        self._count = self.folder / file.name

    def killed(self) -> bool:
        """Whether the kernel has killed a process in here."""
        return bool(read_count(self._count))

    def close(self, seconds: float = 0.5) -> None:
        """Remove the group once its process is gone."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                os.rmdir(self.folder)
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)


def fill(limit: int = 4 * ROOM) -> None:
    """Take memory until the kernel ends this process. Raises MemoryError if it does not within `limit` bytes."""
    chunks = []
    for _ in range(limit // (4 << 20)):
        chunk = bytearray(4 << 20)
        chunk[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * len(chunk[:: os.sysconf("SC_PAGE_SIZE")])
        chunks.append(chunk)
    raise MemoryError(f"the kernel let this rank take {limit >> 20} MB more: its cgroup does not hold [injected]")
