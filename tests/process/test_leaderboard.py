"""The leaderboard runs to its end, with our own session and with torchrun, whose environment is the tests' own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.leaderboard import __main__ as command
from benchmarks.leaderboard import play
from benchmarks.leaderboard.systems.base import System
from tests.support.controller import Controller
from tests.support.jobs import Job

pytestmark = [pytest.mark.process, pytest.mark.wide, pytest.mark.timeout(3600)]
SYSTEMS = ("unicron", "torchrun")
ITERATIONS = 40  # of the undisturbed run
# A busy machine is no failure.
PATIENT = {"START_LIMIT": 600.0, "SETTLED": 20.0, "REFERENCE_LIMIT": 1800.0, "OPERATOR": 300.0, "WARM": 5}
COLLECTIVE_SECONDS, RECOVERY_SECONDS = 60.0, 300.0


@pytest.mark.parametrize("model", ["dp", "hsdp"])
def test_a_failure_and_a_short_stream_make_a_row_for_each_system(model: str, tmp_path: Path, monkeypatch) -> None:
    peers = tmp_path / "peers"
    peers.mkdir()
    (peers / "torchrun").symlink_to(sys.prefix)
    monkeypatch.setattr("benchmarks.leaderboard.systems.base.PEERS", peers)
    for name, value in PATIENT.items():
        monkeypatch.setattr(play, name, value)
    monkeypatch.setattr(System, "collective", COLLECTIVE_SECONDS)
    monkeypatch.setattr(command, "QUICK", play.Limits(RECOVERY_SECONDS, RECOVERY_SECONDS))
    for kind in (Job, Controller):
        monkeypatch.setattr(kind, "lent", False)  # its processes are known by their environment
    undisturbed = play.reference
    monkeypatch.setattr(play, "reference", lambda folder, _: undisturbed(folder, ITERATIONS))
    file, named = tmp_path / "results.json", [word for name in SYSTEMS for word in ("--system", name)]
    words = [
        "--json",
        str(file),
        "--quick",
        "--model",
        model,
        *named,
        "--failure",
        "rank-kill",
        "--stream-minutes",
        "0.3",
    ]
    assert command.main(words) == 0
    rows = json.loads(file.read_text())
    assert [row["system"] for row in rows] == [*SYSTEMS, *SYSTEMS]
    failed, streamed = rows[:2], rows[2:]
    assert all(row["survived"] and row["loss_difference"] < 1e-5 for row in failed), failed
    assert all(row["struck"] and row["undisturbed"] for row in streamed), streamed
