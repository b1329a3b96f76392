"""Lets only one controller at a time write the log, decide and act (docs/design/standby.md).

A controller begins a *term* with a number above any before. While its process lives, it holds the lock of a file
`lock.NUMBER` in the state folder; the log names its term, and each transaction on the log checks that. So a free lock
shows that its controller has ended, and a controller whose term is over cannot write.

With a standby there is also a *lease*, because a host may vanish without freeing its locks. The controller counts
renewals in the log, and does nothing if it could not renew for LEASE_SECONDS. If the count stands still for a fifth
longer, a standby begins the next term. Both use their own clock, which also counts the time of a suspended host.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unicron_ctl.shared.log.store import Holder, LogTakenOver, NoRoom, Store, StoreError, peek
from unicron_ctl.shared.system.errors import UserError

LOG_FILE = "events.sqlite"
RESTORING = "restoring"  # a file that exists while a restore exchanges the others; it has the name of the copy
LEASE_SECONDS = 2.5
RENEW_SECONDS = 0.5
STANDS_STILL = 1.2  # leases without a renewal, after which the term counts as over
LOST_SECONDS = 10.0  # for which a controller that cannot renew waits and does nothing; then it ends
log = logging.getLogger("unicron.controller")


class FolderHeld(UserError):
    """Another controller has the state folder; the text names it."""


def clock() -> float:
    """Return seconds on a clock that goes on while the host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Watch:
    """Watches whether the holder of a log still renews its lease."""

    def __init__(self, now: Callable[[], float] = clock) -> None:
        self._now = now
        self._seen: tuple[int, int] | None = None
        self._since = 0.0

    def stands_still(self, holder: Holder) -> bool:
        """Note the log's holder, and return whether its lease is certainly over."""
        now = self._now()
        if (holder.number, holder.beat) != self._seen:
            self._seen, self._since = (holder.number, holder.beat), now
        return holder.lease > 0.0 and now - self._since >= holder.lease * STANDS_STILL


@dataclass
class Claim:
    """A term that was begun."""

    store: Store
    lock: int  # the descriptor of its lock
    stolen: bool  # the previous controller's lease is over, but it may be alive
    lease: float  # seconds; 0 if the term ends with the process
    _renewed: float = 0.0

    def renew(self) -> None:
        """Renew the lease if it is due. It is called while the log is read, which may take longer than the lease."""
        if self.lease and clock() - self._renewed >= RENEW_SECONDS:
            self._renewed = clock()
            self.store.renew()

    def close(self) -> None:
        """Close the log and free the lock."""
        self.store.close()
        os.close(self.lock)


def claim(
    folder: Path, leased: bool, watch: Watch | None = None, prepare: Callable[[], object] = lambda: None
) -> Claim:
    """Begin a term on the log in `folder`, with a lease or for the life of the process.

    watch: has seen the lease in earlier tries. prepare: called once the term could begin; if it raises, no term begins.
    Raises FolderHeld if another controller may be at work, StoreError and UserError.
    """
    watch = watch or Watch()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; choose another folder with --state-dir") from None
    if (left := folder / RESTORING).is_file():
        again = f"unicronctl restore {shlex.quote(left.read_text(errors='replace') or 'FILE')}"
        raise UserError(f"{folder}: a restore was cut off while it exchanged the files; nothing is lost: run `{again}`")
    path = folder / LOG_FILE
    if held := held_terms(folder):  # opening the log would disturb a controller that writes to it
        _begin_after(folder, peek(path), held, watch)
    store = Store(path, shared=leased)
    try:
        last = store.holder()  # read before the locks: a controller that comes in between changes it
        stolen = _begin_after(folder, last, held_terms(folder), watch)
        prepare()
        return _begin_term(folder, store, last, leased, stolen)
    except BaseException:
        store.close()
        raise


def _begin_after(folder: Path, last: Holder | None, held: set[int], watch: Watch) -> bool:
    """Whether the last holder may live although its lease is over. last: None if unknown. Raises FolderHeld."""
    if not held:
        return False
    if last is None or max(held) > last.number:
        raise _folder_held(folder)
    if last.number not in held:
        return False
    if watch.stands_still(last):
        return True
    raise _folder_held(folder, last.name)


def _folder_held(folder: Path, name: str = "") -> FolderHeld:
    who = f" ({name})" if name else ""
    return FolderHeld(
        f"{folder}: another unicrond runs on this state folder{who}; stop it first or choose another with --state-dir"
    )


def _begin_term(folder: Path, store: Store, last: Holder, leased: bool, stolen: bool) -> Claim:
    # Above what agents have seen, even if this is the log of a backup.
    number = max(last.number + 1, *(each + 1 for each in terms(folder)), int(time.time()))
    lock = lock_of(folder, number)
    if lock is None:
        raise FolderHeld(f"{folder}: another unicrond starts on this state folder")
    name, lease = f"{socket.gethostname()} process {os.getpid()}", LEASE_SECONDS if leased else 0.0
    try:
        store.begin_term(Holder(number, name, lease), last)
    except BaseException as error:
        os.close(lock)
        if isinstance(error, LogTakenOver):
            raise FolderHeld(str(error)) from None
        raise
    _sweep(folder, number)
    return Claim(store, lock, stolen, lease)


def held_terms(folder: Path) -> set[int]:
    """Return the terms whose locks are held, so whose controllers live. Raises UserError."""
    held = set()
    for number, path in _locks(folder):
        lock = _lock(path, fcntl.LOCK_SH, make=0)
        if lock is None:
            held.add(number)
        elif lock >= 0:
            os.close(lock)
    return held


def terms(folder: Path) -> list[int]:
    """Return the terms that have a file, whether its lock is held or not."""
    return [number for number, _ in _locks(folder)]


def lock_of(folder: Path, term: int) -> int | None:
    """Return a descriptor that holds the lock of a term, None while another process does. Raises UserError."""
    return _lock(folder / f"lock.{term}")


def _locks(folder: Path) -> list[tuple[int, Path]]:
    numbered = [(path.suffix[1:], path) for path in folder.glob("lock.*")]
    return [(int(number), path) for number, path in numbered if number.isdecimal()]


def _lock(path: Path, kind: int = fcntl.LOCK_EX, make: int = os.O_CREAT) -> int | None:
    """Return a descriptor that holds the lock, None while another process holds it, -1 without the file. Raises
    UserError."""
    try:
        descriptor = os.open(path, os.O_RDWR | make | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return -1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoom(f"{path}: {error.strerror}: make room") from None
        raise UserError(f"{path}: {error.strerror}; choose another folder with --state-dir") from None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise UserError(f"{path}: {error.strerror}: the state folder has to be on a file system with locks") from None
    return descriptor


def _sweep(folder: Path, number: int) -> None:
    """Remove the free locks of earlier terms."""
    for earlier, path in _locks(folder):
        if earlier < number and (lock := _lock(path, make=0)) is not None:
            path.unlink(missing_ok=True)
            if lock >= 0:
                os.close(lock)


class Tenure:
    """A controller's right to decide and act.

    Parameters
    ----------
    lease
        Seconds; 0 for the life of the process.
    now
        The clock.
    """

    def __init__(self, lease: float = 0.0, now: Callable[[], float] = clock) -> None:
        self.lease, self._now = lease, now
        self._until = float("-inf")  # end of the lease, moved on by a thread
        self._lost = ""  # the reason why it is over for good

    @property
    def valid(self) -> bool:
        """Whether the controller may act at this moment."""
        return not self._lost and (not self.lease or self._now() < self._until)

    def note_renewal(self, at: float) -> None:
        """Note that a renewal which began `at` has been written."""
        self._until = at + self.lease

    def end(self, reason: str) -> None:
        """End the right for good."""
        self._lost = self._lost or reason

    def assure(self) -> None:
        """Return at once if the controller may act, or wait for a late renewal. Raises LogTakenOver if the right is
        over."""
        until = self._now() + LOST_SECONDS
        while not self.valid:
            if self._lost or self._now() >= until:
                raise LogTakenOver(
                    self._lost or f"the log could not be written for {LOST_SECONDS:g} s: this unicrond ends"
                )
            time.sleep(0.01)


class Renewal:
    """Renews the lease of a term in a thread with its own connection to the log.

    Parameters
    ----------
    store
        The log with the term.
    tenure
        Is told of each renewal.
    each
        Called after each renewal.
    """

    def __init__(self, store: Store, tenure: Tenure, each: Callable[[], object]) -> None:
        self._path, self._term, self._tenure, self._each = store.path, store.term, tenure, each
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unicron-lease", daemon=True)
        began = clock()
        store.renew()  # the log was read meanwhile
        tenure.note_renewal(began)
        self._thread.start()

    def _run(self) -> None:
        store: Store | None = None
        late = False
        while not self._stop.wait(0.05 if late else RENEW_SECONDS):
            try:
                began = clock()
                if store is None:
                    store = Store(self._path, shared=True)
                    store.term = self._term
                store.renew()
                self._tenure.note_renewal(began)
                self._each()
                late = False
            except LogTakenOver as error:
                self._tenure.end(str(error))
                return
            except (StoreError, OSError) as error:
                if not late:
                    log.warning("the lease could not be renewed: %s", error)
                late = True
        if store is not None:
            store.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(LEASE_SECONDS)
