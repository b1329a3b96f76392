"""Writes files so that a reader finds either the old text or the new one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

READABLE = 0o644  # by everybody who may enter the folder


def write_whole(path: Path, text: str) -> None:
    """Write the file, with mode READABLE, in place of what is there. Raises OSError, with the old file unchanged."""
    descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), READABLE)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
