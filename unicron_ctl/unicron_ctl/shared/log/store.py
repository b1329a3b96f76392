"""Keeps the event log in SQLite: all decisions in order (docs/design/event-log.md)."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import sqlite3
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from unicron_ctl.shared.log import forgetting, records
from unicron_ctl.shared.log.forgetting import FORGET_RECORDS
from unicron_ctl.shared.log.naming import nodes_of
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.log.thinning import POLICIES, redundant
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.formats import LOG

BUSY_SECONDS = 2.0
PEEK_SECONDS = 0.2
BRIDGED_SECONDS = 3600.0  # by which a clock that was set back is corrected
FORGET_BYTES = 8 << 20  # deleted at once; with FORGET_RECORDS it takes some 30 ms
LARGEST_BYTES = 128 << 20  # of the log: above it, records older than both states go, whatever their kind
FREE_BYTES = 32 << 20  # unused in the file: above it, the file shrinks
STATES = 2  # saved states; the log can be folded on from each
TAIL_BYTES = 2 << 20  # of records in one answer, which fits into a message as MessagePack with all defaults
SINCE_RECORDS, SINCE_BYTES = 5000, 8 << 20  # in one answer of `since`: some 100 ms
TAIL_ROWS = 20_000  # examined for one answer: some 80 ms
READ_COUNTS = 4  # a row whose record is read counts as so many

LASTING = (
    records.JobRegistered,
    records.JobReallocated,
    records.Break,
    records.PlanMade,
    records.Offer,
    records.GenerationAdopted,
    records.NumberUsed,
    records.JobEnded,
    records.SlurmAction,
)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS event (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    job TEXT NOT NULL,
    generation INTEGER NOT NULL,
    kind TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS event_job ON event (job, id);
CREATE INDEX IF NOT EXISTS event_kind ON event (kind, id);
CREATE TABLE IF NOT EXISTS state (event INTEGER PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS term (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    number INTEGER NOT NULL,
    holder TEXT NOT NULL,
    lease REAL NOT NULL,
    beat INTEGER NOT NULL
);
"""
_HOLDER = "SELECT number, holder, lease, beat FROM term"


_TEXTS = re.compile(rb'"([^"\\]{1,255})"')  # strings in JSON; node names need no escapes
Progress = Callable[[], object]
PROGRESS_EVERY = 500  # records
T = TypeVar("T")


def nothing() -> None:
    """Reports no progress."""


def with_progress(rows: Iterable[T], progress: Progress) -> Iterator[T]:
    """Yield all rows, and call `progress` before each PROGRESS_EVERY of them."""
    for count, one in enumerate(rows):
        if not count % PROGRESS_EVERY:
            progress()
        yield one


class StoreError(UserError):
    """The log cannot be read or written; the text is one line and says what to do."""


class LogLocked(StoreError):
    """Another process is in the middle of a transaction."""


class LogDamaged(StoreError):
    """The file is not as SQLite wrote it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: damaged ({why}): move it away and start again")
        self.path = path
        self.why = why  # SQLite's message


class NoRoom(StoreError):
    """The disk is full, which may pass."""


class LogTakenOver(StoreError):
    """Another controller has taken the log over: this one must not decide or send anything more."""


class Holder(NamedTuple):
    """The controller that has the log."""

    number: int = 0  # of its term; a later controller has a higher one
    name: str = ""  # its host and process
    lease: float = 0.0  # seconds after a renewal for which it may act; 0 if its term only ends with its process
    beat: int = 0  # counts its renewals


class Tail(NamedTuple):
    """A piece of the log."""

    events: list[Event]
    cut: tuple[int, float] | None
    """If one answer could not take all: id and time of the event up to which the log was read."""


@dataclass(frozen=True)
class EventFilter:
    """Selects events."""

    jobs: Collection[str] | None = None  # of these jobs ("" for events of no job); None for all
    kinds: Collection[str] = ()  # of these kinds; empty for all
    without: Collection[str] = ()  # of none of these kinds
    nodes: Collection[str] | None = None  # events that name one of these nodes; None for all
    nodes_of_no_job: Collection[str] | None = None  # the same for events of no job; None for the same nodes
    since: float = 0.0  # seconds since the epoch
    before: int = 0  # events with a smaller id; 0 for all

    def has_kind(self, kind: str) -> bool:
        """Whether the filter selects events of this kind."""
        return kind not in self.without and (not self.kinds or kind in self.kinds)

    def names(self, job: str) -> Collection[str] | None:
        """Return the nodes of which an event of the job has to name one; None for any."""
        return self.nodes if job or self.nodes_of_no_job is None else self.nodes_of_no_job


ALL = EventFilter()


class Store:
    """The log, with one writer, the controller; others may read the same file. Raises StoreError.

    Parameters
    ----------
    path
        The file, which is made if it is not there.
    shared
        Several hosts may have mounted the file. Its journal then needs no shared memory (so not WAL), and each
        transaction is on the disk when it ends.
    """

    def __init__(self, path: str | Path, shared: bool = False) -> None:
        self.path, self._shared = Path(path), shared
        self.term = 0  # of this controller
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # has an effect only in a new file
            self._set_journal("persist" if shared else "wal")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version and LOG.refusal(version):
                raise StoreError(
                    f"{self.path}: written by {'an earlier' if version < LOG.oldest else 'a later'} release "
                    f"(format {version}, this one reads {LOG.number}): move it away and start again, "
                    "its jobs run on unprotected; or go back to that release"
                )
            self._db.executescript(_SCHEMA)
            if not version:
                self._db.execute(f"PRAGMA user_version={LOG.number}")
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}: choose another state_dir") from None
        except sqlite3.Error as error:
            raise _store_error(self.path, error) from None

    def _set_journal(self, mode: str) -> None:
        """Set the journal mode. Raises StoreError if another program has the file open in another mode."""
        answer = self._db.execute(f"PRAGMA journal_mode={mode}").fetchone()[0]
        if answer != mode:
            raise StoreError(f"{self.path}: its journal stays {answer!r}: does another program have it open?")

    def holder(self) -> Holder:
        """Return the log's holder; Holder() if it had none yet."""
        try:
            row = self._db.execute(_HOLDER).fetchone()
        except sqlite3.Error as error:
            raise _store_error(self.path, error) from None
        return Holder(*row) if row else Holder()

    def begin_term(self, fresh: Holder, last: Holder) -> None:
        """Give the log to `fresh` if `last` still has it; the last holder can write no more. Raises LogTakenOver."""
        with self._transaction(lasting=True, checked=False):
            if self.holder() != last:
                raise LogTakenOver(f"{self.path}: another unicrond has just taken it over")
            self._db.execute("INSERT OR REPLACE INTO term VALUES (1, ?, ?, ?, ?)", fresh)
            self._db.execute(f"PRAGMA user_version={LOG.number}")  # a log of the release before goes on in this one's
        self.term = fresh.number

    def renew(self) -> None:
        """Count one renewal of the lease. Raises LogTakenOver if another controller has the log by now."""
        with self._transaction():
            self._db.execute("UPDATE term SET beat = beat + 1")

    def append(self, events: Sequence[Event]) -> None:
        """Store the events in one transaction: all of them or none.

        A crash of the process loses nothing. A crash of the machine loses at most the last moments, but no LASTING
        event, which is on the disk before agents or Slurm hear of it.
        """
        if not events:
            return
        rows = ((e.id, e.time, e.job, e.generation, e.kind, e.payload) for e in events)
        lasting = any(isinstance(event.record, LASTING) for event in events)
        with self._transaction(lasting):
            self._db.executemany("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?)", rows)

    def thin(self, after: int = 0, progress: Progress = nothing) -> int:
        """Delete the steps above the id `after` that no restart needs, and return how many. The file keeps its size and
        reuses the room."""
        rows = self._db.execute("SELECT id, job, kind FROM event WHERE id > ? ORDER BY id", (after,))
        try:
            doomed = redundant(with_progress(rows, progress))
        except sqlite3.Error as error:
            raise _store_error(self.path, error) from None
        if doomed:
            with self._transaction():
                self._db.executemany("DELETE FROM event WHERE id = ?", ((number,) for number in doomed))
        return len(doomed)

    def forget(self, now: float, summed: int) -> Generator[int, None, None]:
        """Delete records whose retention (`thinning.POLICIES`) is over, and the oldest ones above LARGEST_BYTES, but
        none after the older saved state. Then return free pages to the disk.

        now: seconds since the epoch. summed: id of the last event in the weekly sum. Each step deletes a piece that
        takes little time, and yields the number of records in it.
        """
        states = self._db.execute("SELECT event FROM state ORDER BY event DESC").fetchall()
        if len(states) < STATES:  # a single one may be damaged
            return
        upto = states[-1][0]
        try:
            for kind, kept in POLICIES.items():
                last = min(upto, summed) if kept.summed else upto
                yield from self._in_pieces(forgetting.aged(self._db, _tag(kind), kept, last, now - kept.seconds))
            over = forgetting.used_bytes(self._db) - LARGEST_BYTES
            if over > 0:
                yield from self._in_pieces(forgetting.oldest(self._db, upto, over))
            while forgetting.free_bytes(self._db) > FREE_BYTES:
                with self._transaction():
                    self._db.execute(f"PRAGMA incremental_vacuum({FORGET_RECORDS})").fetchall()
                yield 0
        except sqlite3.Error as error:
            raise _store_error(self.path, error) from None

    def _in_pieces(self, rows: Iterator[tuple[int, int] | None]) -> Generator[int, None, None]:
        """Delete records in pieces. rows: (id, bytes), or None for a record that stays."""
        doomed, size, looked = list[tuple[int]](), 0, 0
        for one in rows:
            looked += 1
            if one is not None:
                doomed.append((one[0],))
                size += one[1]
            if looked >= FORGET_RECORDS or size > FORGET_BYTES:
                self._delete(doomed)
                yield len(doomed)
                doomed, size, looked = [], 0, 0
        if doomed:
            self._delete(doomed)
            yield len(doomed)

    def _delete(self, doomed: Sequence[tuple[int]]) -> None:
        if doomed:
            with self._transaction():
                self._db.executemany("DELETE FROM event WHERE id = ?", doomed)

    def replay(self, after: int = 0) -> Iterator[Event]:
        """Return all events with an id above `after`, oldest first."""
        return self._select("SELECT * FROM event WHERE id > ? ORDER BY id", (after,))

    def of_kinds(self, kinds: Iterable[type[Record]], after: int = 0) -> Iterator[Event]:
        """Return the events of these kinds with an id above `after`, oldest first."""
        names = tuple(_tag(kind) for kind in kinds)
        marks = ", ".join("?" * len(names))
        return self._select(f"SELECT * FROM event WHERE id > ? AND kind IN ({marks}) ORDER BY id", (after, *names))

    def since(
        self, kinds: Iterable[type[Record]], time: float, jobs: Set[str] | None = None, limit: int = SINCE_RECORDS
    ) -> Tail:
        """Return the events of these kinds, of these jobs or all, since `time` (seconds since the epoch), oldest first:
        at most the newest `limit` and SINCE_BYTES of them, among the newest TAIL_ROWS."""
        query = "SELECT id, time, job, length(payload) FROM event WHERE kind = ? ORDER BY id DESC"
        cursors = [self._db.execute(query, (_tag(kind),)) for kind in kinds]
        chosen, size = list[tuple[int, int]](), 0
        cut: tuple[int, float] | None = None
        try:
            for looked, (number, at, job, length) in enumerate(heapq.merge(*cursors, key=lambda row: -row[0])):
                if at < time:
                    break
                counts = jobs is None or job in jobs
                size += length if counts else 0
                if looked >= TAIL_ROWS or size > SINCE_BYTES or (counts and len(chosen) >= limit):
                    cut = number, at
                    break
                if counts:
                    chosen.append((number, length))
        except sqlite3.Error as error:
            raise _store_error(self.path, error) from None
        finally:
            for cursor in cursors:
                cursor.close()
        return Tail([self._event(number, length) for number, length in reversed(chosen)], cut)

    def save_state(self, event: int, state: bytes) -> None:
        """Save the state after that event, and keep the state saved before it. A start replays only later events, and
        no start needs the log before the older state."""
        with self._transaction(lasting=True):
            self._db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (event, state))
            newest = f"SELECT event FROM state ORDER BY event DESC LIMIT {STATES}"
            self._db.execute(f"DELETE FROM state WHERE event NOT IN ({newest})")

    def states(self) -> list[tuple[int, bytes]]:
        """Return (event, state) of the saved states, the newest first."""
        try:
            rows = self._db.execute("SELECT event, state FROM state ORDER BY event DESC").fetchall()
        except sqlite3.Error as error:
            raise _store_error(self.path, error) from None
        return [(int(event), bytes(state)) for event, state in rows]

    def open_to_others(self) -> str:
        """Return why others may have written the log, and what to do; empty if nobody else can."""
        for path in (self.path.parent, self.path):
            try:
                status = path.stat()
            except OSError as error:
                return f"{path}: {error.strerror}"
            if status.st_uid not in (0, os.geteuid()):
                return f"{path} belongs to uid {status.st_uid}: it has to be root's or unicrond's own"
            if status.st_mode & 0o022:
                return f"others can write {path}: `chmod go-w {path}`"
        return ""

    def tail(self, after: int = 0, limit: int = 1000, wanted: EventFilter = ALL) -> Tail:
        """Return the wanted events with an id above `after`, oldest first, or with after = 0 the newest ones: at most
        `limit`, TAIL_BYTES, and those among TAIL_ROWS, so that a cut answer may hold none.

        :class:`records.Unreadable` stands for a record of more than TAIL_BYTES.
        """
        chosen, size, looked = list[Event](), 0, 0
        read, cut = (after, 0.0), False
        with contextlib.closing(self._rows(after, wanted)) as rows:
            for number, time, job, kind, length, payload in rows:
                names = wanted.names(job)
                counts = wanted.has_kind(kind) and time >= wanted.since
                looked += READ_COUNTS if counts and names is not None else 1
                if cut := looked > TAIL_ROWS:
                    break
                if counts and (names is None or _names_one(kind, payload, names)):
                    size += length if length <= TAIL_BYTES else 0
                    if cut := size > TAIL_BYTES:
                        break
                    chosen.append(self._event(number, length))
                read = number, time
                if len(chosen) >= limit:
                    break
        return Tail(chosen if after else chosen[::-1], read if cut else None)

    def _rows(self, after: int, wanted: EventFilter) -> Generator[tuple[int, float, str, str, int, bytes], None, None]:
        """Yields (id, time, job, kind, bytes, record) of the events of the wanted jobs, or else kinds: oldest first, or
        newest first with after = 0. The record is empty if it need not be read, or has more than TAIL_BYTES."""
        of_nodes = wanted.nodes is not None or wanted.nodes_of_no_job is not None
        record = f"CASE WHEN length(payload) <= {TAIL_BYTES} THEN payload ELSE x'' END" if of_nodes else "x''"
        what = f"SELECT id, time, job, kind, length(payload), {record} FROM event WHERE id > ? AND id < ?"
        column, values = ("job", wanted.jobs) if wanted.jobs is not None else ("kind", wanted.kinds or None)
        what += f" AND {column} = ?" if values is not None else ""
        what += f" ORDER BY id {'ASC' if after else 'DESC'}"
        cursors = list[sqlite3.Cursor]()
        try:
            span = max(after, self._first_since(wanted.since) - 1), wanted.before or 2**63 - 1
            for value in [()] if values is None else [(value,) for value in values]:
                cursors.append(self._db.execute(what, (*span, *value)))
            yield from heapq.merge(*cursors, reverse=not after)
        except sqlite3.Error as error:
            raise _store_error(self.path, error) from None
        finally:
            for cursor in cursors:
                cursor.close()

    def _first_since(self, since: float) -> int:
        """Return the id of the first event that is not older, found by bisection: ids and times rise together, unless
        the clock is set back by more than an hour."""
        if not since:
            return 0
        low, high = 0, self._db.execute("SELECT COALESCE(MAX(id), -1) + 1 FROM event").fetchone()[0]
        while low < high:
            middle = (low + high) // 2
            query = "SELECT id, time FROM event WHERE id >= ? ORDER BY id"
            number, time = self._db.execute(query, (middle,)).fetchone()
            low, high = (low, middle) if time >= since else (number + 1, high)
        return int(low)

    def _event(self, number: int, length: int) -> Event:
        if length <= TAIL_BYTES:
            return next(self._select("SELECT * FROM event WHERE id = ?", (number,)))
        query = "SELECT time, job, generation, kind FROM event WHERE id = ?"
        time, job, generation, kind = self._db.execute(query, (number,)).fetchone()
        reason = f"a record {kind!r} of {length / 1e6:.1f} MB is too large to be shown"
        return Event(number, time, job, generation, records.Unreadable(of=kind, reason=reason))

    def time(self, now: float) -> float:
        """Return `now`, in seconds since the epoch, or the last event's time if the clock was set back since then by up
        to an hour, so that delayed actions do not wait for the clock again."""
        last = max((event.time for event in self.tail(limit=1).events), default=now)
        return last if now < last <= now + BRIDGED_SECONDS else now

    @property
    def size(self) -> int:
        """Bytes of the log's files."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self, lasting: bool = False, checked: bool = True) -> Iterator[None]:
        """Write all statements within it, or none. lasting: they are on the disk when it ends. checked: raise
        LogTakenOver if another controller has the log."""
        try:
            self._db.execute(f"PRAGMA synchronous={'FULL' if lasting or self._shared else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            if checked and (holder := self.holder()).number != self.term:
                raise LogTakenOver(f"{self.path}: {holder.name} has taken it over: this unicrond ends")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise _store_error(self.path, error) from None
        finally:
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # the first error counts
                    self._db.execute("ROLLBACK")

    def _select(self, query: str, values: tuple[Any, ...]) -> Iterator[Event]:
        try:
            for id_, time, job, generation, kind, payload in self._db.execute(query, values):
                yield Event(id_, time, job, generation, records.decode(kind, payload))
        except (sqlite3.Error, ValueError) as error:
            raise _store_error(self.path, error) from None


def _names_one(kind: str, payload: bytes, names: Collection[str]) -> bool:
    """Whether the record names one of these nodes. Most records have no such text, and need not be decoded."""
    if not any(word.decode(errors="replace") in names for word in _TEXTS.findall(payload)):
        return False
    return any(name in names for name in nodes_of(records.decode(kind, payload)))


def peek(path: Path) -> Holder | None:
    """Return the holder of a log that this host has not opened; None if there is no log, it is being written, or its
    journal is WAL, which serves only one host."""
    try:
        with path.open("rb") as file:
            if file.read(20)[18:] != b"\x01\x01":  # the versions of its format: 2 is WAL
                return None
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", PEEK_SECONDS, uri=True)) as db:
            row = db.execute(_HOLDER).fetchone()
    except (OSError, sqlite3.Error):
        return None
    return Holder(*row) if row else Holder()


def _tag(kind: type[Record]) -> str:
    return str(kind.__struct_config__.tag)


def _store_error(path: Path, error: Exception) -> StoreError:
    text = str(error)
    if "locked" in text or "busy" in text:
        return LogLocked(f"{path}: locked by another process: is another unicrond running on this state_dir?")
    if "full" in text:
        return NoRoom(f"{path}: the disk is full: make room, nothing that was decided is lost")
    if "malformed" in text or "not a database" in text or isinstance(error, ValueError):
        return LogDamaged(path, text)
    return StoreError(f"{path}: {text}")
