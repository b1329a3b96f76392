"""Abandons waits that gloo does not end: for a connection, and for a message.

A rank that waits for the connection of a dead peer waits inside gloo for five times the group's time-out, and has no
socket by which it could be freed (measured, torch 2.13). When a connection ends, gloo wakes a wait for a queued
message, but not for a message in transit (`Pair::signalException`; docs/design/generations.md, "What gloo forgets"). So
both waits run in a thread, which the main thread leaves behind when the generation breaks. The thread stays until the
time-out, and keeps the memory into which a late rest of the message may still be written.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

POLL_SECONDS = 0.02
GRACE_SECONDS = 0.3  # time of a wait with a cut connection to end by itself, with gloo's own error
_types: Any = _distributed_c10d.OpType  # type: ignore[attr-defined]
MESSAGES = frozenset(map(int, (_types.SEND, _types.RECV, _types.RECVANYSOURCE)))
_work: Any = dist.Work
_original_wait = _work.wait
_cut: Callable[[], bool] | None = None  # of :func:`abandon_lost_messages`
Result = TypeVar("Result")


class LostWait(RuntimeError):
    """The generation is over, and nothing will end this wait."""


@contextlib.contextmanager
def abandonable_connections(lost: Callable[[], bool]) -> Iterator[None]:
    """Raise ConnectionError in a gloo group that is being connected in the body as soon as `lost()`."""
    if not dist.is_gloo_available():
        yield
        return
    original = distributed_c10d.ProcessGroupGloo
    module: Any = distributed_c10d  # its class is replaced for a while

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


def abandon_lost_messages(cut: Callable[[], bool]) -> None:
    """Make the main thread's waits for messages raise :class:`LostWait` GRACE_SECONDS after `cut()`."""
    global _cut
    _cut = cut

    def abandonable_wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
        main = threading.current_thread() is threading.main_thread()
        if not main or int(work._get_op_type()) not in MESSAGES:
            return _original_wait(work, *arguments, **keywords)
        return exchange(lambda: _original_wait(work, *arguments, **keywords))

    _work.wait = abandonable_wait


def exchange(work: Callable[[], Result]) -> Result:
    """Return the outcome of `work()`, which may send and receive several messages, all in one other thread. Like a
    single wait it raises :class:`LostWait` GRACE_SECONDS after the connection was cut."""
    if _cut is None:
        return work()
    error = LostWait("a message was on its way when its connection was cut")
    found: Result = run_until(work, _CutForAWhile(_cut), error)
    return found


class _CutForAWhile:
    """Tells whether `cut()` has been true for GRACE_SECONDS."""

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


class _Worker(threading.Thread):
    """Runs one task after the other. A daemon, because a task that hangs must not keep the process from ending."""

    def __init__(self) -> None:
        super().__init__(name="unicron-wait", daemon=True)
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self.tasks.get()()


_idle: list[_Worker] = []


def run_until(work: Callable[[], Any], lost: Callable[[], bool], error: Exception) -> Any:
    """Return or raise the outcome of `work()` in another thread, or raise `error` as soon as `lost()`."""
    value, failure = None, None
    over = threading.Event()

    def target() -> None:
        nonlocal value, failure
        try:
            value = work()
        except BaseException as failed:
            failure = failed
        over.set()

    worker = _idle.pop() if _idle else _Worker()
    worker.tasks.put(target)
    while not over.wait(POLL_SECONDS):
        if lost():
            raise error
    _idle.append(worker)
    if failure is not None:
        raise failure
    return value
