"""`make gpu-check` without a card: the same programs, with small models and gloo."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.processes import call

pytestmark = [pytest.mark.process, pytest.mark.wide]
LIMIT = 300.0  # it takes a minute on two idle cores
MADE = ("alone", "aborted", "heal-gloo", "errors", "health")


def test_a_dry_run_sees_everything_that_it_is_to_see(tmp_path):
    words = [word for name in MADE for word in ("--only", name)]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", tmp_path / "out", *words]
    done = call(*command, "--seconds", str(LIMIT), limit=LIMIT + 60)
    log = (tmp_path / "out" / "log.txt").read_text(errors="replace")
    assert done.returncode == 0, f"{done.stdout}\n{log[-6000:]}"
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows} == {"versions", *MADE}
    healed = [row for row in rows if row["name"] == "heal-gloo" and row.get("to_break")]
    assert len(healed) >= 8, "kills in compute, reduce, commit, step and copy; a hang; an exception; broken connections"
    assert all(row["losses_differ"] < 1e-5 for row in healed)


def test_an_unknown_check_is_one_clear_line():
    done = call(sys.executable, "-m", "benchmarks.gpu", "--only", "everything")
    assert done.returncode == 2 and "no check is named everything: write alone, " in done.stderr.splitlines()[-1]
