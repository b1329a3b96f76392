"""Keeps the ports of a switched-off node silent, on a cluster whose nodes share one address.

A machine without power does not refuse connections; it does not answer. `python tombstone.py SLURM_CONF NODE PORT...`
holds the ports until the node is switched on again or the cluster goes down.
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
    """Return the TCP ports on which these processes listen."""
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
    """Return sockets that keep the port silent, or none while another process has the port.

    The queue of the listening socket is full, so the kernel drops new connections (listen(2)). Any user may do that,
    unlike a filter on some kernels.
    """
    try:
        listening = socket.create_server(("", port), backlog=0)
    except OSError:
        return ()
    waiting = socket.socket()
    waiting.setblocking(False)
    waiting.connect_ex(("127.0.0.1", port))
    return listening, waiting


def main() -> None:
    """Hold the ports. A large process takes a while to close them, so each is tried for some time. A port that another
    program has taken is left alone."""
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
