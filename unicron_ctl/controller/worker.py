"""The controller's slow work in threads: Slurm's programs in one (their order matters), probes and credentials in a
few others. Results are calls of the core, made in the main thread.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from unicron_ctl.controller.core import Core
from unicron_ctl.controller.model.requests import Action, Poll, Probe, Run
from unicron_ctl.slurm.client import SlurmClient, SlurmError

Result = Callable[[], None]
log = logging.getLogger("unicron.controller")
WORKERS, VERIFIERS = 8, 4
# Of connect(2) and socket(2): what this process or its host lacks.
PRIVATE_SECONDS = 60.0  # between two looks at Slurm's PrivateData
OWN_TROUBLE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM)


class Worker:
    """Carries requests out and hands back what to call in the main thread: `take()` after the wake-up descriptor is
    readable.
    """

    def __init__(self, client: SlurmClient | None, probe_timeout: float) -> None:
        self._client, self._probe_timeout = client, probe_timeout
        self._private: frozenset[str] = frozenset()
        self._looked = -PRIVATE_SECONDS
        self._todo: queue.Queue[tuple[Poll | Run, Core] | None] = queue.Queue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self.wake_read, False)
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="unicron-probe")
        self._verifiers = ThreadPoolExecutor(VERIFIERS, thread_name_prefix="unicron-credential")
        self._thread = threading.Thread(target=self._serve_slurm, name="unicron-slurm", daemon=True)
        self._thread.start()

    def take(self) -> list[Result]:
        """What has been finished since the last time."""
        try:
            os.read(self.wake_read, 4096)
        except BlockingIOError:
            pass
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        return found

    def submit(self, request: Poll | Run | Probe, core: Core) -> None:
        """Starts a request; its result goes to `core`."""
        if isinstance(request, Probe):
            self.call(
                lambda: connects(request.address, request.port, self._probe_timeout),
                lambda answer: core.on_probe(request, answer is not False),
            )
        else:
            self._todo.put((request, core))

    def call(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Runs `work` in a thread, then `then(result)` in the main thread. The result of work that fails is None."""
        self._start(self._pool, work, then)

    def verify(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """The same, in threads of their own: a munge that hangs must not keep probes waiting."""
        self._start(self._verifiers, work, then)

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[], Any], then: Callable[[Any], None]) -> None:

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # no result must not mean that nobody hears of it
                log.warning("work in the background failed: %r", error)
                result = None
            self._finish(lambda: then(result))

        pool.submit(run)

    def close(self) -> None:
        """Lets the running call end, starts no other."""
        self._todo.put(None)
        for pool in (self._pool, self._verifiers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _finish(self, result: Result) -> None:
        self._results.put(result)
        try:
            os.write(self._wake_write, b".")
        except BlockingIOError:
            pass  # the main thread has been woken often enough

    def _serve_slurm(self) -> None:
        while (item := self._todo.get()) is not None:
            request, core = item
            if isinstance(request, Poll):
                self._poll(core)
            elif isinstance(request, Run):
                self._run(request, core)

    def _poll(self, core: Core) -> None:
        assert self._client is not None
        try:
            nodes, elements = self._client.nodes(), self._client.elements()
            if time.monotonic() - self._looked >= PRIVATE_SECONDS:
                self._private, self._looked = self._client.private_data(), time.monotonic()
            private = self._private
        except SlurmError as error:
            message = str(error)
            self._finish(lambda: core.on_slurm_error(message))
        except (
            Exception
        ) as error:  # an answer that nobody foresaw must not end the thread: Slurm would never be asked again
            text = f"could not read Slurm's answer: {type(error).__name__}: {error}"
            self._finish(lambda: core.on_slurm_error(text))
        else:
            self._finish(lambda: core.on_listing(nodes, elements, private))

    def _run(self, request: Run, core: Core) -> None:
        failed: set[tuple[str, int, str]] = set()
        for action in request.actions:
            target = (action.job, action.element, "" if action.job else action.node)
            if target in failed:
                continue
            error = self._act(action)
            if error:
                failed.add(target)
            self._finish(partial(core.on_action, action, error))
        self._finish(core.on_actions_done)

    def _act(self, action: Action) -> str:
        assert self._client is not None
        try:
            perform(self._client, action)
        except SlurmError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def perform(client: SlurmClient, action: Action) -> None:
    """One action as a call of the client. Raises SlurmError."""
    match action.action:
        case "down":
            client.down(action.node, action.text)
        case "resume":
            client.resume(action.node)
        case "requeue":
            client.requeue(action.job, action.element)
        case "requeue_hold":
            client.requeue_hold(action.job, action.element, action.text)
        case "hold":
            client.hold(action.job, action.element, action.text)
        case "release":
            client.release(action.job, action.element)
        case "pin":
            client.pin(action.job, action.element, action.node)
        case "start_now":
            client.start_now(action.job, action.element)
        case "cancel":
            client.cancel(action.job, action.element)
        case other:
            raise ValueError(f"no such action: {other}")


def connects(address: str, port: int, timeout: float) -> bool | None:
    """Whether something accepts TCP connections there within `timeout` seconds. None when this process could not try:
    it has no descriptor left, or the name service is away, which says nothing of the node."""
    try:
        with socket.create_connection((address, port), timeout):
            return True
    except (socket.gaierror, UnicodeError):  # UnicodeError: of a name that is none
        return None
    except OSError as error:
        return None if error.errno in OWN_TROUBLE else False
