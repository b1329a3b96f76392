"""Waits for messages that can be given up (docs/design/generations.md, "What gloo forgets").

When a connection ends, gloo tells whoever waits for a queued message, but not whoever waits for one that was on its
way: that wait goes on until the time-out of the group (torch 2.13, `Pair::signalException`). So a message is waited for
by a thread, and the main thread leaves it there a moment after the connections were cut. The thread stays until the
time-out, and keeps the memory that a late rest of the message may still be written to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from unicron.transition.generations.connecting import run_until

GRACE_SECONDS = 0.3  # in which a wait whose connection was cut ends by itself, with gloo's own reason
_types: Any = _distributed_c10d.OpType  # type: ignore[attr-defined]
MESSAGES = frozenset(map(int, (_types.SEND, _types.RECV, _types.RECVANYSOURCE)))

_work: Any = dist.Work
_usual = _work.wait


class LostWait(RuntimeError):
    """The generation is over, and nobody will end this wait."""


def install(cut: Callable[[], bool]) -> None:
    """From now on waits of the main thread for messages, whoever sends them, raise :class:`LostWait` GRACE_SECONDS
    after `cut()`: the connections that they are for have been broken. For gloo."""

    def wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
        main = threading.current_thread() is threading.main_thread()
        if not main or int(work._get_op_type()) not in MESSAGES:
            return _usual(work, *arguments, **keywords)
        error = LostWait("a message was on its way when its connection was cut")
        return run_until(lambda: _usual(work, *arguments, **keywords), _Over(cut), error)

    _work.wait = wait


class _Over:
    """Says whether `cut()` has been true for GRACE_SECONDS."""

    def __init__(self, cut: Callable[[], bool]):
        self._cut = cut
        self._since: float | None = None

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._cut():
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since > GRACE_SECONDS
