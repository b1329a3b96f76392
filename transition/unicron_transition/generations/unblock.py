"""Frees a main thread that is stuck in a collective of a dead generation.

With gloo, `abort()` and `destroy_process_group()` return but unblock nothing (measured, torch 2.13); shutting down its
TCP sockets does, within 50 ms. Only sockets that were opened while a generation's groups were built are touched, never
the script's own. With NCCL all communicators are aborted together, from here and nowhere else.

The connections inside a replica are separate: they are left alone while a healthy replica is in its schedule, and they
may outlive the generation.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from unicron_detector.tcp_sockets import tcp_sockets, view_of


class Unblocker:
    """The sockets of the present generation. Thread-safe."""

    def __init__(self, abort: Callable[[bool], int] = lambda inside: 0) -> None:
        self._abort = abort  # abort(inside) frees waits in groups without sockets (NCCL)
        self._lock = threading.Lock()
        self._foreign: set[int] | None = None  # while groups are built: the sockets that were open before
        self._across: set[int] = set()
        self._inside: set[int] = set()
        self._armed = False

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Note every TCP socket that is opened in the body as the generation's, and connections inside the replica as
        well until :meth:`forget_inside`."""
        with self._lock:
            self._foreign = set(tcp_sockets())
            self._across, self._armed = set(), True
            self._inside &= self._foreign
        try:
            yield
        finally:
            with self._lock:
                self._across = set(tcp_sockets()) - (self._foreign or set()) - self._inside
                self._foreign = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Note sockets that are opened in the body, within :meth:`building`, as connections inside the replica."""
        before = set(tcp_sockets())
        try:
            yield
        finally:
            with self._lock:
                self._inside |= set(tcp_sockets()) - before

    def forget_inside(self) -> None:
        """Forget the connections inside the replica: they are not kept."""
        with self._lock:
            self._inside = set()

    def own(self) -> dict[int, int]:
        """Return inode -> file descriptor of the generation's connections; none while they are being built."""
        with self._lock:
            if not self._armed or self._foreign is not None:
                return {}
            mine = self._across | self._inside
            return {inode: descriptor for inode, descriptor in tcp_sockets().items() if inode in mine}

    def disarm(self) -> None:
        """Forget all sockets: the generation is over, and the kernel reuses inodes."""
        with self._lock:
            self._armed, self._across, self._inside = False, set(), set()

    def unblock(self, inside: bool = True) -> int:
        """Break all connections of the generation, with `inside` also those inside the replica; return how many."""
        with self._lock:
            if not self._armed:
                return 0
            now = tcp_sockets()
            mine = set(now) - self._foreign if self._foreign is not None else set(now) & self._across
            mine = mine | (set(now) & self._inside) if inside else mine - self._inside
            count = sum(_shutdown(now[inode]) for inode in mine)
        return count + self._abort(inside)


def _shutdown(descriptor: int) -> bool:
    try:
        with view_of(descriptor) as view:
            # fails for a listening socket, whose shutdown would make gloo's accept abort the process
            view.getpeername()
            view.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
