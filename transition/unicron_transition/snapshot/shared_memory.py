"""Allocates a file in shared memory before anything is written to it, so that a lack of room is an error.

A full /dev/shm raises an error by itself. The job's memory limit does not: shared memory counts for the job's cgroup,
and at its limit the kernel kills a process, whose successor would take the same room again. So the limit is checked
first. Only the standard library is needed here: agents and ranks use it alike."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from unicron_detector.health.memory_limit import memory_left

BESIDE = 64 << 20  # bytes that must be left for the kernel's page tables and each core's reserve
BESIDE_SHARE = 128  # one more byte must be left for this many bytes of the file
MAKING_SECONDS = 60.0  # a younger file can still be about to take its memory
FREED_SECONDS = 5.0  # after its first request, a process waits this long for room that is being freed
LOOK_SECONDS = 0.2
AWAY = "away-"  # the start of the names of an earlier process's unfinished files, while the agent removes them

_until = 0.0  # the time until which this process waits for room; 0 before its first request


def allocate(path: Path, descriptor: int, size: int) -> None:
    """Allocate all `size` bytes of a new file, whose name must end with ".new". Raises OSError (ENOSPC) if there is no
    room, or the job's memory limit leaves none, OverflowError.

    If leftovers of an earlier job or process are being removed, it waits for that, but only at a process's first
    request: a rank that pauses later could be taken for hanging, and its next copy tries again anyway.
    """
    global _until
    _until = _until or time.monotonic() + FREED_SECONDS
    os.ftruncate(descriptor, size)  # shows other processes how much it is going to take
    while True:
        if is_in_memory(descriptor):
            _check_limit(path)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno != errno.ENOSPC or time.monotonic() >= _until or not _is_being_freed(path.parent):
                raise
        time.sleep(LOOK_SECONDS)


def _check_limit(path: Path) -> None:
    """Raises OSError if the job's memory limit leaves too little. A node's ranks make their images at the same time, so
    the memory that each still lacks counts for all. It is summed up before the limit is read: memory that they get in
    between counts twice then, instead of not at all."""
    lacks = sum(map(_lacks, path.parent.glob("*.new")))
    limit = memory_left()
    if limit is None:
        return
    if lacks + lacks // BESIDE_SHARE + BESIDE > limit.size:
        text = f"{max(0, limit.size) / 1e6:.0f} MB are left of the job's memory limit ({limit.folder})"
        raise OSError(
            errno.ENOSPC,
            f"{text}, {lacks / 1e6:.0f} MB are needed: give the job more (--mem), or UNICRON_MEMORY_EVERY=0",
        )


def _lacks(path: Path) -> int:
    """Return how many bytes of an unfinished file have no memory yet; 0 for an old file, whose process has ended."""
    try:
        status = path.stat()
    except OSError:
        return 0  # it is gone, or finished
    if time.time() - status.st_mtime > MAKING_SECONDS:
        return 0
    return max(0, status.st_size - status.st_blocks * 512)


def is_in_memory(descriptor: int, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether the file is in memory. On a disk (UNICRON_MEMORY_DIR) the kernel can take its memory back."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    # ID PARENT MAJ:MIN ROOT MOUNTPOINT OPTIONS [TAGS] - TYPE SOURCE SUPER-OPTIONS, see proc(5)
    return any(line.split()[2] == number and " - tmpfs " in line for line in lines)


# ------------------------------------------------------------ leftovers of earlier jobs and processes
def _is_being_freed(folder: Path) -> bool:
    """Whether unfinished files, or another job's folder, are being removed. An agent of this user or an epilog locks
    the folder then (snapshots.node_memory). Folders of other users cannot be checked."""
    with contextlib.suppress(OSError):
        if any(folder.glob(f"{AWAY}*")):
            return True
        return any(_is_locked(other) for other in folder.parent.glob("unicron.*") if other != folder)
    return False


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False
