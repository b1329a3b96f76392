"""A queue from threads to a loop that polls descriptors."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Any thread puts items; one loop takes them when `fileno()` is readable. Items after :meth:`close` are lost."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False
        self._lock = threading.Lock()  # a closed descriptor's number may be another file's

    def fileno(self) -> int:
        return self._read

    def put(self, item: Item) -> None:
        self._items.put(item)
        self._wake()

    def take_all(self) -> list[Item]:
        """Return what has come since the last call."""
        return list(self.each(lambda: False))

    def each(self, enough: Callable[[], bool]) -> Iterator[Item]:
        """Yield items until it is enough; if some are left, `fileno()` stays readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        try:
            while not self._items.empty():
                yield self._items.get()
                if enough():
                    break
        finally:
            if not self._items.empty():
                self._wake()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # the loop has been woken often enough
            if not self._closed:
                os.write(self._write, b".")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._write)
            os.close(self._read)
