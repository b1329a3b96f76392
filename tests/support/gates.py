"""Micro-batches that come slowly until a file is there: time to kill a rank and to see it back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

HURRY = "TEST_HURRY"  # the file
SLOWLY = 0.5  # seconds


def slow(owner: type) -> None:
    """Let an object's fetches wait, if there is a file to wait for."""
    fetch = owner.__call__
    name = os.environ.get(HURRY)

    def slowly(self: Any, iteration: int, index: int) -> Any:
        if name and not Path(name).exists():
            time.sleep(SLOWLY)
        return fetch(self, iteration, index)

    owner.__call__ = slowly  # type: ignore[method-assign]
