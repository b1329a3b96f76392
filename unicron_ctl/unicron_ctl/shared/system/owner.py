"""Lets root work in others' folders with their owner's rights, so that nothing there can lead it elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def as_owner(folder: Path) -> Iterator[None]:
    """Let root work as the folder's owner: it makes files as the owner does, and no link of the owner leads it
    elsewhere. Raises OSError."""
    owner, groups, mine = folder.stat(), os.getgroups(), (os.geteuid(), os.getegid())
    if mine[0] != 0 or owner.st_uid == 0:
        yield
        return
    os.setgroups([owner.st_gid])
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(mine[0])
        os.setegid(mine[1])
        os.setgroups(groups)


@contextlib.contextmanager
def as_root_again() -> Iterator[None]:
    """Let the process work as root again within :func:`as_owner`, to start a program that the owner could not."""
    theirs = os.geteuid(), os.getegid()
    if theirs[0] == 0 or os.getuid() != 0:
        yield
        return
    os.seteuid(0)
    os.setegid(0)
    try:
        yield
    finally:
        os.setegid(theirs[1])
        os.seteuid(theirs[0])
