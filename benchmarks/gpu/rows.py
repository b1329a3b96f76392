"""Rows of the table, as JSON lines in the file GPU_ROWS."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def on_card() -> bool:
    """Return whether the checks use a card; otherwise they are a dry run on the CPU."""
    return os.environ.get("GPU_DEVICE", "cpu") == "cuda"


def patience() -> float:
    """Return a factor of time limits: a dry run may share its cores, and a card's time is short."""
    return 1.0 if on_card() else 6.0


def say(what: str, saw: str, /, *, ok: bool = True, **figures: Any) -> None:
    """Add a row to the table, of the check GPU_CHECK."""
    check, _, name = os.environ.get("GPU_CHECK", "").partition(" ")
    row = {**figures, "check": check, "name": name, "what": what, "saw": saw, "ok": ok, "at": time.time()}
    with open(os.environ.get("GPU_ROWS", "/dev/stdout"), "a") as file:
        file.write(json.dumps(row, default=str) + "\n")


@contextmanager
def row(what: str) -> Iterator[Callable[..., None]]:
    """Make a row of a check: the block calls `saw(text, ok=True, **figures)`; an exception becomes a row, too."""
    began = time.monotonic()

    def saw(text: str, /, *, ok: bool = True, **figures: Any) -> None:
        say(what, text, ok=ok, seconds=round(time.monotonic() - began, 2), **figures)

    try:
        yield saw
    except Exception as error:  # the next check must be made, whatever this is
        traceback.print_exc(file=sys.stderr)
        lines = f"{type(error).__name__}: {error}".splitlines()
        saw(" ".join(lines)[:600], ok=False)
