"""The TCP sockets of this process, by their inodes. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket


def tcp_sockets() -> dict[int, int]:
    """Return inode -> file descriptor of this process's TCP sockets."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:[") and _is_tcp(int(name)):
                sockets[int(target[8:-1])] = int(name)
    return sockets


def _is_tcp(descriptor: int) -> bool:
    with view_of(descriptor) as view:
        return view.family in (socket.AF_INET, socket.AF_INET6) and view.type == socket.SOCK_STREAM


def view_of(descriptor: int) -> socket.socket:
    """Return another socket object for the same socket; closing it leaves the socket open. Raises OSError."""
    return socket.socket(fileno=os.dup(descriptor))
