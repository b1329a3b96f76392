"""Imports numpy without threads of its own, for processes that multiply no matrices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

THREADS = "OPENBLAS_NUM_THREADS"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Import within this context without starting threads: numpy's OpenBLAS would start one for every core, and they
    spin at first, for 0.1 s of CPU on two cores. The environment is restored, since ranks inherit it. No effect if
    numpy is imported already."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before
