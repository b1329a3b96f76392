"""`unicronctl check-folder`: finds out whether a controller and its standby can share a state folder, and the cost of
the event log there."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles

import click

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.state_copies import backup
from unicron_ctl.shared.log.store import Holder, Store
from unicron_ctl.shared.log.term import LEASE_SECONDS, LOG_FILE, RENEW_SECONDS
from unicron_ctl.shared.system.errors import PROBLEM_FOUND, WRONG_USE, UserError
from unicron_ctl.shared.system.owner import as_owner, as_root_again
from unicron_ctl.shared.system.printable import print_text

TIMES = 300
LARGE_BYTES = 130_000_000  # of the largest log
LIMIT = 30.0  # seconds for the answer of another process
OTHERS_LOCK = "fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
OTHERS_WRITE = "sqlite3.connect(sys.argv[1], timeout=0.1).execute('BEGIN IMMEDIATE')"
OTHERS_READ = "print(sqlite3.connect(sys.argv[1]).execute('SELECT max(id) FROM event').fetchone()[0])"


@click.command(name="check-folder")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(folder: Path) -> int:
    """Say whether unicrond and a standby can share the state folder FOLDER.

    Run it as unicrond's user or as root, on the file system that both hosts are to mount. It asks for locks that
    hold between processes, and for a transaction that another process sees at once. Then it times transactions as
    unicrond makes them, with the journal for one host (WAL) and with the one for several: milliseconds, the median
    and the 99th percentile. At last a backup of a large log is made while a controller renews its lease; all files,
    300 MB at the most, are gone when it ends. The exit status is 3 if the folder does not do.
    """
    try:
        with as_owner(folder), tempfile.TemporaryDirectory(prefix="unicron-check-", dir=folder) as place:
            found = problems(Path(place))
            alone, several = costs(Path(place), False), costs(Path(place), True)
            longest = longest_renewal(Path(place))
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}: run it as unicrond's user", WRONG_USE) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{folder}: another process had no answer within {LIMIT:g} s: is it mounted?") from None
    print_text(f"{'ms: median, p99':<22}{'one host (WAL)':>20}{'several hosts':>20}")
    for name in alone:
        print_text(row(name, [alone[name], several[name]]))
    print_text(f"a renewal while a log of {LARGE_BYTES / 1e6:.0f} MB is backed up: {longest:.2f} s at most")
    if longest > LEASE_SECONDS - RENEW_SECONDS:
        print_text("a backup may end the lease: take it while the controller is stopped")
    slowest = max(max(times) for times in several.values()) / 1e3
    if slowest > LEASE_SECONDS / 2:
        found.append(f"a transaction took {slowest:.1f} s: a lease of {LEASE_SECONDS:g} s would end")
    for line in found:
        print_text(f"{folder}: {line}", err=True)
    return PROBLEM_FOUND if found else 0


def problems(folder: Path) -> list[str]:
    """Return why the folder cannot be shared. Raises OSError, subprocess.TimeoutExpired."""
    found = []
    lock = folder / "lock"
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not other(OTHERS_LOCK, lock).returncode:
            found.append("flock(2) does not hold between processes")
    except OSError as error:
        found.append(f"flock(2): {error.strerror}")
    finally:
        os.close(descriptor)
    if not found and other(OTHERS_LOCK, lock).returncode:
        found.append("the lock of a file that was closed is not free")
    store = Store(folder / "tried.sqlite", shared=True)
    store.append([event(1)])
    if other(OTHERS_READ, store.path).stdout.strip() != "1":
        found.append("another process does not see what was written")
    with sqlite3.connect(store.path) as mine:
        mine.execute("BEGIN IMMEDIATE")
        if not other(OTHERS_WRITE, store.path).returncode:
            found.append("fcntl(2) does not lock between processes: two could write the log")
        mine.rollback()
    store.close()
    return found


def other(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in another process, with this one's rights. Raises subprocess.TimeoutExpired."""
    start = f"import fcntl, os, sqlite3, sys; os.setegid({os.getegid()}); os.seteuid({os.geteuid()}); "
    command = [sys.executable, "-I", "-c", start + program, str(path)]
    with as_root_again():  # only root may be able to read this Python's folder
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def event(number: int) -> Event:
    """Return an event as long as that of a step, the most frequent one."""
    return Event(number, 1e9 + number, "1", 1, records.WorldProved(reason="x" * 220))


def measure(work: Callable[[int], object]) -> list[float]:
    """Return the milliseconds of each of TIMES calls."""
    found = []
    for number in range(TIMES):
        began = time.perf_counter()
        work(number)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def costs(folder: Path, shared: bool) -> dict[str, list[float]]:
    """Return the milliseconds of each kind of transaction."""
    store = Store(folder / f"{'shared' if shared else 'alone'}.sqlite", shared)
    store.begin_term(Holder(1, "check-folder", LEASE_SECONDS), Holder())
    asked = records.SlurmAction(action="hold", element=1, node="")
    found = {
        "one record": measure(lambda n: store.append([event(n + 1)])),
        "twenty records": measure(lambda n: store.append([event(1000 + 20 * n + k) for k in range(20)])),
        "one that must last": measure(lambda n: store.append([Event(10000 + n, 1e9, "1", 1, asked)])),
        "a renewal": measure(lambda n: store.renew()),
    }
    store.close()
    return found


def longest_renewal(folder: Path) -> float:
    """Return the seconds of the longest renewal of a lease during a backup of a log of LARGE_BYTES."""
    state = folder / "state"
    state.mkdir()
    store = Store(state / LOG_FILE, shared=True)
    store.begin_term(Holder(1, "check-folder", LEASE_SECONDS), Holder())
    step = records.WorldProved(reason="x" * 4000)
    for first in range(1, LARGE_BYTES // 4096, 1000):
        store.append([Event(first + n, 1e9, "1", 1, step) for n in range(1000)])
    made = threading.Thread(target=backup, args=(state, folder / "copy"))
    made.start()
    longest = 0.0
    while made.is_alive():
        began = time.perf_counter()
        store.renew()
        longest = max(longest, time.perf_counter() - began)
        time.sleep(0.02)
    store.close()
    return longest


def row(name: str, cells: Sequence[list[float]]) -> str:
    """Return a line with the median and the 99th percentile of each cell."""
    columns = "".join(f"{(cut := quantiles(cell, n=100))[49]:>12.2f}{cut[98]:>8.2f}" for cell in cells)
    return f"{name:<22}{columns}"
