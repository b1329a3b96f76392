"""Results name their commit, also where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import commit


def test_a_machine_without_git_takes_figures_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit.commit.__wrapped__() == "unknown"


def test_a_copy_that_is_no_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "ROOT", tmp_path)
    assert commit.commit.__wrapped__() == "unknown"
