"""A rank's connection to its agent, in a thread of its own, so that messages flow while the main thread is stuck in a
collective.

Messages go over a ZeroMQ Unix socket, which the thread owns; the main thread only puts messages into a queue. The
thread looks up mere progress of the main thread by itself, because each message wakes a thread here and a process
there, just when all ranks of a job continue together.
"""

from __future__ import annotations

import os
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
from unicron_detector.processes.rank_messages import CollectiveProgress, Fault, FromRank, Inject, Status, ToRank

LINGER_MS = 1000  # the end of a process waits this long for its last messages
PROGRESS_SECONDS = 0.2  # between a message and a report of mere progress
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
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._closing = False
        self._idle = threading.Event()
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
        """Queue one message; never blocks, and never raises for a missing agent."""
        self._idle.clear()
        self._outgoing.append(rank_messages.encode(message, self.slot, self.incarnation))
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
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Flush and end the thread."""
        self.flush(1.0)
        self._closing = True
        os.write(self._wake_write, b"x")
        self._thread.join(2.0 + LINGER_MS / 1000)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        fresh, quiet_since = True, time.monotonic()
        while not self._closing:
            events = dict(poller.poll(int(1000 * PROGRESS_SECONDS)))
            if not events:
                self._send_now(self.progress)
                if time.monotonic() - quiet_since >= QUIET_SECONDS:
                    self._send_now(None if self.on_quiet is None else partial(self.on_quiet, fresh))
                    fresh, quiet_since = False, time.monotonic()
            if self._wake_read in events:
                fresh, quiet_since = True, time.monotonic()
                os.read(self._wake_read, 4096)
            while self._outgoing:
                self._socket.send(self._outgoing.popleft())
            self._idle.set()
            while self._socket.poll(0):
                self._deliver(self._socket.recv())
        self._socket.close()
        self._context.term()

    def _send_now(self, source: Callable[[], FromRank | None] | None) -> None:
        """Send the source's message about the rank, if it has one."""
        try:
            message = source() if source is not None else None
            if message is not None:
                self._socket.send(rank_messages.encode(message, self.slot, self.incarnation))
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
