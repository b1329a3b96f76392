"""Calls of libraries that may hang for as long as a daemon or a file server does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TimeLimit:
    """Gives calls up after some seconds. Each has a thread of its own, since nothing ends a call that hangs: while
    `most` hang, others are given up at once."""

    def __init__(self, seconds: float, most: int, name: str) -> None:
        self._seconds, self._most, self._name = seconds, most, name
        self._hanging = 0
        self._lock = threading.Lock()

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises what it raises, and TimeoutError."""
        with self._lock:
            if self._hanging >= self._most:
                raise TimeoutError("earlier calls hang")
        done: list[T] = []
        failed: list[BaseException] = []
        state = [False, False]  # it has ended, it was given up

        def call() -> None:
            try:
                done.append(work())
            except BaseException as error:
                failed.append(error)
            with self._lock:
                state[0] = True
                self._hanging -= state[1]

        thread = threading.Thread(target=call, name=self._name, daemon=True)
        thread.start()
        thread.join(self._seconds)
        with self._lock:
            if not state[0]:
                state[1] = True
                self._hanging += 1
                raise TimeoutError(f"no answer within {self._seconds:g} s")
        if failed:
            raise failed[0]
        return done[0]
