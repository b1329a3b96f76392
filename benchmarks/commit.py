"""The commit at which a figure is taken."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def commit() -> str:
    """The checkout's commit when it was first asked for, with a + where it was changed; "unknown" in a copy that is no
    checkout, and on a machine without git."""
    found = []
    for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        except FileNotFoundError:
            return "unknown"
        found.append(done.stdout.strip())
    return (found[0] or "unknown") + ("+" if found[1] else "")
