"""Checks that the machine has enough left for an agent: libzmq aborts the process if it gets no thread or no
descriptor at its start."""

from __future__ import annotations

import os
import threading

from unicron_ctl.shared.system.descriptors import open_files, raise_limit

DESCRIPTORS = 100  # sockets, pipes and files of the agent itself
FOR_A_RANK = 8
THREADS = 16
THREADS_SECONDS = 5.0


def shortage(ranks: int) -> str:
    """Return why an agent with so many ranks cannot begin, and what to do; empty if it can."""
    if not os.path.exists("/proc/self/stat"):
        return "there is no /proc here, in which an agent sees its ranks: mount it into the container"
    return descriptors_short(DESCRIPTORS + FOR_A_RANK * ranks) or _threads(THREADS)


def descriptors_short(needed: int) -> str:
    """Return why so many files cannot be opened, and what to do; empty if they can."""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = open_files()  # it takes a descriptor to look
    if open_files() - used < needed and raise_limit() - used < needed:
        left = max(0, open_files() - used)
        return f"only {left} more files can be opened and the agent needs {needed}: raise `ulimit -n`"
    return ""


def _threads(needed: int) -> str:
    """Start so many threads at once; return why they cannot be started, and what to do."""
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(needed):
            thread = threading.Thread(target=done.wait, args=(THREADS_SECONDS,), name="unicron-try", daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        return (
            f"only {len(started)} threads can be started and the agent needs {needed}: raise `ulimit -u` and "
            "`ulimit -v`, or end what else runs here"
        )
    finally:
        done.set()
        for thread in started:
            thread.join()
    return ""
