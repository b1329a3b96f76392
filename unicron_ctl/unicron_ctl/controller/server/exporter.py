"""Serves the controller's metrics (:mod:`.metrics`) to Prometheus at the address `[controller] metrics`.

The thread of an HTTP request waits up to :data:`SCRAPE_SECONDS` for the loop to read the gauges, and makes the text.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric

from unicron_ctl.controller.server.metrics import Counts
from unicron_ctl.shared.system.addresses import is_numeric, split
from unicron_ctl.shared.system.bounded_server import BoundedServer
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.mailbox import Mailbox

log = logging.getLogger("unicron.controller")
LOOPBACK = "127.0.0.1"
SCRAPE_SECONDS = 5.0  # for the loop to answer
REQUEST_SECONDS = 10.0  # for a whole request: to arrive, to wait for the loop, and to take the answer
FRESH_SECONDS = 0.5  # requests within this time get the same answer, so that they take little of the loop's time
MOST_REQUESTS = 64  # at once
WRONG_NAME = "ask by an address of this host, or by a name that stands in [controller] metrics or address\n"
BEHIND = f"the controller's loop has not answered for {SCRAPE_SECONDS:g} s"


class _Handler(WSGIRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS

    def get_environ(self) -> WSGIEnvironment:
        self.server.note_asked(self.connection)
        return super().get_environ()

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: a request is no event."""


class _Server(BoundedServer, WSGIServer):
    most_open = MOST_REQUESTS
    whole_seconds = REQUEST_SECONDS


class _Registry(CollectorRegistry):
    """A registry without the series `..._created` of each counter, which no query of ours needs."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Exporter:
    """Answers Prometheus at `place`, HOST:PORT, or :PORT for loopback. Raises UserError if nothing can listen there."""

    def __init__(self, place: str, names: Collection[str] = ()) -> None:
        # Clients may also ask for this host by its addresses.
        self._names = {name.lower() for name in (*names, metrics_place(place)[0], socket.gethostname(), "localhost")}
        self.registry = _Registry()
        ProcessCollector(registry=self.registry)
        self.counts = Counts(self.registry)
        self.asked: Mailbox[Future[Sequence[Metric]]] = Mailbox()  # requests that wait for the loop
        self._turn = threading.Lock()
        self._answer: tuple[float, Sequence[Metric]] = float("-inf"), ()
        self.registry.register(self)
        self._server = _serve(place, self._respond)
        self.address, self.port = self._server.server_address[:2]
        self._pages = make_wsgi_app(self.registry)
        self._thread = threading.Thread(target=self._server.serve, name="unicron-metrics", daemon=True)
        self._thread.start()
        log.info("metrics are at http://%s:%d/metrics", place.rpartition(":")[0] or LOOPBACK, self.port)

    def _respond(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if not self._is_named(environ.get("HTTP_HOST", "")):
            start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
            return [WRONG_NAME.encode()]
        try:
            pages: Iterable[bytes] = self._pages(environ, start_response)
            return pages
        except TimeoutError:
            log.warning("metrics: %s", BEHIND)
        except Exception:  # the server would end the request in the middle, and print a traceback
            log.exception("metrics: could not answer")
        start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
        return [f"{BEHIND}, or could not: see its log\n".encode()]

    def _is_named(self, host: str) -> bool:
        """Whether the client meant this host: another site can direct its own name here (DNS rebinding)."""
        name = re.sub(r":[0-9]*$", "", host.strip().lower())
        return name in self._names or is_numeric(name)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry would ask the loop before it runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the gauges as the loop has read them. The thread of a request calls this. Raises TimeoutError."""
        if not self._turn.acquire(timeout=SCRAPE_SECONDS):
            raise TimeoutError(BEHIND)
        try:
            at, metrics = self._answer
            if time.monotonic() - at >= FRESH_SECONDS:
                answer: Future[Sequence[Metric]] = Future()
                self.asked.put(answer)
                metrics = answer.result(SCRAPE_SECONDS)
                self._answer = time.monotonic(), metrics
            return metrics
        finally:
            self._turn.release()

    def answer(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Answers all waiting requests at once with what `read` returns. The loop calls this."""
        if not (waiting := self.asked.take_all()):
            return
        try:
            metrics = list(read())
        except Exception as error:  # a request must not end the controller
            for asked in waiting:
                asked.set_exception(error)
        else:
            for asked in waiting:
                asked.set_result(metrics)

    def close(self) -> None:
        """Takes no more requests."""
        self._server.stop()
        self._server.server_close()
        self._thread.join(SCRAPE_SECONDS)
        self.asked.close()


def _serve(place: str, respond: Callable[..., Iterable[bytes]]) -> _Server:
    host, port = metrics_place(place)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = type("_Server", (_Server,), {"address_family": family})
        return make_server(host, port, respond, server, _Handler)
    except OSError as error:
        raise cannot_serve(place, error) from None


def metrics_place(place: str) -> tuple[str, int]:
    """Return the host and port of `place`; see :class:`Exporter`."""
    host, port = split(place, listens=True)
    return host or LOOPBACK, port


def cannot_serve(place: str, error: OSError) -> UserError:
    """Make the error that nothing can listen at `place`."""
    return UserError(f"[controller] metrics = {place!r}: {error.strerror}: give another address")
