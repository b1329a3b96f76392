"""Lines of a rank in the job's log."""

from __future__ import annotations

import os
import sys

from unicron_detector.processes.log_format import log_line


def inform(text: str) -> None:
    """Write a line of information."""
    _write("info", text)


def warn(text: str) -> None:
    """Write a warning: something is wrong, but the training continues."""
    _write("warning", text)


def _write(level: str, text: str) -> None:
    job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID", "")
    slot = os.environ.get("UNICRON_SLOT") or os.environ.get("RANK", "")
    print(log_line(level, "unicron", text, job=job, slot=slot), file=sys.stderr, flush=True)
