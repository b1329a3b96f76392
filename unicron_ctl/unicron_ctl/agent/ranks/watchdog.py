"""Ends the processes of a node's ranks when their agent does not renew their lease, because it is stopped or hangs. It
is a program of its own, which imports nothing slow; the agent starts it as a child, which dies with the agent.

It reads the lines `until SECONDS`, on the common clock CLOCK_MONOTONIC, and `ranks PID...`, each the leader of a
process group. Its arguments are the numbers of the signals that it ignores.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

MOST_WAIT = 1.0


def main() -> None:
    """Watch until the standard input closes."""
    for number in sys.argv[1:]:
        signal.signal(int(number), signal.SIG_IGN)
    until, rest = float("inf"), b""
    ranks: list[int] = []
    while True:
        left = max(0.0, until - time.monotonic())
        ready, _, _ = select.select([0], [], [], min(left, MOST_WAIT) if ranks else None)
        if ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                word, *values = line.split()
                if word == b"until":
                    until = float(values[0])
                elif word == b"ranks":
                    ranks = [int(value) for value in values]
        elif ranks and time.monotonic() >= until:
            for pid in ranks:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            print(f"unicron: {len(ranks)} processes were ended: nobody has renewed their lease", file=sys.stderr)
            ranks = []


if __name__ == "__main__":
    main()
