"""`unicrond`: its options, and what it does around the loop."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import undated
from unicron_ctl.cli import unicronctl
from unicron_ctl.controller import unicrond as main
from unicron_ctl.controller.server import journal
from unicron_ctl.shared.settings.config import Config, ControllerConfig
from unicron_ctl.shared.settings.config_file import examine
from unicron_ctl.shared.system import descriptors


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No configuration, controller or systemd of the machine has a say here."""
    for name in list(os.environ):
        if name.startswith(("UNICRON", "NOTIFY_", "WATCHDOG_", "JOURNAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    logger = logging.getLogger(journal.ROOT)
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def unicrond(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], list[str]]]:
    """Runs it; returns the exit status and the lines of its outputs."""

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        status = unicronctl.run("unicrond", main.unicrond, arguments, tell=journal.tell_error)
        out, err = capfd.readouterr()
        return status, out.splitlines(), err.splitlines()

    return run


def written(folder: Path, text: str) -> str:
    path = folder / "unicron.toml"
    path.write_text(text)
    return str(path)


def test_a_good_configuration_shows_its_time_outs(unicrond: Any, tmp_path: Path) -> None:
    path = written(tmp_path, "[controller]\nreport_timeout = 12\n")
    status, out, err = unicrond("--config", path, "--check")
    assert (status, err) == (0, []) and out[-1] == f"{path}: no problem found"
    assert "repeat_seconds = 0.5 < report_timeout = 12: a lost message is repeated first" in out
    assert unicrond("--check")[1][-1] == "defaults: no problem found"


def test_everything_wrong_is_printed(unicrond: Any, tmp_path: Path) -> None:
    text = "[controller]\nheartbeat_period = 0.005\nrestart_seconds = 1000\npublic_key = 'short'\nhint = 1\n"
    path = written(tmp_path, text + "[[severity.rule]]\nid = 'mine'\n")
    status, out, err = unicrond("--config", path, "--check")
    assert (status, out) == (2, []) and all(line.startswith(f"unicrond: {path}: ") for line in err)
    for word in ("heartbeat_period = 0.005", "restart_seconds = 1000", "public key", "hint: unknown key"):
        assert sum(word in line for line in err) == 1, (word, err)
    assert len(err) == 5, "the severity table is checked as well"


def test_a_start_with_a_bad_configuration_is_one_line(unicrond: Any, tmp_path: Path) -> None:
    status, out, err = unicrond("--config", written(tmp_path, "[controller]\nheartbeat_period = 60\n"))
    assert (status, out) == (2, []) and len(err) == 1 and "enter_timeout" in err[0]
    status, _, err = unicrond("--listen", "here", "--check")
    assert (status, len(err)) == (2, 1) and err[0].startswith('unicrond: --listen: listen = "here"')
    assert unicrond("--log-level", "loud", "--check")[0] == 2


def test_make_key(unicrond: Any, tmp_path: Path) -> None:
    status, (line,), _ = unicrond("--make-key", "--state-dir", str(tmp_path / "state"))
    assert status == 0 and line.startswith('public_key = "')


HERE = "listen = 'tcp://127.0.0.1:0'\n"


class FakeServer:
    """Records what main does with it. `during`: called in place of the loop."""

    address = "tcp://here:1"

    def __init__(self, during: Callable[[FakeServer], None], *arguments: Any) -> None:
        self.during, self.calls, self.taken, self.problems = during, list[str](), list[Config](), list[str]()
        self.reload: Callable[[], None] = lambda: None
        self.watchdog: Callable[[float], None] = lambda now: None
        arguments[1].close()
        arguments[2].close()

    def apply_config(self, config: Config, classifier: object) -> None:
        self.taken.append(config)

    def keep_config(self, problem: str) -> None:
        self.problems.append(problem)

    def run(self) -> None:
        self.calls.append("run")
        self.during(self)

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


def test_a_life_from_start_to_stop(
    unicrond: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, state = written(tmp_path, "[controller]\nslurm = 'none'\n" + HERE), tmp_path / "state"
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(5)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setattr(descriptors, "raise_limit", lambda: 1024)
    servers: list[FakeServer] = []

    def hear() -> str:
        return manager.recv(1000).decode().partition("\n")[0]

    def during(server: FakeServer) -> None:
        servers.append(server)
        assert hear() == "READY=1" and server.calls == ["catch_signals", "record_start", "run"]
        assert (state / "address").read_text() == "tcp://here:1\n"
        server.watchdog(100.0)
        assert hear() == "WATCHDOG=1"
        written(tmp_path, "[controller]\nslurm = 'none'\noffer_delay = 0.5\nlisten = 'tcp://127.0.0.1:1'\n")
        server.reload()
        assert (hear(), hear()) == ("RELOADING=1", "READY=1")
        written(tmp_path, "[controller]\noffer_delay = 'soon'\n")
        server.reload()
        assert (hear(), hear()) == ("RELOADING=1", "READY=1")

    monkeypatch.setattr(main, "Server", lambda *arguments: FakeServer(during, *arguments))
    status, out, err = unicrond("--config", path, "--state-dir", str(state))
    assert (status, out) == (0, ["unicrond: listening on tcp://here:1"]), err
    taken = [(config.controller.offer_delay, config.controller.listen) for config in servers[0].taken]
    assert taken == [(0.5, "tcp://127.0.0.1:1")], "the server can say that it still listens elsewhere"
    assert servers[0].calls[-1] == "close" and hear() == "STOPPING=1" and not (state / "address").exists()
    assert undated(err[0]).startswith("WARNING unicrond: 1024 open files are granted")
    assert len(err) == 1 and [path in problem for problem in servers[0].problems] == [True]
    manager.close()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("[notify]\nhook = '/mnt/not-yet/hook'", "No such file"),
        ("[notify]\nhook = 'bin/hook'", "absolute path"),
        ("[notify]\nsecrets = '/mnt/not-yet/secrets'", "/mnt/not-yet/secrets"),
        ("[notify]\nsecrets = 'secrets'", "absolute path"),
        ("[notify]\nmail = ['ops']", "no address of mail"),
        ('[notify]\nmail = ["a@b\\nBcc: c@d"]', "no address of mail"),
        ("[notify]\nmail = ['ops@a']\nsmtp = 'mail'", "HOST:PORT"),
        ("[notify]\nmail = 'ops@a'", "mail: Expected `array`"),
        ("[notify]\nmost_per_hour = 0", "most_per_hour"),
        ("[notify]\nkinds = ['heeled']", "heeled"),
        ("[notify]\nslack = 'https://x'", "unknown key"),
        ("notify = 3", "must be a section"),
    ],
)
def test_a_mistake_in_notify_keeps_no_controller_down(
    unicrond: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, said: str
) -> None:
    """It is said, at a start and at a reload; what else the file says counts."""
    above, below = (section, "") if section.startswith("notify") else ("", section)
    text = f"{above}\n[controller]\nslurm = 'none'\noffer_delay = 0.5\n{HERE}{below}\n"
    path, taken = written(tmp_path, text), list[float]()

    def during(server: FakeServer) -> None:
        written(tmp_path, text.replace("0.5", "0.7"))
        server.reload()
        taken.extend(config.controller.offer_delay for config in server.taken)

    monkeypatch.setattr(main, "Server", lambda *arguments: FakeServer(during, *arguments))
    monkeypatch.setattr(descriptors, "shortage", lambda granted: "")
    status, _, err = unicrond("--config", path, "--state-dir", str(tmp_path / "state"))
    assert (status, taken) == (0, [0.7]) and len(err) == 2, err
    assert all(f"{path}: [notify] " in line and said in line and "it is left out" in line for line in err), err
    status, _, err = unicrond("--config", path, "--check")
    assert status == 2 and len(err) == 1 and said in err[0]
    written(tmp_path, text.replace("0.5", "'soon'"))
    assert unicrond("--config", path, "--state-dir", str(tmp_path / "state"))[0] == 2


@pytest.mark.parametrize("missing", ["unicron.toml", "folder/unicron.toml", "."])
def test_a_configuration_that_is_not_there_yet_is_tried_again(
    unicrond: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Its file system may be mounted later: systemd starts the program again after this exit status, without end."""
    for variable, arguments in (("", ("--config", str(tmp_path / missing))), (str(tmp_path / missing), ())):
        monkeypatch.setenv("UNICRON_CONFIG", variable)
        status, out, err = unicrond(*arguments)
        assert (status, out) == (1, []) and len(err) == 1 and str(tmp_path / missing) in err[0]
    for name in ("unicrond", "unicron-web"):
        unit = (Path(__file__).parents[4] / f"slurm_plugin/systemd/{name}.service").read_text()
        assert "Restart=always\n" in unit and "RestartPreventExitStatus=2\n" in unit
        assert "StartLimitIntervalSec=0\n" in unit[: unit.index("[Service]")]


def test_with_json_the_error_that_ends_it_is_an_object(unicrond: Any) -> None:
    status, out, (line,) = unicrond("--log-format", "json", "--listen", "here")
    said = json.loads(line)
    assert (status, out, said["level"]) == (2, [], "ERROR") and said["text"].startswith('--listen: listen = "here"')


def test_a_standby_that_leads_has_the_configuration_of_today_but_listens_where_it_does(tmp_path: Path) -> None:
    before = Config(controller=ControllerConfig(listen="tcp://127.0.0.1:5", metrics=":6"))
    path = written(tmp_path, "[controller]\noffer_delay = 0.5\nlisten = 'tcp://127.0.0.1:7'\nmetrics = ':8'\n")
    found = main.read_again(before, lambda: examine(path)).controller
    assert (found.offer_delay, found.listen, found.metrics) == (0.5, "tcp://127.0.0.1:5", ":6")
    written(tmp_path, "[controller]\noffer_delay = 'soon'\n")
    assert main.read_again(before, lambda: examine(path)) is before


def test_an_error_is_one_in_the_journal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "is_journal", lambda stream: True)
    assert unicronctl.run("unicrond", main.unicrond, ["--listen", "here"], tell=journal.tell_error) == 2
    assert capsys.readouterr().err.startswith("<3>unicrond: --listen")


def test_a_damaged_log_does_not_end_the_start_for_ever(
    unicrond: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    damaged = b"no log, but long enough for SQLite to look at it" * 100
    (state / "events.sqlite").write_bytes(damaged)
    path = written(tmp_path, '[controller]\nlisten = "tcp://127.0.0.1:0"\nauth = "none"\nslurm = "none"\n')
    monkeypatch.setattr(main.Server, "run", lambda server: None)
    status, _, err = unicrond("--config", path, "--state-dir", str(state))
    (kept,) = state.glob("damaged-*")
    assert status == 0 and (kept / "events.sqlite").read_bytes() == damaged
    assert any("was damaged" in line and kept.name in line and "ERROR" in line for line in err)
    status, _, err = unicrond("--config", path, "--state-dir", str(state))
    assert status == 0 and not any("damaged (" in line and "ERROR" in line for line in err)
    assert len(list(state.glob("damaged-*"))) == 1
