"""A rank's connection to its agent. A thread of its own receives, so that messages come while the main thread is stuck
in a collective.

Messages go over a ZeroMQ Unix socket, which is used under a lock. The main thread sends by itself unless the thread has
the lock just then: waking the thread would take several times as long, just when all ranks of a job go on together. For
the same reason the report of a step goes with the status that follows it, and the thread looks up mere progress of the
main thread by itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from unicron_detector.chaos.inject import injector
from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.root_cause import one_line
from unicron_detector.processes import rank_messages, stacks
from unicron_detector.processes.log_format import log_line
from unicron_detector.processes.rank_messages import (
    CollectiveProgress,
    Fault,
    FromRank,
    Inject,
    Status,
    Step,
    ToRank,
)

LINGER_MS = 1000  # the end of a process waits this long for its last messages
PROGRESS_SECONDS = 0.2  # between a message and a report of mere progress; and for which a step waits for a status
QUIET_SECONDS = 0.5  # between two calls of `on_quiet`
MAX_TRACEBACK = 8000  # characters; the end of a traceback names the error


class RankChannel:
    """A connection to the agent's `endpoint` as rank `slot`, whose thread calls `on_message(message)`."""

    def __init__(self, endpoint: str, slot: int, incarnation: int, on_message: Callable[[ToRank], None]):
        self.slot, self.incarnation = slot, incarnation
        self._on_message = on_message
        self.on_quiet: Callable[[bool], CollectiveProgress | None] | None = None
        """on_quiet(fresh) is called in the channel's thread if the main thread has sent nothing for a while; fresh: for
        the first time since. Its result is sent."""
        self.progress: Callable[[], Status | None] | None = None
        """Called in the channel's thread if the main thread has sent nothing for PROGRESS_SECONDS. Its result, if any,
        is sent."""
        self._outgoing: deque[bytes] = deque()
        self._steps: deque[Step] = deque()  # that wait for a status
        self._sent_at = self._seen = self._quiet_since = time.monotonic()  # the main thread's last message
        self._fresh = True  # `on_quiet` was not called since
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._closing = self._closed = False
        self._idle = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the socket
        self._order = threading.RLock()  # of the queue; a signal's handler may send while the main thread does
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.IDENTITY, f"{slot}.{incarnation}".encode())
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run, name="unicron-channel", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, on_message: Callable[[ToRank], None]) -> RankChannel | None:
        """Make the channel that the agent's environment names; None outside an agent."""
        endpoint = os.environ.get("UNICRON_AGENT")
        if not endpoint:
            return None
        stacks.register_from_environment()  # before the agent can ask for stacks
        return cls(
            endpoint, int(os.environ["UNICRON_SLOT"]), int(os.environ.get("UNICRON_INCARNATION", "0")), on_message
        )

    def send(self, message: FromRank) -> None:
        """Send one message; never blocks, and never raises for a missing agent."""
        if os.getpid() != self._pid:
            return  # a forked child, which must not touch the socket
        with self._order:
            self._sent_at = time.monotonic()
            self._take_steps(message)
            self._idle.clear()
        if self._lock.acquire(blocking=False):
            try:
                wake = not self._closed and self._hand_over()
            finally:
                self._lock.release()
        else:
            wake = True
        if wake:
            self._wake()

    def send_with_status(self, step: Step) -> None:
        """Send a step together with the next status, or after PROGRESS_SECONDS without it."""
        self._steps.append(step)

    def _take_steps(self, message: FromRank | None = None) -> None:
        """Queue the steps that wait, and behind them the message. A status goes with the last step."""
        waiting: list[FromRank] = []
        with contextlib.suppress(IndexError):  # both threads take from it
            while True:
                waiting.append(self._steps.popleft())
        if waiting and isinstance(message, Status) and isinstance(waiting[-1], Step):
            waiting[-1].status = message
        elif message is not None:
            waiting.append(message)
        self._outgoing.extend(rank_messages.encode(each, self.slot, self.incarnation) for each in waiting)

    def _hand_over(self) -> bool:
        """Hand the queue over to ZeroMQ, under the lock; returns whether the thread has something to do. The event by
        which ZeroMQ would have woken it may be used up by now."""
        try:
            while self._outgoing:
                self._socket.send(self._outgoing[0], zmq.NOBLOCK)
                self._outgoing.popleft()
            self._idle.set()
        except zmq.Again:
            pass  # the agent takes nothing now; the thread tries again later
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # the pipe is already full of wake-ups

    def send_fault(self, error: BaseException, at: float | None = None) -> None:
        """Report an exception (detection method 3) with its type, text and the end of its traceback."""
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        fault = fault_of(error, at)
        fault.traceback, fault.cause = lines[-MAX_TRACEBACK:], _cause(lines)
        self.send(fault)

    def install_excepthook(self) -> None:
        """Report an exception that ends the main thread before the process dies of it."""
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            at = time.time()
            previous(kind, error, trace)  # first: once the fault is known, the agent may end this process
            if not issubclass(kind, KeyboardInterrupt):
                self.send_fault(error, at)
                self.close()  # sends what ZeroMQ still holds

        sys.excepthook = hook

    def flush(self, seconds: float) -> bool:
        """Wait until everything queued has been handed to ZeroMQ; False if `seconds` were not enough."""
        if os.getpid() != self._pid:
            return True
        if self._steps:
            with self._order:
                self._take_steps()
                self._idle.clear()
            self._wake()
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Flush and end the thread."""
        if os.getpid() != self._pid:
            return
        self.flush(1.0)
        self._closing = True
        self._wake()
        self._thread.join(2.0 + LINGER_MS / 1000)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(int(self._socket.get(zmq.FD)), select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while not self._closing:
            events = dict(poller.poll(int(1000 * PROGRESS_SECONDS)))
            if self._wake_read in events:
                os.read(self._wake_read, 4096)
            if not events:
                self._look_after_main(time.monotonic())
            for data in self._exchange():
                self._deliver(data)
        with self._lock:
            self._closed = True
            self._socket.close()
        self._context.term()

    def _look_after_main(self, now: float) -> None:
        """Queue what the main thread has not said by itself."""
        sent = self._sent_at
        if sent != self._seen:
            self._seen, self._fresh, self._quiet_since = sent, True, sent
        with self._order:
            if self._steps:
                self._take_steps()
        if now - sent >= PROGRESS_SECONDS:
            self._queue_answer(self.progress, sent)
        if now - self._quiet_since >= QUIET_SECONDS:
            self._queue_answer(None if self.on_quiet is None else partial(self.on_quiet, self._fresh), sent)
            self._fresh, self._quiet_since = False, now

    def _exchange(self) -> list[bytes]:
        """Send what is queued, and return what has come."""
        came = []
        with self._lock:
            there = self._hand_over()
            while there:
                came.append(self._socket.recv())
                there = bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)
        return came

    def _queue_answer(self, source: Callable[[], FromRank | None] | None, sent: float) -> None:
        """Queue the source's message about the rank, if it has one, and the main thread has sent none since `sent`:
        what is older must not come after what is newer."""
        try:
            message = source() if source is not None else None
            if message is None:
                return
            data = rank_messages.encode(message, self.slot, self.incarnation)
            with self._order:
                if self._sent_at == sent:
                    self._outgoing.append(data)
        except Exception as error:  # the main thread changes the data meanwhile: try again next time
            _complain(f"rank {self.slot} could not say how far it is", error)

    def _deliver(self, data: bytes) -> None:
        try:
            message = rank_messages.decode(data)
            if isinstance(message, Inject):
                injector.on_order(vars(message))
            elif message is not None:
                self._on_message(message)
        except Exception as error:  # a bad message must not end the connection
            _complain(f"rank {self.slot} dropped a message", error)


def name_micro_batch(error: BaseException, iteration: int, index: int) -> None:
    """Note in the error that it came while this micro-batch was computed."""
    error.micro_batch = iteration, index  # type: ignore[attr-defined]
    error.add_note(f"in micro-batch {index} of iteration {iteration}")


def fault_of(error: BaseException, at: float | None = None) -> Fault:
    """Convert an error to a message, with its micro-batch. at: time of the error, by default now."""
    return Fault(type(error).__name__, str(error)[:2000], at or time.time(), "", "", *micro_batch_of(error))


def micro_batch_of(error: BaseException | None) -> tuple[int | None, int | None]:
    """Return (iteration, micro-batch) of an error or of one that it was raised from; None if none is named."""
    for _ in range(10):
        if error is None:
            break
        if named := getattr(error, "micro_batch", None):
            return named[0], named[1]
        error = error.__cause__ or error.__context__
    return None, None


def _cause(lines: str) -> str:
    """Return the reason that a traceback names, the root of a chain. Empty if that fails: a report must go out."""
    try:
        return one_line(default_classifier().last_words(lines)[0])
    except Exception:
        return ""


def _complain(what: str, error: Exception) -> None:
    text = f"{what}: {type(error).__name__}: {error}"
    print(log_line("warning", "unicron", text), file=sys.stderr, flush=True)
