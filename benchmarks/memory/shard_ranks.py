"""What the ranks of ``benchmarks.memory.shards`` run: tiny_gpt under a Session, with a clock around each part of
keeping a state. One line of JSON for each iteration in TINY_OUT/parts.SLOT: seconds by part."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import tiny_gpt
from unicron_transition.session import session
from unicron_transition.sharded import buffer_pool, shards

SECONDS: Counter[str] = Counter()


def clocked(owner: Any, name: str, part: str) -> None:
    """Count what a function of `owner` takes."""
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*arguments, **keywords)
        finally:
            SECONDS[part] += time.perf_counter() - began

    setattr(owner, name, wrapped)


def said(step: Callable[..., Any]) -> Callable[..., Any]:
    """Write down each iteration."""
    path = Path(os.environ["TINY_OUT"]) / f"parts.{tiny_gpt.SLOT}"

    def stepped(self: Any, began: float) -> Any:
        found = step(self, began)
        with path.open("a") as file:
            file.write(json.dumps({"iteration": found.seconds, **SECONDS}) + "\n")
        SECONDS.clear()
        return found

    return stepped


if __name__ == "__main__":
    clocked(shards.Shards, "export", "export")
    clocked(shards.Shards, "send_copies", "copy")
    clocked(session.Session, "_keep_step", "keep")
    clocked(buffer_pool.BufferPool, "wait_whole", "settle")
    clocked(buffer_pool, "_finish", "sums")
    session.Session._step = said(session.Session._step)
    tiny_gpt.main()
