"""The admission program: its status, and what it reports."""

from __future__ import annotations

import errno
import os
import re

import msgspec
import pytest

from unicron_ctl.controller.nodes.readmission import Report
from unicron_ctl.nodes import admission
from unicron_ctl.shared.system.errors import UserError
from unicron_detector.health.checks import Settings


def state(tmp_path) -> list[str]:
    return ["--state", str(tmp_path / "state")]


def run(tmp_path, *words: str, config: str = "") -> tuple[int, str]:
    file, log = tmp_path / "unicron.toml", tmp_path / "log"
    file.write_text(config)
    log.unlink(missing_ok=True)
    usual = ["--config", str(file), "--log", str(log), "--node", "n1", "--drain", "off", *state(tmp_path)]
    status = admission.main([*usual, *words])
    return status, log.read_text() if log.exists() else ""


def test_only_proof_gives_the_status_that_drains(tmp_path) -> None:
    assert run(tmp_path, "--skip", "clock") == (0, "")
    status, log = run(tmp_path, config="[health]\nmemory_mb = 999999999\n")
    assert status == admission.PROVEN_BAD == 100 and "proven bad: memory:" in log and "node n1" in log
    assert run(tmp_path, "--skip", "memory", config="[health]\nmemory_mb = 999999999\n") == (0, "")
    off = run(tmp_path, config='[health]\nmemory_mb = 999999999\nskip = ["all"]\n')
    assert off == (0, "")


def test_mistakes_in_the_configuration_are_said_and_drain_nobody(tmp_path) -> None:
    status, log = run(tmp_path, config="[health]\nmemory = 1\n")
    assert status == 0 and re.search(r"\[health\] memory: .*\bmemory_mb\b", log)
    status, log = run(tmp_path, "--skip", "fans")
    assert status == 0 and re.search(r'skip = "fans": .*\bgpu, memory\b', log)
    missing = ["--config", str(tmp_path / "none"), "--log", str(tmp_path / "log2"), *state(tmp_path)]
    assert admission.main(missing) == 0
    assert os.strerror(errno.ENOENT) in (tmp_path / "log2").read_text()


def test_a_mistake_leaves_the_other_lines_in_force_and_the_controller_is_told(tmp_path, monkeypatch) -> None:
    """Defect: a mistyped key switched all checks of what a node must have off, on all nodes."""
    told: list[dict] = []
    monkeypatch.setattr(admission, "ask_controller", lambda question, where, timeout: told.append(question))
    run(tmp_path, "--controller", "tcp://h:1", config="[health]\ngpus = 99\nnicz = ['ib0']\n")
    assert told[0]["verdict"] == "bad" and "99 GPUs expected" in told[0]["reason"]
    run(tmp_path, "--controller", "tcp://h:1", "--skip", "clock", config="[health]\nnicz = ['ib0']\n")
    assert told[1]["verdict"] == "warning"
    assert re.search(r"unicron\.toml: \[health\] nicz: .*\bnics\b", told[1]["reason"])


def test_a_controller_that_does_not_answer_is_only_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(admission, "REPORT_SECONDS", 0.2)
    status, log = run(tmp_path, "--skip", "clock", "--controller", "tcp://127.0.0.1:1")
    assert status == 0 and log.count("\n") == 1 and "tcp://127.0.0.1:1" in log, log


def test_the_report_says_what_was_found(tmp_path, monkeypatch) -> None:
    told: list[dict] = []
    monkeypatch.setattr(admission, "ask_controller", lambda question, where, timeout: told.append(question))
    run(tmp_path, "--controller", "tcp://h:1", "--at", "prolog", config="[health]\ngpus = 99\n")
    assert [(t["kind"], t["node"], t["source"], t["verdict"]) for t in told] == [("health", "n1", "prolog", "bad")]
    assert "99 GPUs expected" in told[0]["reason"] and msgspec.convert(told[0], Report)


def test_a_report_that_cannot_be_sent_is_one_line() -> None:
    with pytest.raises(UserError, match="nonsense"):
        admission.report("nonsense", "n1", "interval", admission.run(Settings(skip=("all",))), 0.0)


def test_reports_go_to_the_address_of_the_configuration(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("UNICRON_CONTROLLER", raising=False)
    told = []
    monkeypatch.setattr(admission, "ask_controller", lambda question, where, timeout: told.append(where))
    skip = '[health]\nskip = ["all"]\n'
    assert run(tmp_path, config=skip)[0] == 0 and told == []
    assert run(tmp_path, config=f'{skip}[controller]\naddress = "tcp://head:7451"\n')[0] == 0
    assert told == ["tcp://head:7451"]
    assert run(tmp_path, "--controller", "tcp://other:1", config=skip)[0] == 0 and told[1:] == ["tcp://other:1"]
    _, said = run(tmp_path, config=f'{skip}[controller]\naddress = "head"\n')
    assert "write tcp://HOST:PORT" in said


def test_the_usual_configuration_is_read_where_none_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("UNICRON_CONFIG", raising=False)
    monkeypatch.setattr(admission, "USUAL_CONFIG", str(tmp_path / "unicron.toml"))
    assert admission._usual_config() is None
    (tmp_path / "unicron.toml").touch()
    assert admission._usual_config() == str(tmp_path / "unicron.toml")
    monkeypatch.setenv("UNICRON_CONFIG", "/nonexistent")
    assert admission._usual_config() is None
