"""Open files: the controller needs one for each connection, an agent some for each rank."""

from __future__ import annotations

import resource

CONNECTIONS = 10000  # of agents and commands: what the controller is made for
OWN = 200  # its sockets, pipes and threads, the event log, programs that it starts
# Some programs that it starts close every descriptor up to the limit one by one: a limit in the millions costs seconds.
MOST = 1 << 16


def raise_limit() -> int:
    """Raises the limit of open files as far as the system grants. Returns how many this process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


def open_files() -> int:
    """Return how many files this process may have open now."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if soft == resource.RLIM_INFINITY else soft


def connections(granted: int) -> int:
    """Return how many connections fit into so many open files."""
    return max(granted - OWN, granted // 2)


def shortage(granted: int) -> str:
    """One line for an admin when so many are too few, else nothing."""
    if granted >= CONNECTIONS + OWN:
        return ""
    return (
        f"{granted} open files are granted, enough for {connections(granted)} connections and not for {CONNECTIONS}: "
        "set LimitNOFILE=65536 in unicrond.service, or raise `ulimit -Hn`"
    )
