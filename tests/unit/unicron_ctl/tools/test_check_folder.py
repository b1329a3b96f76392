"""`unicronctl check-folder`: what a state folder that two hosts share must bear."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.shared.system.errors import PROBLEM_FOUND, UserError
from unicron_ctl.tools import check_folder


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_folder, "TIMES", 3)
    monkeypatch.setattr(check_folder, "LARGE_BYTES", 10_000_000)


def run(folder: Path) -> Any:
    return CliRunner().invoke(unicronctl, ["check-folder", str(folder)], standalone_mode=False)


def test_a_folder_that_does_is_measured_and_left_as_it_was(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    done = run(tmp_path)
    assert (done.return_value, done.stderr) == (0, ""), done.exception
    *rows, beside_a_backup = done.stdout.splitlines()[1:]
    assert [*(line.split("  ")[0] for line in rows), re.sub(r"[\d.]+(?= s )", "N", beside_a_backup)] == snapshot
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works for another user")
def test_root_tries_it_with_the_rights_of_the_folders_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    problems = check_folder.problems

    def noted(folder: Path) -> list[str]:
        found = problems(folder)
        made.extend((path.stat().st_uid, path.stat().st_gid) for path in [folder, *folder.iterdir()])
        return found

    monkeypatch.setattr(check_folder, "problems", noted)
    with tempfile.TemporaryDirectory() as place:  # whose parents everybody may enter
        Path(place).chmod(0o755)
        folder = Path(place) / "state"
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        done = run(folder)
        assert (done.return_value, done.stderr, os.geteuid()) == (0, "", 0), done.exception
        assert list(folder.iterdir()) == []
    assert set(made) == {(65534, 65534)}, "a link in the way would lead nowhere"


@pytest.mark.parametrize(
    ("program", "instead"), [("OTHERS_LOCK", "pass"), ("OTHERS_WRITE", "pass"), ("OTHERS_READ", "print(0)")]
)
def test_what_does_not_hold_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, instead: str, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(check_folder, program, instead)
    done = run(tmp_path)
    assert done.return_value == PROBLEM_FOUND and list(tmp_path.iterdir()) == []
    assert done.stderr.replace(str(tmp_path), "FOLDER") == snapshot


def test_a_slow_folder_does_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_folder, "LEASE_SECONDS", 1e-9)
    done = run(tmp_path)
    assert done.return_value == PROBLEM_FOUND and " 1e-09 s " in done.stderr


def test_a_folder_without_room_for_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(check_folder.tempfile, "TemporaryDirectory", refused)
    assert str(run(tmp_path).exception).replace(str(tmp_path), "FOLDER") == snapshot
    monkeypatch.undo()
    monkeypatch.setattr(check_folder, "LIMIT", 0.5)
    monkeypatch.setattr(check_folder, "OTHERS_LOCK", "import time; time.sleep(60)")
    done = run(tmp_path)
    assert isinstance(done.exception, UserError) and "is it mounted?" in str(done.exception), sys.exc_info()
