"""The form of a line in a log, for jobs and unicrond, in files and in the journal. Standard library only.

2026-11-26T05:42:01 WARNING unicron job=131_2 slot=5: checkpoint of iteration 40 not written: No space left
"""

from __future__ import annotations

import time


def log_line(level: str, program: str, text: str, at: float | None = None, **about: object) -> str:
    """Format one line. at: seconds since the epoch, by default now; written as local time. about: names the source, for
    example job=131; empty values are left out."""
    names = [f"{name}={value}" for name, value in about.items() if value not in ("", None)]
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
    return f"{' '.join([when, level.upper(), program, *names])}: {text}"
