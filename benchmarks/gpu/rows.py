"""Rows of the table: one JSON line each, printed at once."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MARK = '{"row": '


def on_card() -> bool:
    """The checks use a card; without one they are a dry run on the CPU."""
    return os.environ.get("GPU_DEVICE", "cpu") == "cuda"


def patience() -> float:
    """A factor of time limits: a dry run may share its cores with much else, and a card's time is short."""
    return 1.0 if on_card() else 6.0


def say(what: str, saw: str, /, *, ok: bool = True, **figures: Any) -> None:
    """One row of the table."""
    print(MARK + json.dumps([what, saw, ok, figures], default=str) + "}", flush=True)


def parsed(line: str) -> tuple[str, str, bool, dict[str, Any]] | None:
    """The row in a line of output; None where it has none."""
    if not line.startswith(MARK):
        return None
    try:
        what, saw, ok, figures = json.loads(line)["row"]
    except (ValueError, KeyError):
        return None
    return what, saw, ok, figures


@contextmanager
def row(what: str) -> Iterator[Callable[..., None]]:
    """A check that may fail: the block calls `saw(text, ok=True, **figures)`; an exception becomes a row."""
    began = time.monotonic()

    def saw(text: str, /, *, ok: bool = True, **figures: Any) -> None:
        say(what, text, ok=ok, seconds=round(time.monotonic() - began, 2), **figures)

    try:
        yield saw
    except Exception as error:  # whatever it is, the next check is to be made
        traceback.print_exc(file=sys.stderr)
        lines = f"{type(error).__name__}: {error}".splitlines()
        saw(" ".join(lines)[:600], ok=False)
