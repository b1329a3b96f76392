"""A thread that does one task after the other, beside the training or an agent's loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class Worker:
    """Starts its thread with the first task. Unlike those of an executor, the thread does not keep its process
    alive."""

    def __init__(self, name: str):
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Return a future with the task's result or error. Raises RuntimeError if no thread can be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        future: Future[Result] = Future()
        self._tasks.put(lambda: _complete(task, future))
        return future

    def submit_or_run(self, task: Callable[[], Result]) -> Future[Result]:
        """Submit the task, or do it in the caller's thread if no other thread can be started."""
        try:
            return self.submit(task)
        except RuntimeError:
            future: Future[Result] = Future()
            _complete(task, future)
            return future

    def close(self, wait: bool = True) -> None:
        """Accept no more tasks. wait: until the submitted ones are done."""
        if self._thread is not None:
            self._tasks.put(None)
            if wait:
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds memory


def _complete(task: Callable[[], Result], future: Future[Result]) -> None:
    try:
        result = task()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
