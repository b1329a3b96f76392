"""Folders of a node that agents hold by a lock for as long as they live.

A folder that nobody holds was left by an agent that was killed. After a while, the next agent of the same user or an
epilog removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

FORGOTTEN_SECONDS = 900.0  # without an agent; slurm_plugin/epilog.d has the same
BUSY_SECONDS = 0.05  # before another look at what was held at the moment of its removal
TRIES = 5  # to open a folder that others remove at the same time


def sweep(places: Iterable[Path], ours: Callable[[str], bool], now: float) -> list[Path]:
    """Remove folders with names that are `ours` which agents of this user have left in these places, and which nobody
    has held for FORGOTTEN_SECONDS. now: of the wall clock."""
    found = [path for place in places for path in _leftovers(place, ours, now)]
    gone = [path for path in found if _remove(path, now)]
    if len(gone) < len(found):  # unicron_transition.snapshot.shared_memory may have looked whether they are held
        time.sleep(BUSY_SECONDS)
        gone += [path for path in found if path not in gone and _remove(path, now)]
    return gone


def _leftovers(place: Path, ours: Callable[[str], bool], now: float) -> Iterator[Path]:
    with suppress(OSError):
        for path in filter(lambda path: ours(path.name), place.iterdir()):
            with suppress(OSError):
                if _is_forgotten(path.lstat(), now):
                    yield path


def _is_forgotten(status: os.stat_result, now: float) -> bool:
    return now - status.st_mtime > FORGOTTEN_SECONDS


def _remove(path: Path, now: float) -> bool:
    try:
        descriptor = open_own(path)
    except OSError:
        return False
    try:
        return remove_if_unheld(path, descriptor, now)
    finally:
        os.close(descriptor)


def remove_if_unheld(path: Path, descriptor: int, now: float | None = None) -> bool:
    """Remove the folder unless somebody holds it; True if it is removed. descriptor: of the folder. now: of the wall
    clock, to remove it only if it is still forgotten: its user may be between two locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if now is not None and not _is_forgotten(os.fstat(descriptor), now):
            return False
    except OSError:
        return False
    shutil.rmtree(path, ignore_errors=True)
    return True


def hold(folder: Path) -> int:
    """Return a descriptor of the folder, which is made if missing, with a shared lock on it. Raises OSError."""
    for _ in range(TRIES):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            descriptor = open_own(folder)
        except FileNotFoundError:
            continue
        if share_lock(folder, descriptor):
            return descriptor
        time.sleep(0.01)
    raise OSError("others keep removing it")


def try_hold(folder: Path) -> int:
    """Return a descriptor as :func:`hold` does; -1 if no lock can be had."""
    try:
        return hold(folder)
    except OSError:
        return -1


def let_go(descriptor: int) -> None:
    """Release a folder that :func:`try_hold` may have locked."""
    if descriptor >= 0:
        os.close(descriptor)


def share_lock(folder: Path, descriptor: int) -> bool:
    """Take a shared lock on the folder. False if somebody is removing it, and then the descriptor is closed. Raises
    OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.lstat()):
            return True
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return False


def open_own(folder: Path) -> int:
    """Return a descriptor of the folder. Raises PermissionError if the folder is not this user's alone: everybody may
    write where it lies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise PermissionError(1, "it is another user's")
    return descriptor
