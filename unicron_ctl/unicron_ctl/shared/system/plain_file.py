"""Reads files that a user has named: only plain ones, and only a bounded part."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file; a pipe or a device might never answer, or would lose what was read. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no plain file")


def read_beginning(path: str | os.PathLike[str], most: int) -> str:
    """Return the first `most` bytes of a plain file. Raises OSError."""
    with open_plain(path) as file:
        return file.read(most).decode(errors="replace")
