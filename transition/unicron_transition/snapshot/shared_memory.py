"""Takes room for a file in shared memory before anything is written into it. A lack of room is an error then, which
costs the file alone.

A full /dev/shm raises such an error by itself. The limit of the job's memory does not: shared memory counts for the
job's cgroup, and at its limit the kernel ends a process instead, whose next one would take the same room. So that is
looked at first. Only the standard library: agents and ranks take room alike."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from unicron_detector.health.memory_limit import memory_left

BESIDE = 64 << 20  # bytes that must be left, too: what the kernel keeps of the pages, and each core ahead of its needs
BESIDE_SHARE = 128  # ... and for so many bytes of the file one more
MAKING_SECONDS = 60.0  # a file that is younger may still be getting what it lacks
FREED_SECONDS = 5.0  # from its first want on, a process waits for room that somebody is freeing
LOOK_SECONDS = 0.2
AWAY = "away-"  # how names begin of what an earlier process has left unfinished, while the agent removes it

_until = 0.0  # when this process waits no longer; 0 before it has wanted any


def allocate(path: Path, descriptor: int, size: int) -> None:
    """Room for all `size` bytes of a new file; its name ends with ".new", as of all that are being made. Raises OSError
    where there is none (ENOSPC: no room, or none that the limit of the job's memory leaves), OverflowError.

    Where somebody is removing what an earlier job or process has left, it waits for that; but only when a process first
    wants room, since a rank that stands still later may be taken for hanging. Who makes images all the time tries
    again.
    """
    global _until
    _until = _until or time.monotonic() + FREED_SECONDS
    os.ftruncate(descriptor, size)  # others that look see what it is going to take
    while True:
        if _in_memory(descriptor):
            _look_at_limit(path)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno != errno.ENOSPC or time.monotonic() >= _until or not _is_freed(path.parent):
                raise
        time.sleep(LOOK_SECONDS)


def _look_at_limit(path: Path) -> None:
    """A node's ranks make their images at the same time, so what each of them still lacks counts for all. That is
    looked at first: what they get meanwhile counts twice, and not at all the other way round."""
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
    """Bytes of a file that is being made which have no memory yet. One that stays as it is was left by a process that
    ended."""
    try:
        status = path.stat()
    except OSError:
        return 0  # it is gone, or has its own name
    if time.time() - status.st_mtime > MAKING_SECONDS:
        return 0
    return max(0, status.st_size - status.st_blocks * 512)


def _in_memory(descriptor: int, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """The file lies in memory; on a disk (UNICRON_MEMORY_DIR) it takes none that the kernel could not get back."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    # ID PARENT MAJ:MIN ROOT MOUNTPOINT OPTIONS [TAGS] - TYPE SOURCE SUPER-OPTIONS, see proc(5)
    return any(line.split()[2] == number and " - tmpfs " in line for line in lines)


# ------------------------------------------------------------ what earlier jobs and processes have left
def _is_freed(folder: Path) -> bool:
    """Somebody removes another job's folder: an agent of this user's, or an epilog. Then that one is locked for all
    others (snapshots.node_memory); another user's cannot be looked at. Or the agent removes what is unfinished."""
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
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
