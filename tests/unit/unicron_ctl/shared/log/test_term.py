"""Terms of controllers: at most one may write and act, whatever dies, hangs or wakes up."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from unicron_ctl.shared.log import forgetting, records, term
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import Holder, LogTakenOver, Store, peek
from unicron_ctl.shared.log.term import LEASE_SECONDS, STANDS_STILL, Claim, FolderHeld, Renewal, Tenure, Watch, claim
from unicron_ctl.shared.system.errors import UserError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def event(number: int) -> Event:
    return Event(number, 1000.0 + number, "1", 0, records.WorldProved(reason=""))


def held(folder: Path, *leased: bool, watch: Watch | None = None) -> None:
    """Nobody else can begin a term on the folder."""
    for lease in leased:
        with pytest.raises(FolderHeld):
            claim(folder, lease, watch)


def frozen(first: Claim, watch: Watch, clock: Clock, folder: Path) -> Claim:
    """The claim of a standby after the holder of `first` has done nothing for a lease and a fifth."""
    held(folder, True, watch=watch)
    clock.now += LEASE_SECONDS * STANDS_STILL - 0.1
    held(folder, True, watch=watch)
    clock.now += 0.2
    return claim(folder, True, watch)


def test_two_on_one_state_folder(tmp_path: Path) -> None:
    first = claim(tmp_path / "state", False)
    held(tmp_path / "state", False, True)
    first.close()
    second = claim(tmp_path / "state", False)
    assert second.store.term > first.store.term and not second.stolen
    second.close()


def test_a_term_is_higher_than_any_before_even_from_the_log_of_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = list[int]()
    for now in (1e9, 1e9, 0.9e9, 1.1e9):  # twice in a second, and with the clock put back
        monkeypatch.setattr(time, "time", lambda now=now: now)
        made = claim(tmp_path, False)
        numbers.append(made.store.term)
        made.close()
    assert numbers == [10**9, 10**9 + 1, 10**9 + 2, 11 * 10**8]


def test_only_the_last_lock_is_left(tmp_path: Path) -> None:
    for _ in range(3):
        claim(tmp_path, True).close()
    assert len(list(tmp_path.glob("lock.*"))) == 1


def test_a_controller_without_a_lease_is_never_taken_over_while_it_lives(tmp_path: Path) -> None:
    clock = Clock()
    watch, first = Watch(clock), claim(tmp_path, False)
    for _ in range(3):
        clock.now += 1000.0
        held(tmp_path, True, watch=watch)
    first.close()
    claim(tmp_path, True, watch).close()


def test_a_frozen_controller_is_taken_over_and_can_write_nothing_more(tmp_path: Path) -> None:
    clock = Clock()
    first = claim(tmp_path, True)
    first.store.append([event(1)])
    second = frozen(first, Watch(clock), clock, tmp_path)
    assert second.stolen and second.store.term > first.store.term
    for write in (
        lambda: first.store.append([event(2)]),
        lambda: first.store.save_state(1, b"x"),
        lambda: first.store.renew(),
        lambda: first.store.begin_term(Holder(first.store.term + 1), Holder(first.store.term)),
    ):
        with pytest.raises(LogTakenOver):
            write()
    second.store.append([event(2)])
    assert [e.id for e in second.store.replay()] == [1, 2] and second.store.states() == []
    first.close()
    second.close()


def test_a_lease_that_is_renewed_is_not_over(tmp_path: Path) -> None:
    clock = Clock()
    watch, first = Watch(clock), claim(tmp_path, True)
    for _ in range(5):
        clock.now += LEASE_SECONDS
        first.store.renew()
        held(tmp_path, True, watch=watch)
    first.close()


def test_the_end_of_a_frozen_controller_frees_nothing_of_the_next_ones(tmp_path: Path) -> None:
    """It was taken over; when its process ends, its lock is free, but the term is another's."""
    clock = Clock()
    first = claim(tmp_path, True)
    second = frozen(first, Watch(clock), clock, tmp_path)
    first.close()
    held(tmp_path, True)
    second.store.append([event(1)])
    second.close()


def test_a_log_that_was_exchanged_under_a_living_controller_is_not_begun(tmp_path: Path) -> None:
    first = claim(tmp_path, False)
    for file in tmp_path.glob("events.sqlite*"):
        file.rename(tmp_path / f"old-{file.name}")
    held(tmp_path, False, True)
    first.close()
    claim(tmp_path, False).close()


@pytest.mark.parametrize("leased", [False, True])
def test_a_controller_with_a_higher_term_than_its_log_says_is_not_disturbed(tmp_path: Path, leased: bool) -> None:
    """Somebody has put an older log in its place by hand: its holder there ended long ago, and this one lives."""
    claim(tmp_path, True).close()
    older = (tmp_path / term.LOG_FILE).read_bytes()
    first = claim(tmp_path, True)
    (tmp_path / "old").write_bytes(older)
    (tmp_path / "old").rename(tmp_path / term.LOG_FILE)
    held(tmp_path, leased, leased)
    first.close()
    found = claim(tmp_path, leased)
    assert found.store.term > first.store.term
    found.close()


def test_of_two_that_claim_at_once_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other comes in at the worst moment: when the locks have been looked at."""
    others = list[Claim]()
    real = term.held_terms

    def looked(folder: Path) -> set[int]:
        found = real(folder)
        if not others and (folder / term.LOG_FILE).exists():
            monkeypatch.setattr(term, "held_terms", real)
            others.append(claim(folder, True))
        return found

    monkeypatch.setattr(term, "held_terms", looked)
    with pytest.raises(FolderHeld):
        claim(tmp_path, True)
    others[0].store.append([event(1)])
    others[0].close()


def test_a_log_for_several_hosts_has_no_wal_and_keeps_what_it_has(tmp_path: Path) -> None:
    alone = claim(tmp_path, False)
    alone.store.append([event(1)])
    alone.close()
    shared = claim(tmp_path, True)
    assert forgetting._pragma(shared.store._db, "synchronous") == 2 and not (tmp_path / "events.sqlite-wal").exists()
    assert [e.id for e in shared.store.replay()] == [1]
    assert peek(tmp_path / "events.sqlite") == shared.store.holder()
    shared.close()
    claim(tmp_path, False).close()
    assert peek(tmp_path / "events.sqlite") is None, "WAL is for one host"
    assert peek(tmp_path / "none") is None


def test_the_right_to_act_ends_with_the_lease_and_comes_back_with_a_renewal() -> None:
    clock = Clock()
    tenure = Tenure(2.5, clock)
    assert not tenure.valid, "before the first renewal"
    tenure.note_renewal(clock.now)
    clock.now += 2.4
    assert tenure.valid
    clock.now += 0.2
    assert not tenure.valid
    tenure.note_renewal(clock.now)
    tenure.assure()
    tenure.end("taken over by n2")
    with pytest.raises(LogTakenOver, match="n2"):
        tenure.assure()
    assert Tenure().valid


def test_who_cannot_renew_for_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(clock, "now", clock.now + 1.0))
    with pytest.raises(LogTakenOver, match="could not be written"):
        Tenure(2.5, clock).assure()


def test_a_renewal_ends_the_right_to_act_when_another_has_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(term, "RENEW_SECONDS", 0.01)
    mine, tenure, seen = claim(tmp_path, True), Tenure(LEASE_SECONDS), list[int]()
    renewal = Renewal(mine.store, tenure, lambda: seen.append(1))
    until = time.monotonic() + 5.0
    while len(seen) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert tenure.valid and len(seen) >= 3 and mine.store.holder().beat >= 3
    other = sqlite3.connect(tmp_path / term.LOG_FILE, timeout=5.0)
    with other:
        other.execute("UPDATE term SET number = number + 1, holder = 'n2'")
    while tenure.valid and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(LogTakenOver, match="n2 has taken it over"):
        tenure.assure()
    renewal.close()
    mine.close()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another folder"):
        claim(tmp_path / "file", False)


def test_a_controller_that_is_killed_in_a_transaction_leaves_a_sound_log(tmp_path: Path) -> None:
    """With the journal that several hosts can use: whoever opens the log next rolls a half transaction back."""
    chance, last = random.Random(3), 0
    for _ in range(12):
        begun, begins = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                mine = claim(tmp_path, True)
                mine.store.append([event(last + 1)])
                os.write(begins, b".")
                for number in range(last + 2, last + 10_000):
                    mine.store.append([event(number)])
            finally:
                os._exit(1)
        os.close(begins)
        assert os.read(begun, 1) == b"."
        os.close(begun)
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = Store(tmp_path / term.LOG_FILE, shared=True)
        ids = [e.id for e in store.replay()]
        assert ids == list(range(1, len(ids) + 1)) and len(ids) >= last
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        last = len(ids)
        store.close()
    assert last > 10
