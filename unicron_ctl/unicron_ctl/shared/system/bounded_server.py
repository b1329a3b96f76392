"""A TCP server that a crowd of clients cannot block: each connection has a thread and a time limit, and their number is
bounded."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from typing import Any

log = logging.getLogger("unicron.http")
SWEEP_SECONDS = 0.5


class BoundedServer(socketserver.TCPServer):
    """Answers each connection in a thread of its own."""

    allow_reuse_address = True
    request_queue_size = 128
    most_open = 256
    """Connections at once; one more closes the oldest that has not sent its request yet, else the oldest."""
    whole_seconds = 15.0
    """For a connection in all, however slowly it sends and reads."""

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket.socket, float] = {}
        self._asked: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        super().__init__(*arguments)

    def serve(self) -> None:
        """Serve until `stop`."""
        threading.Thread(target=self._sweep, name="unicron-sweep", daemon=True).start()
        self.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """End `serve`; any other thread may call this."""
        self._ended.set()
        self.shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of the connection's own."""
        with self._lock:
            if len(self._open) >= self.most_open:
                self._close_one()
            self._open[request] = time.monotonic()
        try:
            threading.Thread(target=self._answer, args=(request, client_address), daemon=True).start()
        except RuntimeError:  # the system grants no more threads
            self._forget(request)

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:  # the client is gone, or too slow
            pass
        except Exception:
            log.exception("a request has failed")
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._asked.discard(request)
        self.shutdown_request(request)

    def note_asked(self, request: socket.socket) -> None:
        """Note that the client has sent its whole request."""
        with self._lock:
            self._asked.add(request)

    def _close_one(self) -> None:
        """Close the oldest connection without a request; if all have one, the oldest, whose client reads slowly."""
        request = next((request for request in self._open if request not in self._asked), next(iter(self._open)))
        self._cut(request)
        del self._open[request]

    def _sweep(self) -> None:
        """Close connections that are open for too long."""
        while not self._ended.wait(SWEEP_SECONDS):
            with self._lock:
                for request, since in self._open.items():
                    if time.monotonic() - since > self.whole_seconds:
                        self._cut(request)

    @staticmethod
    def _cut(request: socket.socket) -> None:
        """End the connection under its thread, which then closes it."""
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client's error is not worth a line."""
