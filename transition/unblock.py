"""Free a main thread that is stuck in a collective of a dead generation.

gloo: `abort()` and `destroy_process_group()` return but unblock nothing (measured, torch 2.13); shutting down its TCP
sockets does, within 50 ms. Only sockets that were opened while a generation's groups were built are touched, never the
script's own. NCCL: the communicator abort.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator


def tcp_sockets() -> dict[int, int]:
    """inode -> file descriptor of this process's TCP sockets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:[") and _is_tcp(int(name)):
                found[int(target[8:-1])] = int(name)
    return found


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as view:
        return view.family in (socket.AF_INET, socket.AF_INET6) and view.type == socket.SOCK_STREAM


class Unblocker:
    """Knows which sockets belong to the present generation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._foreign: set[int] | None = None  # while groups are built: what was open before
        self._own: set[int] = set()
        self._armed = False

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Around the building of a generation's groups: every TCP socket opened inside belongs to the generation."""
        with self._lock:
            self._foreign = set(tcp_sockets())
            self._own, self._armed = set(), True
        try:
            yield
        finally:
            with self._lock:
                self._own = set(tcp_sockets()) - (self._foreign or set())
                self._foreign = None

    def own(self) -> dict[int, int]:
        """inode -> file descriptor of the generation's connections; none while they are being built."""
        with self._lock:
            if not self._armed or self._foreign is not None:
                return {}
            return {inode: descriptor for inode, descriptor in tcp_sockets().items() if inode in self._own}

    def disarm(self) -> None:
        """The generation is over: its sockets must not be looked for again, since inodes are re-used."""
        with self._lock:
            self._armed, self._own = False, set()

    def unblock(self) -> int:
        """Break every connection of the generation; returns how many. Idempotent."""
        with self._lock:
            if not self._armed:
                return 0
            now = tcp_sockets()
            mine = (set(now) - self._foreign) if self._foreign is not None else (set(now) & self._own)
            count = sum(_shutdown(now[inode]) for inode in mine)
        return count + _abort_nccl()


def _shutdown(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as view:
            # fails for a listening socket, whose shutdown would make gloo's accept abort the process
            view.getpeername()
            view.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _abort_nccl() -> int:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.is_nccl_available()):
        return 0
    aborted = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            if dist.get_backend(group) == "nccl":
                group.abort()
                aborted += 1
    return aborted
