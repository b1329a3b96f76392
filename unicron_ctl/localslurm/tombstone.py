"""What a virtual node that was switched off leaves behind where all nodes share one address: its ports are silent.

A machine without power refuses no connection, it does not answer. `python tombstone.py SLURM_CONF NODE PORT...` holds
the ports until it is ended, when the node is switched on again or the cluster goes down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, from wherever the package is
from detector import blackhole

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


def main() -> None:
    """Holds the ports; one that somebody has taken meanwhile is left alone."""
    held = []
    for port in map(int, sys.argv[3:]):
        with contextlib.suppress(OSError):
            one = socket.create_server(("", port))
            blackhole.deafen(one)
            held.append(one)
    signal.pause()


if __name__ == "__main__":
    main()
