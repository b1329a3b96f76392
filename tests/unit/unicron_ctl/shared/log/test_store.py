"""The event log in SQLite, and what it can do without."""

from __future__ import annotations

import os
import pickle
import sqlite3
from pathlib import Path

import pytest

from unicron_ctl.controller.core.state_snapshot import read_state
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.log.store import (
    TAIL_BYTES,
    TAIL_ROWS,
    EventFilter,
    Holder,
    LogTakenOver,
    Store,
    StoreError,
)
from unicron_ctl.shared.log.thinning import KEPT_FIRST, KEPT_LAST
from unicron_detector.formats import LOG

STEP = records.Step(
    iteration=1, loss=1.0, seconds=0.5, ranks=2, nodes=2, flops=1e9, train_iterations=9, micro_batches=8, computed=8
)


def event(number: int, record: Record | None = None, job: str = "1") -> Event:
    return Event(number, 1000.0 + number, job, 0, record or records.WorldProved(reason="ü"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "events.sqlite")


def test_what_was_appended_is_there_after_a_crash(store: Store, tmp_path: Path) -> None:
    written = [event(1, records.ElementsAllotted(elements=[0, 2], leaving=[], reason="ü")), event(2, job="2")]
    store.append(written)
    again = Store(tmp_path / "events.sqlite")  # the first one is not closed: its process was killed
    assert list(again.replay()) == written
    assert [e.id for e in again.tail(after=1).events] == [2] and [
        e.id for e in again.tail(wanted=EventFilter(jobs=["1"])).events
    ] == [1]


def test_the_tail_gives_the_newest_without_a_start_and_the_next_with_one(store: Store) -> None:
    store.append([event(n) for n in range(1, 11)])
    assert [e.id for e in store.tail(limit=3).events] == [8, 9, 10]
    assert [e.id for e in store.tail(after=2, limit=3).events] == [3, 4, 5]


def test_time_goes_on_from_the_log_where_the_machines_clock_was_put_back(store: Store) -> None:
    assert store.time(950.0) == 950.0
    store.append([event(1), event(10)])
    assert [store.time(now) for now in (950.0, 1010.5, 1070.0)] == [1010.0, 1010.5, 1070.0]
    assert store.time(1010.0 - 4000.0) == 1010.0 - 4000.0  # it was the log that was wrong


def test_events_of_a_kind_are_found_without_reading_the_others(store: Store) -> None:
    """A week's log holds millions."""
    work = list[int]()
    store.append([event(n) for n in range(1, 20_001)] + [event(20_001, records.JobEnded(code=0))])
    store._db.set_progress_handler(lambda: work.append(1), 100)  # called once for so many steps of SQLite's machine
    assert [e.id for e in store.of_kinds((records.JobEnded, records.ActionObserved))] == [20_001]
    assert len(work) < 10


def test_a_batch_is_stored_whole_or_not_at_all(store: Store) -> None:
    store.append([event(1)])
    with pytest.raises(StoreError):
        store.append([event(2), event(1)])
    assert [e.id for e in store.replay()] == [1]


def test_a_damaged_and_a_locked_log_give_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "damaged.sqlite").write_bytes(b"not a database at all, but long enough to be looked at" * 40)
    with pytest.raises(StoreError, match="damaged"):
        Store(tmp_path / "damaged.sqlite")
    store = Store(tmp_path / "locked.sqlite")
    other = sqlite3.connect(tmp_path / "locked.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store._db.execute("PRAGMA busy_timeout=50")
    with pytest.raises(StoreError, match="locked by another process"):
        store.append([event(1)])
    other.execute("ROLLBACK")
    store.append([event(1)])


@pytest.mark.parametrize(("version", "who"), [(2, "an earlier release"), (99, "a later release")])
def test_the_log_of_another_release_is_refused_with_what_to_do(tmp_path: Path, version: int, who: str) -> None:
    other = sqlite3.connect(tmp_path / "events.sqlite")
    other.execute(f"PRAGMA user_version={version}")
    other.commit()
    with pytest.raises(StoreError) as caught:
        Store(tmp_path / "events.sqlite")
    message = str(caught.value)
    assert f"written by {who}" in message and "move it away" in message and "\n" not in message


def test_a_log_of_the_format_before_gets_this_one_with_the_next_term(tmp_path: Path) -> None:
    """Until then the release before may go on with it: a standby of this release has it open, too."""
    path = tmp_path / "events.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as opened:
        opened.execute(f"PRAGMA user_version={LOG.oldest}")
    store = Store(path)
    numbers = [opened.execute("PRAGMA user_version").fetchone()[0]]
    with pytest.raises(LogTakenOver):
        store.begin_term(Holder(5, "me"), Holder(4, "nobody"))
    numbers.append(opened.execute("PRAGMA user_version").fetchone()[0])
    store.begin_term(Holder(1, "me"), Holder())
    numbers.append(opened.execute("PRAGMA user_version").fetchone()[0])
    opened.close()
    store.close()
    assert numbers == [LOG.oldest, LOG.oldest, LOG.number] and LOG.oldest < LOG.number


def test_the_log_does_without_the_steps_of_an_undisturbed_run(store: Store) -> None:
    broken, entered = records.Break(number=1, lost=[]), records.GenerationEntered(members=2)
    story = [entered, *[STEP] * 100, broken, *[STEP] * 5, None, *[STEP] * 5]
    store.append([event(number, record, "1" if record else "2") for number, record in enumerate(story, 1)])
    assert store.thin() == 100 - KEPT_FIRST - KEPT_LAST
    left = [event.id for event in store.replay()]
    assert left[:4] == [1, 2, 3, 92] and left[-12:] == list(range(102, 114)), "of a short run, or the last ones: all"
    assert store.thin() == 0 and store.thin(50) == 0


def test_the_two_newest_states_are_kept(store: Store) -> None:
    assert store.states() == []
    store.append([event(1), event(2), event(3)])
    for number, state in ((1, b"first"), (2, b"older"), (3, b"newer"), (3, b"again")):
        store.save_state(number, state)
    assert store.states() == [(3, b"again"), (2, b"older")]


class Planted:
    """Whoever unpickles it runs what is in it."""

    def __init__(self, note: Path):
        self.note = note

    def __reduce__(self):
        return Path.touch, (self.note,)


@pytest.mark.parametrize("which", ["folder", "file", "owner"])
def test_a_state_that_others_may_have_written_is_not_run_and_said(tmp_path: Path, which: str, caplog, snapshot) -> None:
    folder = tmp_path / "state"
    store, note = Store(folder / "events.db"), tmp_path / "note"
    if which == "owner" and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    store.append([event(1)])
    store.save_state(1, pickle.dumps(Planted(note)))
    path = folder if which == "folder" else folder / "events.db"
    os.chown(path, 1000, -1) if which == "owner" else path.chmod(path.stat().st_mode | 0o020)
    assert read_state(store).last_event == 1 and not note.exists(), "nothing is ever unpickled"
    assert caplog.messages[0].replace(str(folder), "FOLDER") == snapshot
    pickle.loads(pickle.dumps(Planted(note)))
    assert note.exists(), "the test itself would see it"


def test_what_one_answer_loads_is_bounded(store: Store) -> None:
    """Defect: 5,000 plans of a large job are some GB."""
    large = records.WorldProved(reason="x" * (TAIL_BYTES // 4))
    store.append([event(n, large, str(n % 3)) for n in range(1, 41)])
    found = store.tail(limit=5000)
    assert [e.id for e in found.events] == [38, 39, 40] and found.cut
    later = store.tail(after=10, limit=5000, wanted=EventFilter(jobs=["0", "1"]))
    assert [e.id for e in later.events] == [12, 13, 15] and later.cut
    assert store.tail(after=38) == ([event(39, large, "0"), event(40, large, "1")], None)
    assert store.tail(wanted=EventFilter(jobs=[])) == ([], None)
    store.append([event(41, records.WorldProved(reason="x" * TAIL_BYTES))])
    (huge,) = store.tail(limit=1).events
    assert isinstance(huge.record, records.Unreadable) and "2.1 MB is too large" in huge.record.reason


@pytest.mark.parametrize("jobs", [None, ["1"]])
def test_what_one_answer_looks_at_is_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch, jobs: list[str] | None
) -> None:
    """Defect: what was left out was not counted, and one question went through a user's whole log."""
    rows, work = TAIL_ROWS // 20, list[int]()
    monkeypatch.setattr("unicron_ctl.shared.log.store.TAIL_ROWS", rows)
    last = 3 * rows
    store.append([event(1), *(event(n, STEP) for n in range(2, last)), event(last)])
    store._db.set_progress_handler(lambda: work.append(1), rows)  # called once for so many steps of SQLite
    newest = store.tail(wanted=EventFilter(jobs=jobs, without=["step"]))
    assert [e.id for e in newest.events] == [last] and newest.cut == (last - rows + 1, 1000.0 + newest.cut[0])
    assert len(work) < 20
    after = 1
    while (piece := store.tail(after, wanted=EventFilter(jobs=jobs, without=["step"]))).cut:
        assert not piece.events and piece.cut[0] == after + rows
        after = piece.cut[0]
    assert [e.id for e in piece.events] == [last]
