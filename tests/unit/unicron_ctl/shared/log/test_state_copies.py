"""Backup and restore of the state folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.world import World
from unicron_ctl.controller.core.state_snapshot import freeze, read_state
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.fold import fold, replay
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.state_copies import MOST_DAMAGED, SKIPPED_IDS, backup, replace_damaged, restore
from unicron_ctl.shared.log.store import Holder, LogDamaged, Store
from unicron_ctl.shared.log.term import LOG_FILE, RESTORING, claim
from unicron_ctl.shared.protocol.encryption import SECRET_FILE, make_key
from unicron_ctl.shared.system.errors import UserError

OTHER = 65534  # a user who is not root
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root works for another user")


def events(first: int, last: int) -> list[Event]:
    return [Event(number, 1000.0 + number, "1", 0, records.WorldProved(reason="")) for number in range(first, last + 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder with a key and ten events."""
    made = tmp_path / "state"
    make_key(made)
    begun = claim(made, False)
    begun.store.append(events(1, 10))
    begun.close()
    return made


def refusal(folder: Path, action: Callable[[], object]) -> str:
    """The text with which an action is refused."""
    with pytest.raises(UserError) as refused:
        action()
    return str(refused.value).replace(str(folder), "FOLDER")


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """Its log, to read."""
    store = Store(folder / LOG_FILE)
    yield store
    store.close()


@pytest.mark.parametrize("leased", [False, True])
def test_a_backup_while_unicrond_runs_has_all_that_was_stored(folder: Path, tmp_path: Path, leased: bool) -> None:
    running = claim(folder, leased)
    running.store.append(events(11, 12))
    found = backup(folder, tmp_path / "copy")
    assert (found.events, found.last, found.at, found.key) == (12, 12, 1012.0, True)
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o600
    running.store.append(events(13, 13))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "state"], "nothing else is left"
    running.close()


def test_a_controller_that_cannot_write_meanwhile_waits_for_no_other_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite locks the log until the copy is on the disk: the lease would end with the patience of a slow one."""
    pairs = list[list[str]]()

    class Watched(sqlite3.Connection):
        def backup(self, target: sqlite3.Connection, **more: Any) -> None:
            pairs.append([Path(one.execute("PRAGMA database_list").fetchone()[2]).name for one in (self, target)])
            super().backup(target, **more)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    assert backup(folder, tmp_path / "copy").events == 10
    assert pairs == [[LOG_FILE, ""], ["", LOG_FILE]]


def test_a_backup_overwrites_nothing_and_needs_a_state_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        backup(folder, tmp_path / "there")
    with pytest.raises(UserError, match="--state-dir"):
        backup(tmp_path / "none", tmp_path / "copy")
    with pytest.raises(UserError, match="No such file"):
        backup(folder, tmp_path / "no" / "copy")
    assert (tmp_path / "there").read_text() == "mine" and not (tmp_path / "copy").exists()


def test_a_restore_keeps_what_was_there_and_goes_on_above_it(folder: Path, tmp_path: Path) -> None:
    backup(folder, tmp_path / "copy")
    later = claim(folder, False)
    term = later.store.term
    later.store.append(events(11, 50))
    later.close()
    secret = (folder / SECRET_FILE).read_text()
    (folder / SECRET_FILE).write_text("another")
    found, kept = restore(tmp_path / "copy", folder)
    assert kept is not None and (kept / SECRET_FILE).read_text() == "another"
    with opened(kept) as old:
        assert [e.id for e in old.replay()] == list(range(1, 51)), "the old log is whole"
    assert (folder / SECRET_FILE).read_text() == secret and found.last == 10
    assert stat.S_IMODE((folder / LOG_FILE).stat().st_mode) == 0o600
    again = claim(folder, False)
    assert again.store.term > term, "agents believe it"
    ids = [e.id for e in again.store.replay()]
    assert ids == [*range(1, 11), 51], "whoever follows the events sees the next ones"
    again.close()


@pytest.mark.parametrize("moves", range(6))
def test_a_restore_that_is_killed_is_done_again_before_unicrond_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """After each of its moves: unicrond must not begin with an empty log, nor with another key."""
    copy = tmp_path / "a copy"
    backup(folder, copy)
    (folder / "address").write_text("tcp://here:1")
    secret = (folder / SECRET_FILE).read_text()
    (folder / SECRET_FILE).write_text("another")
    counted, move = [0], os.replace

    def killed(source: Any, target: Any) -> None:
        if Path(target).name != RESTORING:
            counted[0] += 1
            if counted[0] > moves:
                raise SystemError("killed")
        move(source, target)

    monkeypatch.setattr(os, "replace", killed)
    try:
        restore(copy, folder)
        assert moves >= 5, "so many moves there are"
        return
    except SystemError:
        monkeypatch.undo()
    (folder / ".restore-left").mkdir()
    with pytest.raises(UserError, match=r"`unicronctl restore '.*/a copy'`"):
        claim(folder, False)
    restore(copy, folder)
    again = claim(folder, False)
    ids = [e.id for e in again.store.replay()]
    again.close()
    assert ids[:10] == list(range(1, 11)) and ids[10] > 10 and (folder / SECRET_FILE).read_text() == secret
    kept = [path for one in folder.iterdir() if one.is_dir() for path in one.iterdir()]
    assert {path.name for path in kept} == {LOG_FILE, SECRET_FILE, "address"}, "what was there before is all kept"
    assert "another" in [path.read_text() for path in kept if path.name == SECRET_FILE]
    assert all(one.is_file() or one.name.startswith("before-restore-") for one in folder.iterdir())


def test_a_restore_into_an_empty_folder_and_over_a_damaged_log(folder: Path, tmp_path: Path) -> None:
    backup(folder, tmp_path / "copy")
    found, kept = restore(tmp_path / "copy", tmp_path / "new")
    assert kept is None and found.last == 10
    (folder / LOG_FILE).write_bytes(b"damaged" * 1000)
    assert restore(tmp_path / "copy", folder)[1] is not None
    for place in (tmp_path / "new", folder):
        with opened(place) as store:
            assert [e.id for e in store.replay()][-1] == 10 + SKIPPED_IDS + 1
            assert read_state(store).paused == {"": 0.0}


def test_a_restore_is_refused_while_a_unicrond_runs(folder: Path, tmp_path: Path) -> None:
    backup(folder, tmp_path / "copy")
    running = claim(folder, True)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(UserError, match="stop it first"):
        restore(tmp_path / "copy", folder)
    running.store.append(events(11, 11))
    assert sorted(path.name for path in folder.iterdir()) == before
    running.close()


@pytest.mark.parametrize("damage", ["cut", "log", "key", "none", "other", "state"])
def test_a_damaged_copy_changes_nothing(folder: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    if damage == "state":
        with opened(folder) as store:
            store.term = store.holder().number
            store.save_state(10, b"no state")
    if damage == "key":
        (folder / SECRET_FILE).write_text("short")
    if damage in ("state", "key"):  # a backup is read again, so such a one is not even made
        with pytest.raises(UserError, match=r"damaged|cannot be read"):
            backup(folder, copy)
        assert not copy.exists()
        return
    backup(folder, copy)
    match damage:
        case "cut":
            data = copy.read_bytes()
            copy.write_bytes(data[: len(data) // 3])
        case "log":
            data = bytearray(copy.read_bytes())
            data[4096:12288] = b"\xff" * 8192
            copy.write_bytes(data)
        case "none":
            copy.write_text("no archive")
        case "other":
            copy.unlink()
            with tarfile.open(copy, "w") as bundle:
                bundle.add(folder / SECRET_FILE, "something")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError) as caught:
        restore(copy, folder)
    assert "\n" not in str(caught.value)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith("lock.")}
    assert after == {name: data for name, data in before.items() if not name.startswith("lock.")}


def test_what_was_under_way_at_the_backup_is_asked_of_nobody(tmp_path: Path) -> None:
    state = ClusterState()
    requests = [
        ("", -1, records.SlurmAction(action="down", element=-1, node="n1", slurm_reason="unicron[node_problem]: x")),
        ("", -1, records.SlurmAction(action="down", element=-1, node="n2", slurm_reason="unicron[node_problem]: x")),
        ("", -1, records.SlurmDone(action="down", node="n2")),
        ("7", 0, records.SlurmAction(action="requeue", element=0, node="")),
    ]
    for number, (job, _, record) in enumerate(requests, 1):
        fold(state, Event(number, 1000.0, job, 0, record))
    fold(state, Event(9, 2000.0, "", 0, records.LogRestored(taken=1000.0)))
    assert not state.intents and state.paused == {"": 0.0}
    assert state.out_of_service == {"n2"} and not state.node("n1").downed and state.node("n2").downed


def test_a_state_that_was_saved_goes_with_the_log(tmp_path: Path) -> None:
    world = World()
    begun = claim(tmp_path / "state", False)
    begun.store.append(events(1, 3))
    state = replay(begun.store.replay(), world.core.state)
    begun.store.save_state(3, freeze(state))
    begun.close()
    backup(tmp_path / "state", tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "new")
    with opened(tmp_path / "new") as store:
        assert [event for event, _ in store.states()] == [3] and read_state(store).last_event == 3 + SKIPPED_IDS + 1


@pytest.fixture
def anothers(folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A state folder of another user's, with a copy of it in `tmp_path`, where only root comes."""
    backup(folder, tmp_path / "copy")
    with tempfile.TemporaryDirectory(prefix="unicron-state-", dir="/tmp") as place:
        Path(place).chmod(0o755)
        made = Path(shutil.copytree(folder, Path(place) / "state"))
        for path in [made, *made.iterdir()]:
            os.chown(path, OTHER, OTHER)
        yield made


@AS_ROOT
def test_what_root_restores_belongs_to_the_folders_owner(anothers: Path, tmp_path: Path) -> None:
    _, kept = restore(tmp_path / "copy", anothers)
    assert os.geteuid() == os.getegid() == 0 and kept is not None
    owners = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in [kept, *anothers.iterdir()]}
    assert {LOG_FILE, SECRET_FILE} < set(owners) and set(owners.values()) == {(OTHER, OTHER)}
    assert any(name.startswith("lock.") for name in owners), "else unicrond could not look at it, and would not start"


@AS_ROOT
def test_what_the_owner_puts_in_the_way_leads_root_nowhere(anothers: Path, tmp_path: Path) -> None:
    roots = tmp_path / "roots"
    roots.touch(mode=0o600)
    (anothers / "lock.9").symlink_to(roots)
    with pytest.raises(UserError, match=r"lock\.9: Permission denied"):
        restore(tmp_path / "copy", anothers)
    assert roots.stat().st_uid == os.geteuid() == 0


@AS_ROOT
def test_a_backup_of_roots_reads_with_the_owners_rights(anothers: Path, tmp_path: Path) -> None:
    """The key may be a link, and what SQLite finds beside a log, and removes, may be one, too."""
    with tempfile.TemporaryDirectory() as place:
        found = backup(anothers, Path(place) / "sound")
        assert found.key and (Path(place) / "sound").stat().st_uid == os.geteuid() == 0
        secret = Path(place) / "secret"
        secret.write_text("roots", encoding="ascii")
        (anothers / SECRET_FILE).unlink()
        (anothers / SECRET_FILE).symlink_to(secret)
        with pytest.raises(UserError, match=SECRET_FILE):
            backup(anothers, Path(place) / "copy")
        (anothers / SECRET_FILE).unlink()
        (anothers / LOG_FILE).unlink()
        shutil.copy(Path(place) / "sound", Path(place) / LOG_FILE)
        (Path(place) / LOG_FILE).chmod(0o600)
        (anothers / LOG_FILE).symlink_to(Path(place) / LOG_FILE)
        with pytest.raises(UserError, match="unable to open"):
            backup(anothers, Path(place) / "copy")
        assert sorted(path.name for path in Path(place).iterdir()) == sorted([LOG_FILE, "secret", "sound"])


@AS_ROOT
def test_the_rest_of_a_transaction_beside_a_log_is_the_owners(anothers: Path, tmp_path: Path) -> None:
    """SQLite ends what a crash has left, and removes it: as the owner."""
    users: list[int] = []
    connect = sqlite3.connect

    def noted(*args: object, **more: object) -> object:
        if LOG_FILE in str(args[0]) and str(anothers) in str(args[0]):
            users.append(os.geteuid())
        return connect(*args, **more)  # type: ignore[call-overload]

    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", noted)
        backup(anothers, Path(place) / "copy")
    assert users == [OTHER]


def harm(log: Path, what: str) -> bytes:
    """Damages a log; returns what is in it then."""
    data = bytearray(log.read_bytes())
    if what == "a page":
        data[len(data) // 2 : len(data) // 2 + 8192] = bytes(8192)
    elif what == "its end":
        del data[len(data) // 2 :]
    else:
        data[:100] = b"x" * 100
    for beside in log.parent.glob(f"{log.name}-*"):
        beside.unlink()
    log.write_bytes(data)
    return bytes(data)


@pytest.mark.parametrize("what", ["a page", "its end", "its beginning"])
def test_a_damaged_log_is_kept_and_a_new_one_begins(tmp_path: Path, what: str, snapshot) -> None:
    store = Store(tmp_path / LOG_FILE, shared=True)
    store.begin_term(Holder(7_000_000_000, "before"), Holder())
    store.append([Event(n, 1e9 + n, "1", 1, records.WorldProved(reason="x" * 200)) for n in range(1, 400)])
    store.close()
    (tmp_path / SECRET_FILE).write_text("the key")
    damaged = harm(tmp_path / LOG_FILE, what)
    with pytest.raises(LogDamaged) as found:
        broken = Store(tmp_path / LOG_FILE)
        list(broken.replay())
    kept = replace_damaged(tmp_path, found.value.why)
    assert (kept / LOG_FILE).read_bytes()[200:] == damaged[200:] and (tmp_path / SECRET_FILE).read_text() == "the key"
    fresh = claim(tmp_path, False)
    (mark,) = fresh.store.replay()
    assert mark.id >= 400 and isinstance(mark.record, records.LogRestored) and kept.name in mark.record.reason
    assert what != "a page" or fresh.store.term > 7_000_000_000, "where it can be read"
    assert refusal(tmp_path, lambda: replace_damaged(tmp_path, "x")) == snapshot
    fresh.close()


def test_logs_that_are_damaged_again_and_again_are_another_fault(tmp_path: Path, snapshot) -> None:
    for number in range(MOST_DAMAGED + 1):
        Store(tmp_path / LOG_FILE, shared=True).close()
        if number < MOST_DAMAGED:
            replace_damaged(tmp_path, "malformed")
    assert refusal(tmp_path, lambda: replace_damaged(tmp_path, "malformed")) == snapshot


def test_a_log_that_is_none_is_one_line(tmp_path: Path, snapshot) -> None:
    (tmp_path / LOG_FILE).write_bytes(b"no log, but long enough for SQLite to look at it" * 100)
    assert refusal(tmp_path, lambda: backup(tmp_path, tmp_path / "copy")) == snapshot
