"""Keeps the ports of a virtual node silent that is switched off, where all nodes share one address.

A machine without power refuses no connection; it does not answer. `python tombstone.py SLURM_CONF NODE PORT...` holds
the ports until the node is switched on again or the cluster goes down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable

ENDING_SECONDS = 10.0  # for killed processes to close their ports
AGAIN_SECONDS = 0.01
_LISTENS = "0A"  # a state of proc_net_tcp(5)


def ports_of(pids: Iterable[int]) -> list[int]:
    """The TCP ports at which these processes listen."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]"))
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(file) as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in inodes:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def hold_port(port: int) -> tuple[socket.socket, ...]:
    """Sockets that keep the port silent: the queue is full, so the kernel drops who knocks (listen(2)). It is what any
    user may do; some kernels refuse users a filter. Empty while the port is somebody's."""
    try:
        one = socket.create_server(("", port), backlog=0)
    except OSError:
        return ()
    knock = socket.socket()
    knock.setblocking(False)
    knock.connect_ex(("127.0.0.1", port))
    return one, knock


def main() -> None:
    """Holds the ports. Their former owners may still be ending: a large process takes a while to close its files. A
    port that somebody else has taken meanwhile is left alone."""
    held: dict[int, tuple[socket.socket, ...]] = {}
    wanted, deadline = [int(word) for word in sys.argv[3:]], time.monotonic() + ENDING_SECONDS
    while len(held) < len(wanted) and time.monotonic() < deadline:
        for port in [port for port in wanted if port not in held]:
            if sockets := hold_port(port):
                held[port] = sockets
        time.sleep(AGAIN_SECONDS)
    signal.pause()


if __name__ == "__main__":
    main()
