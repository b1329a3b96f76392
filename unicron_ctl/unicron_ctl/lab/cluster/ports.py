"""Free TCP ports for a cluster's daemons."""

from __future__ import annotations

import socket
import zlib

# Below the range from which Linux takes ports for outgoing connections (32768 and up by default).
FIRST, LAST = 20000, 32000


def is_free(port: int) -> bool:
    """True when a daemon could listen on the port, on every address of this machine, now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose(count: int, seed: str) -> tuple[int, ...]:
    """`count` free ports. Raises OSError when there are not enough.

    The search starts at a place given by `seed`, so that two clusters that start together look at different ports.
    """
    size = LAST - FIRST
    start = zlib.crc32(seed.encode()) % size
    free: list[int] = []
    for offset in range(size):
        port = FIRST + (start + offset) % size
        if is_free(port):
            free.append(port)
            if len(free) == count:
                return tuple(free)
    raise OSError(f"no {count} free ports between {FIRST} and {LAST}")
