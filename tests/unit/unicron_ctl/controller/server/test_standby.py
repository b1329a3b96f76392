"""The standby's waiting, and a controller that steps down because it is cut off."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.controller.server import standby
from unicron_ctl.controller.server.sockets import CannotListen
from unicron_ctl.controller.server.standby import (
    DEAF_SECONDS,
    Isolation,
    Rival,
    SecondLeader,
    SteppedDown,
    another_leader,
    wait_for_claim,
)
from unicron_ctl.shared.log.store import NoRoom, Store
from unicron_ctl.shared.log.term import claim
from unicron_ctl.shared.protocol.reach import Reach, reach
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.system.addresses import resolve, split
from unicron_ctl.shared.system.errors import UserError

HOST, OTHER = resolve("192.0.2.1", 7451)[0], resolve("192.0.2.2", 7451)[0]


def anywhere() -> ControllerConfig:
    """A configuration with two free ports."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
    return ControllerConfig(listen=f"tcp://127.0.0.1:{ports[0]}", metrics=f"127.0.0.1:{ports[1]}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in a list of one."""
    now = [100.0]
    monkeypatch.setattr(standby, "clock", lambda: now[0])
    return now


def test_the_standby_says_whom_it_waits_for_and_takes_over_when_that_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    caplog.set_level(logging.INFO)
    first, told = claim(tmp_path, True), list[str]()
    here = anywhere()

    def sleep(seconds: float) -> None:
        assert (tmp_path / "standby").read_text().endswith(" 1")
        assert reach(here.listen.removeprefix("tcp://"), 1.0) is Reach.REFUSED, "it listens nowhere while it waits"
        if len(told) == 3:
            first.close()

    second, ports = wait_for_claim(tmp_path, here, told.append, sleep)
    assert ports.address == here.listen and reach(here.listen.removeprefix("tcp://"), 1.0) is Reach.REACHED
    ports.close()
    assert not second.stolen and len(told) == 3 and "process" in told[0]
    said = [text.partition(" process")[0].split(" on ")[0] for text in caplog.messages if "standby: " in text]
    assert said == snapshot
    assert not (tmp_path / "standby").exists()
    second.close()


@pytest.mark.parametrize("which", ["listen", "metrics"])
def test_a_standby_whose_port_another_has_complains_and_takes_over_once_it_is_free(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    snapshot: SnapshotAssertion,
) -> None:
    """It claims nothing that it could not serve, and the controller does not count on it."""
    monkeypatch.setattr(standby, "MARK_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    first, told, here = claim(tmp_path, True), list[str](), anywhere()
    host, port = split(getattr(here, which).removeprefix("tcp://"))
    squatter = socket.create_server((host, port))

    def sleep(seconds: float) -> None:
        assert not (tmp_path / "standby").exists(), "it counts as none"
        if len(told) == 2:
            first.close()
        if len(told) == 4:
            assert Store(tmp_path / "events.sqlite", shared=True).holder().number == first.store.term
            squatter.close()

    second, ports = wait_for_claim(tmp_path, here, told.append, sleep)
    ports.close()
    second.close()
    assert len(told) == 4 and "Address already in use" in told[0]
    assert [(record.levelname, record.message) for record in caplog.records if "standby: " in record.message] == [
        ("ERROR", told[0]),
        ("ERROR", told[3]),
        ("INFO", "standby: takes over"),
    ]
    assert told[3].replace(str(port), "PORT") == snapshot


def test_a_standby_stays_where_the_folder_is_full_and_takes_over_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Neither its mark nor the new term can be written: both may pass."""
    monkeypatch.setattr(standby, "MARK_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    first, told, here = claim(tmp_path, True), list[str](), anywhere()
    full, write_whole, begin_term = [True], standby.write_whole, Store.begin_term

    def write(path: Path, text: str) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_whole(path, text)

    def begin(store: Store, *holders: Any) -> None:
        if full[0]:
            raise NoRoom(f"{store.path}: the disk is full: make room")
        begin_term(store, *holders)

    def sleep(seconds: float) -> None:
        assert not (tmp_path / "standby").exists(), "it counts as none"
        if len(told) == 2:
            first.close()
        if len(told) == 4:
            full[0] = False

    monkeypatch.setattr(standby, "write_whole", write)
    monkeypatch.setattr(Store, "begin_term", begin)
    second, ports = wait_for_claim(tmp_path, here, told.append, sleep)
    ports.close()
    second.close()
    said = [re.sub(r"\S+ process \d+", "HOST process PID", text.replace(str(tmp_path), "FOLDER")) for text in told]
    assert len(said) == 4 and [said[0], said[3]] == snapshot
    levels = [record.levelname for record in caplog.records if "standby: " in record.message]
    assert levels == ["ERROR", "ERROR", "INFO"]


def test_a_standby_that_may_not_write_ends_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    def write(path: Path, text: str) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    first = claim(tmp_path, True)
    monkeypatch.setattr(standby, "write_whole", write)
    with pytest.raises(UserError) as ended:
        wait_for_claim(tmp_path, anywhere(), lambda text: None)
    assert str(ended.value).replace(str(tmp_path), "FOLDER") == snapshot
    first.close()


def test_who_finds_its_port_taken_at_the_start_ends_before_it_claims_anything(tmp_path: Path) -> None:
    here = anywhere()
    with socket.create_server(split(here.listen.removeprefix("tcp://"))), pytest.raises(CannotListen, match="in use"):
        wait_for_claim(tmp_path, here, lambda text: None)
    found = Store(tmp_path / "events.sqlite", shared=True)
    assert found.holder().number == 0
    found.close()


def test_a_log_that_cannot_be_read_ends_the_standby(tmp_path: Path) -> None:
    (tmp_path / "events.sqlite").write_bytes(b"no log, but long enough for SQLite to look at it" * 100)
    with pytest.raises(UserError, match="damaged"):
        wait_for_claim(tmp_path, anywhere(), lambda text: None)


def test_a_standby_waits_as_long_as_it_says_so(tmp_path: Path, clock: list[float]) -> None:
    rival, mark = Rival(tmp_path), tmp_path / "standby"
    rival.read_mark()
    assert not rival.waits
    mark.write_text("n2 process 7 1")
    rival.read_mark()
    assert not rival.waits, "it may be left from another time"
    mark.write_text("n2 process 7 2")
    rival.read_mark()
    assert rival.waits
    clock[0] += standby.WAITS_SECONDS + 0.1
    rival.read_mark()
    assert not rival.waits


def isolation(words: dict[Any, Reach], waits: bool = True, heard: float = 0.0) -> Isolation:
    """One whose probes are answered at once."""

    def call(work: Callable[[], object], then: Callable[[Reach], None]) -> None:
        then(words[work.args[0]] if isinstance(work, partial) else work())

    rival = SimpleNamespace(waits=waits)
    return Isolation(rival, call, lambda: heard, lambda: {"others": list(words)})  # type: ignore[arg-type]


def test_who_hears_nobody_and_reaches_no_other_host_steps_down() -> None:
    found = isolation({HOST: Reach.SILENT, OTHER: Reach.SILENT})
    found.check_isolation(0.0)
    found.check_isolation(DEAF_SECONDS - 0.1)
    found.check_isolation(DEAF_SECONDS + 0.1)
    with pytest.raises(SteppedDown, match="steps down"):
        found.check_isolation(DEAF_SECONDS + 0.2)


@pytest.mark.parametrize(
    ("words", "waits", "heard"),
    [
        ({HOST: Reach.REFUSED, OTHER: Reach.SILENT}, True, 0.0),  # its network carries something
        ({HOST: Reach.SILENT}, False, 0.0),  # nobody waits
        ({HOST: Reach.SILENT}, True, float("-inf")),  # it has never heard an agent: the next one would not either
        ({}, True, 0.0),  # no other host is known
    ],
)
def test_all_others_stay(words: dict[Any, Reach], waits: bool, heard: float) -> None:
    found = isolation(words, waits, heard)
    found.check_isolation(max(0.0, heard))
    for turn in range(10):
        found.check_isolation(DEAF_SECONDS + turn)


def test_an_agent_that_is_heard_again_ends_the_doubt() -> None:
    found, heard = cut_off({"a": [HOST]})
    found.check_isolation(0.0)
    found.check_isolation(DEAF_SECONDS + 0.1)
    heard[0] = DEAF_SECONDS + 0.15
    found.check_isolation(DEAF_SECONDS + 0.2)
    found.check_isolation(2 * DEAF_SECONDS + 0.3)  # probes anew
    with pytest.raises(SteppedDown):
        found.check_isolation(2 * DEAF_SECONDS + 0.4)


def cut_off(*looks: dict[str, Any]) -> tuple[Isolation, list[float]]:
    """One that finds these hosts, each time the next, and hears none of them; and when it heard an agent last."""
    heard, rest = [0.0], list(looks)

    def call(work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        then(Reach.SILENT if isinstance(work, partial) else rest.pop(0))

    return Isolation(SimpleNamespace(waits=True), call, lambda: heard[0], lambda: {}), heard  # type: ignore[arg-type]


def test_a_host_that_is_not_known_at_the_start_is_asked_for_again(
    caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    """And one that is known stays so while the name service is away, as it is for who is cut off."""
    found, heard = cut_off({"a": "Temporary failure"}, {"a": "Temporary failure"}, {"a": [HOST]}, {"a": "away"}, {})
    for at in (0.0, 5.0, 10.0, 20.0, 30.0, 40.0):
        heard[0] = at
        found.check_isolation(at)
    assert [record.message for record in caplog.records] == snapshot
    found.check_isolation(60.0)  # who hears nobody does not ask
    with pytest.raises(SteppedDown):
        found.check_isolation(60.1)


def test_own_addresses_are_no_other_hosts() -> None:
    found = standby.other_hosts(["tcp://127.0.0.1:7451", "tcp://192.0.2.7:7451", "tcp://no-such-host.invalid:1"])
    own, other, unknown = found.values()
    assert own == [] and [target.host for target in other] == ["192.0.2.7"] and isinstance(unknown, str)  # type: ignore[union-attr]


def test_another_leader_has_to_answer_several_times_in_a_row(snapshot: SnapshotAssertion) -> None:
    answers, asked = ["b:7451", "", "b:7451", "b:7451", "b:7451"], list[float]()

    def call(work: Callable[[], str], then: Callable[[str], None]) -> None:
        asked.append(now)
        then(work())

    second = SecondLeader(lambda: answers.pop(0), call)
    now = 100.0
    with pytest.raises(SteppedDown) as ended:
        while now < 200.0:
            second.check_others(now)
            now += 0.5
    assert str(ended.value) == snapshot
    assert asked == [100.0, 102.0, 112.0, 114.0, 116.0]


def test_without_another_address_nobody_is_asked() -> None:
    assert another_leader(["tcp://127.0.0.1:7451"], 7451, ()) == ""
