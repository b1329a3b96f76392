"""Let go of a gloo group that cannot be connected any more.

A rank that waits for the connection of a peer that died waits inside gloo for five times the group's time-out, and has
no socket by which it could be freed (measured, torch 2.13). So the constructor runs in a thread of its own, which is
left behind when the generation breaks: it holds nothing but a constructor that is bound to fail.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

POLL_SECONDS = 0.005


@contextlib.contextmanager
def interruptible(lost: Callable[[], bool]) -> Iterator[None]:
    """Inside, a gloo group that is being connected is given up as soon as `lost()`: ConnectionError."""
    from torch.distributed import distributed_c10d, is_gloo_available

    if not is_gloo_available():
        yield
        return
    original = distributed_c10d.ProcessGroupGloo
    module: Any = distributed_c10d  # whose class is replaced for a while

    class Connecting(type):
        def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
            error = ConnectionError("a member was lost while the groups were connected")
            return run_until(lambda: original(*arguments, **keywords), lost, error)

        def __instancecheck__(cls, candidate: Any) -> bool:
            return isinstance(candidate, original)

    module.ProcessGroupGloo = Connecting("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        module.ProcessGroupGloo = original


class _Worker(threading.Thread):
    """Does one thing after the other. It is a daemon: what it hangs in must not keep the process from ending."""

    def __init__(self) -> None:
        super().__init__(name="unicron-wait", daemon=True)
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self.tasks.get()()


_idle: list[_Worker] = []


def run_until(work: Callable[[], Any], lost: Callable[[], bool], error: Exception) -> Any:
    """What `work()` returns or raises, in a thread of its own; raises `error` as soon as `lost()`, and what becomes of
    the work then is dropped."""
    outcome: dict[str, Any] = {}
    over = threading.Event()

    def target() -> None:
        try:
            outcome["value"] = work()
        except BaseException as failed:
            outcome["error"] = failed
        over.set()

    worker = _idle.pop() if _idle else _Worker()
    worker.tasks.put(target)
    while not over.wait(POLL_SECONDS):
        if lost():
            raise error
    _idle.append(worker)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
