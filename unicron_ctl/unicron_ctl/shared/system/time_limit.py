"""Limits calls of libraries that may hang, as a daemon or a file server may."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
IDLE_SECONDS = 10.0  # that a thread waits for the next call


class TimeLimit:
    """Gives calls up after some seconds.

    Threads make the calls, one at a time each, and are used again. Nothing can end a call that hangs, so its thread is
    left behind and replaced. While `most` calls hang, further ones are given up at once.
    """

    def __init__(self, seconds: float, most: int, name: str) -> None:
        self._seconds, self._most, self._name = seconds, most, name
        self._hanging = 0
        self._idle: list[_Caller] = []
        self._process = os.getpid()
        self._lock = threading.Lock()

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises its errors, and TimeoutError."""
        call = _Call(work)
        if self._process != os.getpid():  # a fork has none of the threads, and the lock may be held for ever
            self._process, self._idle, self._hanging, self._lock = os.getpid(), [], 0, threading.Lock()
        with self._lock:
            if self._hanging >= self._most:
                raise TimeoutError("earlier calls hang")
            caller = self._idle.pop() if self._idle else None
        if caller is None:
            caller = _Caller(self)
            threading.Thread(target=caller.serve, name=self._name, daemon=True).start()
        caller.calls.put(call)
        if not call.ended.wait(self._seconds):
            with self._lock:
                if not call.ended.is_set():
                    call.given_up = True
                    self._hanging += 1
                    raise TimeoutError(f"no answer within {self._seconds:g} s")
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def finish(self, caller: _Caller, call: _Call) -> bool:
        """Note the end of a call; return whether its thread may be used again, as no other has replaced it."""
        with self._lock:
            self._hanging -= call.given_up
            if not call.given_up:
                self._idle.append(caller)
            call.ended.set()
            return not call.given_up

    def retire(self, caller: _Caller) -> bool:
        """Return whether the thread may end: no call is on its way to it."""
        with self._lock:
            if caller not in self._idle:
                return False
            self._idle.remove(caller)
            return True


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.given_up = False


class _Caller:
    """One thread and its queue of calls."""

    def __init__(self, limit: TimeLimit) -> None:
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._limit = limit

    def serve(self) -> None:
        """Make calls until none has come for some time, or one was given up."""
        while True:
            try:
                call = self.calls.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if self._limit.retire(self):
                    return
                continue
            try:
                call.result = call.work()
            except BaseException as error:
                call.error = error
            again = self._limit.finish(self, call)
            del call
            if not again:
                return
