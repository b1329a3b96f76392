"""The short form of the torture, interrupted once: 60 failures in two jobs on a real Slurm, and every proof."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.torture import progress
from benchmarks.torture.proof import TOLERANCE
from tests.support.processes import ROOT, outside_slurm, wait_for

LIMIT = 1800
FAILURES, INTERRUPTED_AFTER = 60, 20
MOST_REFUSED = 3  # by an agent whose rank has died meanwhile
pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(LIMIT + 60)]


class Runner:
    """The command, in a folder of its own; what it says goes to a file there."""

    def __init__(self, folder: Path):
        self.folder, self.result = folder / "run", folder / "result.json"
        self.said = folder / "said"

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        options = ["--folder", str(self.folder), "--json", str(self.result), *words]
        with self.said.open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-u", "-m", "benchmarks.torture", *options],
                cwd=ROOT,
                env=outside_slurm(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def position(self) -> int:
        """How many failures are behind it."""
        there = (self.folder / progress.FILE).is_file()
        return progress.load(self.folder).position if there else 0

    def told(self) -> str:
        return self.said.read_text(errors="replace")[-4000:]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """After a run that was interrupted by SIGTERM and went on."""
    runner = Runner(tmp_path_factory.mktemp("t"))
    first = runner.start("--failures", str(FAILURES), "--seed", "1")
    try:
        wait_for(lambda: first.poll() is not None or runner.position() >= INTERRUPTED_AFTER, runner.told, LIMIT / 2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 130, runner.told()
    finally:
        first.kill()
    second = runner.start("--resume")
    try:
        assert second.wait(LIMIT) == 0, runner.told()
    finally:
        second.kill()
    return runner


def test_sixty_failures_leave_the_training_as_it_would_have_been(runner: Runner) -> None:
    result = json.loads(runner.result.read_text())
    assert result["wrong"] == []
    assert result["failures"] + result["refused"] == FAILURES and result["refused"] <= MOST_REFUSED
    assert sum(of["count"] for of in result["kinds"].values()) == result["failures"]
    assert sum(of["count"] == 0 for of in result["kinds"].values()) <= result["refused"]
    assert all(result["lives"].values())
    assert result["moves"] > 0
    for job in result["jobs"]:
        assert job["faults"] > 10 and job["last_loss"] < job["first_loss"]
        assert job["largest"] <= TOLERANCE and not job["missing"]


def test_it_was_interrupted_and_went_on_where_it_was(runner: Runner) -> None:
    run = progress.load(runner.folder)
    assert [leg.ended for leg in run.legs] == ["interrupted", "proven"]
    assert [one.index for one in run.done] == list(range(FAILURES))
    assert {one.leg for one in run.done} == {0, 1}


def test_nothing_is_left_running(runner: Runner) -> None:
    mark = str(runner.folder).encode()
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _read(path)] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
