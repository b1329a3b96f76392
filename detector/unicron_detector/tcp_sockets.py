"""The TCP sockets of this process, by their inodes. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

_views = threading.RLock()  # no thread sees the descriptors that another one needs for its views


def tcp_sockets() -> dict[int, int]:
    """Return inode -> file descriptor of this process's TCP sockets."""
    sockets = {}
    with _views:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:[") and _is_tcp(int(name)):
                    sockets[int(target[8:-1])] = int(name)
    return sockets


def _is_tcp(descriptor: int) -> bool:
    with view_of(descriptor) as view:
        return view.family in (socket.AF_INET, socket.AF_INET6) and view.type == socket.SOCK_STREAM


@contextlib.contextmanager
def view_of(descriptor: int) -> Iterator[socket.socket]:
    """Give another socket object for the same socket; its end leaves the socket open. Raises OSError."""
    with _views, socket.socket(fileno=os.dup(descriptor)) as view:
        yield view


def _renew() -> None:
    """A child has a lock of its own: at the fork another thread may have held this one."""
    global _views
    _views = threading.RLock()


os.register_at_fork(after_in_child=_renew)
