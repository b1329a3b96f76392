"""Finds free TCP ports for a cluster's daemons."""

from __future__ import annotations

import itertools
import socket
import zlib

# Below the range from which Linux takes ports for outgoing connections (32768 and up by default).
FIRST, LAST = 20000, 32000


def is_free(port: int) -> bool:
    """Whether a daemon could listen on the port now, on every address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose(count: int, seed: str) -> tuple[int, ...]:
    """Return `count` free ports. Raises OSError if there are not enough.

    The seed decides where the search begins, so that two clusters that start together look at different ports.
    """
    size = LAST - FIRST
    start = zlib.crc32(seed.encode())
    candidates = (FIRST + (start + offset) % size for offset in range(size))
    free = tuple(itertools.islice(filter(is_free, candidates), count))
    if len(free) < count:
        raise OSError(f"no {count} free ports between {FIRST} and {LAST}")
    return free
