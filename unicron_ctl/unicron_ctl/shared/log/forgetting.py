"""Finds the records that `Store.forget` may delete. It reads the log in pages, so that nothing waits long for it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.thinning import Retention

FORGET_RECORDS = 1000  # in one page


def aged(
    db: sqlite3.Connection, kind: str, kept: Retention, upto: int, before: float
) -> Iterator[tuple[int, int] | None]:
    """Yields (id, bytes) of each record of a kind that may be deleted, and None for one that stays."""
    if kept.last_of_node:
        yield from aged_but_last(db, kind, upto, before)
        return
    for number, time, length in pages(db, "time, length(payload)", "kind = ? AND id <= ?", (kind, upto)):
        if time >= before:
            return
        yield number, length


def aged_but_last(db: sqlite3.Connection, kind: str, upto: int, before: float) -> Iterator[tuple[int, int] | None]:
    """Yields the same for a kind whose last record of each node stays."""
    latest: dict[str, tuple[int, int] | None] = {}
    for number, time, payload in pages(db, "time, payload", "kind = ?", (kind,)):
        node = str(getattr(records.decode(kind, payload), "node", ""))
        yield latest.get(node)
        latest[node] = (number, len(payload)) if time < before and number <= upto else None


def oldest(db: sqlite3.Connection, upto: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (id, bytes) of the oldest records, up to `size` bytes in all."""
    for number, length in pages(db, "length(payload)", "id <= ?", (upto,)):
        if size <= 0:
            return
        size -= length
        yield number, length


def used_bytes(db: sqlite3.Connection) -> int:
    """Return the bytes of the log without the free pages of its file."""
    return _pragma(db, "page_count") * _pragma(db, "page_size") - free_bytes(db)


def free_bytes(db: sqlite3.Connection) -> int:
    return _pragma(db, "freelist_count") * _pragma(db, "page_size")


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def pages(db: sqlite3.Connection, what: str, where: str, values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yields (id, *columns) of the records, oldest first. The caller may delete them meanwhile."""
    after = 0
    query = f"SELECT id, {what} FROM event WHERE {where} AND id > ? ORDER BY id LIMIT {FORGET_RECORDS}"
    while rows := db.execute(query, (*values, after)).fetchall():
        yield from rows
        if len(rows) < FORGET_RECORDS:
            return
        after = rows[-1][0]
