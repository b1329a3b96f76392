"""The limit of open files: the controller needs one for each connection, an agent some for each rank."""

from __future__ import annotations

import resource

CONNECTIONS = 10000  # of agents and commands, for which the controller is made
OWN = 200  # its sockets, pipes and threads, the event log, programs that it starts
# Some of these programs close every descriptor up to the limit one by one, which takes seconds if that is in millions.
MOST = 1 << 16


def raise_limit() -> int:
    """Raise the limit of open files as far as the system permits; return how many this process may have open."""
    hard, open_now = resource.getrlimit(resource.RLIMIT_NOFILE)[1], open_files()
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if open_now >= wanted:
        return open_now
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return open_now
    return wanted


def open_files() -> int:
    """Return how many files this process may have open now."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if soft == resource.RLIM_INFINITY else soft


def connections(granted: int) -> int:
    """Return how many connections fit into so many open files."""
    return max(granted - OWN, granted // 2)


def shortage(granted: int) -> str:
    """Return one line for an admin if so many are too few, else nothing."""
    if granted >= CONNECTIONS + OWN:
        return ""
    return (
        f"{granted} open files are granted, enough for {connections(granted)} connections and not for {CONNECTIONS}: "
        "set LimitNOFILE=65536 in unicrond.service, or raise `ulimit -Hn`"
    )
