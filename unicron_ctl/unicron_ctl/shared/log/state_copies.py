"""Copies the state folder: one file with the log and the secret key (docs/head-node.md).

A copy is made while unicrond runs, and checked before it counts. The last record of a restored log marks it as such:
open requests to Slurm are dropped, and nothing in Slurm is changed until `unicronctl resume`, because nodes and
elements may have come and gone since.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import Holder, Store, StoreError
from unicron_ctl.shared.log.term import LOG_FILE, RESTORING, held_terms, lock_of, terms
from unicron_ctl.shared.protocol.encryption import SECRET_FILE, is_key
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.owner import as_owner
from unicron_ctl.shared.system.whole_file import write_whole

MOST_BYTES = 4 << 30  # of a file in a copy: a log has some 130 MB
MOST_KEY_BYTES = 4096
DAMAGED_LOGS, MOST_DAMAGED = "damaged", 5  # start of the names of folders with damaged logs, and their largest number
KEPT, DRAFT = "before-restore", ".restore-"  # start of the names of folders with the old and the new files
SKIPPED_IDS = 1_000_000  # if the replaced log cannot be read


class _SavedState(msgspec.Struct):
    """The part of a saved state that identifies it. Only unicrond knows the rest."""

    last_event: int


_state_decoder = msgspec.msgpack.Decoder(_SavedState)


@dataclass(frozen=True)
class Copy:
    """The content of a copy."""

    events: int  # their number
    last: int  # the last one's id
    at: float  # its time, seconds since the epoch
    key: bool  # the secret key is in it


def backup(folder: Path, target: Path) -> Copy:
    """Write a copy of the state folder to `target`, which must not exist. Raises UserError."""
    source = folder / LOG_FILE
    if not source.is_file():
        raise UserError(f"{source}: no such file: name unicrond's state folder with --state-dir, on its own host")
    if target.exists():
        raise UserError(f"{target} exists: name another file, or move it away")
    draft = target.with_name(f".{target.name}.new")
    with _in_one_line(target), tempfile.TemporaryDirectory(prefix="unicron-backup-", dir=target.parent) as place:
        log = Path(place) / LOG_FILE
        os.close(os.open(log, os.O_CREAT | os.O_WRONLY, 0o600))
        with contextlib.closing(sqlite3.connect(":memory:")) as read, _open_log(log) as copy:
            # As the folder's owner, because SQLite removes files that a crash has left beside a log; into memory,
            # because a controller with a lease cannot write meanwhile.
            with as_owner(folder):
                key = _key(folder)
                with _open_log(source) as live:
                    live.execute("PRAGMA busy_timeout=10000")
                    live.backup(read)
            read.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
        try:
            with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "w+b") as file:
                with tarfile.open(fileobj=file, mode="w") as bundle:
                    bundle.add(log, LOG_FILE)
                    if key is not None:
                        member = tarfile.TarInfo(SECRET_FILE)
                        member.size, member.mode, member.mtime = len(key), 0o600, time.time()
                        bundle.addfile(member, io.BytesIO(key))
                file.flush()
                os.fsync(file.fileno())
            with draft.open("rb") as written:
                content = _unpack(draft, written, Path(tempfile.mkdtemp(dir=place)))
            os.link(draft, target)  # unlike a rename it overwrites nothing
        finally:
            draft.unlink(missing_ok=True)
    return content


def replace_damaged(folder: Path, why: str) -> Path:
    """Put a new log in the place of a damaged one, and return the folder that keeps that.

    The new log begins with a record that says so. As after a restore, nothing in Slurm is changed until an admin allows
    it. Raises UserError, and leaves the folder as it is, while a unicrond runs on it, or if so many logs have been
    damaged that something else must be wrong.
    """
    log = folder / LOG_FILE
    if len(list(folder.glob(f"{DAMAGED_LOGS}-*"))) >= MOST_DAMAGED:
        raise UserError(
            f"{log}: damaged ({why}), as {MOST_DAMAGED} before it: see what is wrong with the disk, then remove "
            f"{folder}/{DAMAGED_LOGS}-*"
        )
    with _in_one_line(folder), _alone(folder) as term:
        kept = _fresh_folder(folder, DAMAGED_LOGS)
        with tempfile.TemporaryDirectory(prefix=DRAFT, dir=folder) as place:
            os.link(log, kept / LOG_FILE)
            for beside in folder.glob(f"{LOG_FILE}-*"):
                os.replace(beside, kept / beside.name)
            reason = (
                f"the log was damaged ({why}) and is kept in {kept.name}; this is a new one, and jobs are adopted. "
                "Nothing in Slurm is changed until `unicronctl resume`"
            )
            # The time is above all ids that others have seen: there is less than an event a second.
            _mark(Path(place) / LOG_FILE, 0, int(time.time()), log, term, 0.0, reason)
            os.replace(Path(place) / LOG_FILE, log)
        _sync(folder)
    return kept


def _key(folder: Path) -> bytes | None:
    """Read the secret key of a state folder; None for auth = "none", which has no key. Raises OSError."""
    try:
        descriptor = os.open(folder / SECRET_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MOST_KEY_BYTES)


def restore(file: Path, folder: Path) -> tuple[Copy, Path | None]:
    """Put the copy into the state folder. Returns it, and the folder that keeps the old files, None if there were none.

    If it is interrupted while it exchanges files, no unicrond starts on them, and a second call finishes the work.
    Raises UserError, and leaves the folder as it is, while a unicrond runs on it, or for a damaged copy.
    """
    with _in_one_line(folder), contextlib.ExitStack() as stack:
        with _in_one_line(file):
            source = stack.enter_context(file.open("rb"))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stack.enter_context(as_owner(folder))
        term = stack.enter_context(_alone(folder))
        for left in folder.glob(f"{DRAFT}*"):  # of a restore that was killed
            shutil.rmtree(left, ignore_errors=True)
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix=DRAFT, dir=folder))
        fresh = Path(place)
        content = _unpack(file, source, fresh)
        made_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(content.at))
        reason = (
            f"the log was restored from a backup of {made_at}; what came later is not in it. Nothing in Slurm is "
            "changed until `unicronctl resume`"
        )
        _mark(fresh / LOG_FILE, content.last, content.last + SKIPPED_IDS, folder / LOG_FILE, term, content.at, reason)
        mark = folder / RESTORING
        write_whole(mark, str(file.absolute()))
        _sync(folder)
        kept = _set_aside(folder, fresh)
        for name in os.listdir(fresh):
            os.replace(fresh / name, folder / name)
        _sync(folder)
        mark.unlink()
        _sync(folder)
    return content, kept


@contextlib.contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Turn OSError into UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror or error}") from None


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=10.0)) as log:
        try:
            yield log
        except sqlite3.Error as error:
            raise UserError(f"{path}: {error}: is this a log of unicrond, and may you write to its folder?") from None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Keep every unicrond from starting on the folder; give the number of a term above all before."""
    if held_terms(folder):
        raise UserError(f"{folder}: a unicrond runs on this state folder, here or on another host: stop it first")
    term = max([*terms(folder), int(time.time())]) + 1
    lock = lock_of(folder, term)
    try:
        if lock is None or held_terms(folder) != {term}:
            raise UserError(f"{folder}: a unicrond starts on this state folder: stop it first")
        yield term
    finally:
        if lock is not None:
            os.close(lock)


def _unpack(file: Path, opened: BinaryIO, place: Path) -> Copy:
    """Unpack a copy and check all of it. file: its name. Raises UserError."""
    try:
        with tarfile.open(fileobj=opened, mode="r:") as bundle:
            members = {member.name: member for member in bundle.getmembers()}
            for name in (LOG_FILE, SECRET_FILE):
                member = members.get(name)
                if member is None:
                    continue
                source = bundle.extractfile(member) if member.isreg() else None
                if source is None or member.size > MOST_BYTES:
                    raise UserError(f"{file}: {name} in it is no file of a state folder")
                with os.fdopen(os.open(place / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
                    shutil.copyfileobj(source, out)
                    out.flush()
                    os.fsync(out.fileno())
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{file}: not a backup of `unicronctl backup` ({error})") from None
    if not (place / LOG_FILE).is_file():
        raise UserError(f"{file}: not a backup of `unicronctl backup`: no {LOG_FILE} in it")
    key = place / SECRET_FILE
    if key.is_file() and not is_key(key.read_text(errors="replace").strip()):
        raise UserError(f"{file}: the key in it is damaged")
    return _examine(file, place / LOG_FILE, key.is_file())


def _examine(file: Path, log: Path, key: bool) -> Copy:
    """Check a log by reading all of it. Raises UserError."""
    with _open_log(log) as db:
        verdict = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if verdict != "ok":
            raise UserError(f"{file}: the log in it is damaged ({verdict})")
    store = Store(log, shared=True)  # leaves no other file behind
    try:
        last, at, count = 0, 0.0, 0
        for event in store.replay():
            last, at, count = event.id, event.time, count + 1
        for number, state in store.states():
            if (event_of_state := _state_decoder.decode(state).last_event) != number:
                raise StoreError(f"the state in it at event {number} is of event {event_of_state}")
            last = max(last, number)
    except StoreError as error:
        raise UserError(f"{file}: {error}") from None
    except msgspec.MsgspecError as error:
        raise UserError(f"{file}: the state in its log cannot be read ({error})") from None
    finally:
        store.close()
    (log.with_name(f"{log.name}-journal")).unlink(missing_ok=True)
    return Copy(count, last, at, key)


def _mark(log: Path, mine: int, unseen: int, replaced: Path, term: int, taken: float, reason: str) -> None:
    """Append the record that marks the log, with an id and a term above those that others have seen. mine: the log's
    last id. unseen: the id to go on from if the replaced log cannot be read."""
    before, last = Holder(), unseen
    if replaced.is_file():
        with contextlib.suppress(UserError, sqlite3.Error), _open_log(replaced) as db:
            last = max(mine, db.execute("SELECT max(id) FROM event").fetchone()[0] or 0)
            row = db.execute("SELECT number, holder, lease, beat FROM term").fetchone()
            before = Holder(*row) if row else before
    store = Store(log, shared=True)
    try:
        holder = store.holder()
        number = max(term, before.number + 1, holder.number + 1)
        store.begin_term(Holder(number, "unicronctl restore"), holder)
        now = max(time.time(), taken)
        store.append([Event(last + 1, now, "", 0, records.LogRestored(taken=taken, reason=reason))])
    finally:
        store.close()
    log.with_name(f"{log.name}-journal").unlink(missing_ok=True)


def _set_aside(folder: Path, fresh: Path) -> Path | None:
    """Move the folder's files, except locks, into a new folder in it."""
    old = [
        path
        for path in folder.iterdir()
        if path != fresh and not path.name.startswith((KEPT, "lock.", DRAFT, RESTORING, "standby"))
    ]
    if not old:
        return None
    kept = _fresh_folder(folder, KEPT)
    for path in old:
        os.replace(path, kept / path.name)
    _sync(kept)
    return kept


def _fresh_folder(folder: Path, prefix: str) -> Path:
    name = f"{prefix}-{time.strftime('%Y%m%dT%H%M%S')}"
    if same := len(list(folder.glob(f"{name}*"))):  # made in the same second
        name += f".{same}"
    kept = folder / name
    kept.mkdir(mode=0o700)
    return kept


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
