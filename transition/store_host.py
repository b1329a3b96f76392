"""The rendezvous store of a node: a process of its own that outlives the node's ranks. `python -m
transition.store_host [forked]`.

Prints `port N` and serves until its standard input closes, so that it never outlives the agent; `forked` from the
agent's template, it dies with the agent anyway. It is no part of the agent because it needs torch, whose import takes
seconds.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys


def main() -> None:
    """Serve on a free port of all interfaces until standard input closes, or for ever."""
    os.nice(10)  # the ranks start at the same time and matter more
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))
    print(f"port {store.port}", flush=True)
    if sys.argv[1:] == ["forked"]:
        while True:
            signal.pause()
    sys.stdin.read()


if __name__ == "__main__":
    main()
