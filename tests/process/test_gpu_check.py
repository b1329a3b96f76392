"""`make gpu-check` without a card: the same programs, with small models and gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import checks
from tests.support.processes import call

HEALED = ("aborted-gloo", "heal-gloo", "layouts-gloo", "sharded-gloo", "health")
pytestmark = [pytest.mark.process, pytest.mark.timeout(1500)]


def dry_run(out: Path, *names: str) -> list[dict[str, Any]]:
    """The rows of these checks, all of which have to be well."""
    words = [word for name in names for word in ("--only", name)]
    done = call(sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", out, *words, limit=1400)
    log = (out / "log.txt").read_text(errors="replace")
    assert done.returncode == 0, f"{done.stdout}\n{log[-6000:]}"
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows} == {"versions", *names}
    return rows


@pytest.mark.wide  # a minute and a half on two idle cores
def test_ranks_fail_at_every_point_and_are_healed(tmp_path):
    rows = dry_run(tmp_path / "out", *HEALED)
    healed = [row for row in rows if row.get("to_break")]
    assert len(healed) >= 20, (
        "kills in compute, reduce, commit, step and copy; hang; exception; broken connections; layouts; experts; HSDP"
    )
    assert all(row["losses_differ"] < 1e-5 for row in healed)


@pytest.mark.wide  # two minutes
def test_all_else_that_is_seen_on_a_card(tmp_path):
    dry_run(tmp_path / "out", *(check.name for check in checks("cpu", None) if check.name not in HEALED))


@pytest.mark.wide
def test_an_unknown_check_is_one_clear_line():
    done = call(sys.executable, "-m", "benchmarks.gpu", "--only", "everything")
    assert done.returncode == 2 and "no check is named everything: write alone, " in done.stderr.splitlines()[-1]
