"""What threads hand to a loop that polls descriptors."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Any thread puts, one loop takes when `fileno()` is readable. What comes after :meth:`close` is dropped."""

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
        with self._lock, contextlib.suppress(BlockingIOError):  # the loop has been woken often enough
            if not self._closed:
                os.write(self._write, b".")

    def take(self) -> list[Item]:
        """What has come since the last time."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        found = []
        while not self._items.empty():
            found.append(self._items.get())
        return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._write)
            os.close(self._read)
