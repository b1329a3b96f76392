"""Root works in folders of others: with their owner's rights, so that nothing there leads it elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def as_owner(folder: Path) -> Iterator[None]:
    """Makes root work as the folder's owner: all that is made there is his, and what he puts in the way leads root
    nowhere. Raises OSError."""
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
    """Within :func:`as_owner`, makes the process work as root: to start a program that the owner could not."""
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
