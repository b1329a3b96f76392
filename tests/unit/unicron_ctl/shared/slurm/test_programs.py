"""A program of Slurm's that cannot be killed: it is given up, said, and the next one runs; there are only so many."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_programs import slurm_in
from tests.support.processes import wait_for
from unicron_ctl.shared.slurm import programs
from unicron_ctl.shared.slurm.programs import MOST_STUCK, Programs
from unicron_ctl.shared.slurm.slurm_client import SlurmError, SlurmTimeout

ENV = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen]]:
    """Processes on which a kill has no effect, as in state D. They end when the test does."""
    started: list[subprocess.Popen] = []
    begin, kill = subprocess.Popen.__init__, subprocess.Popen.kill

    def noted(self: subprocess.Popen, *args: object, **kwargs: object) -> None:
        started.append(self)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    monkeypatch.setattr(programs, "KILL_SECONDS", 0.2)
    yield started
    for process in started:
        if process.returncode is None:
            kill(process)


def test_a_process_that_cannot_be_killed_is_given_up_and_the_next_one_runs(
    unkillable: list[subprocess.Popen], caplog: pytest.LogCaptureFixture, snapshot
) -> None:
    """Defect: after the kill it was waited for without limit, and no listing came any more."""
    found = Programs()
    with caplog.at_level(logging.WARNING), pytest.raises(SlurmTimeout) as raised:
        began = time.monotonic()
        found.run(["sleep", "60"], ENV, 0.2)
    assert str(raised.value) == snapshot
    assert time.monotonic() - began < 30.0 and "sleep 60" in caplog.text
    assert found.stuck() == ["sleep 60"]
    assert found.run(["echo", "here"], ENV, 30.0).stdout == b"here\n"
    os.kill(unkillable[0].pid, 9)
    wait_for(lambda: not found.stuck(), "what ends after all is forgotten")


def test_there_are_only_so_many_of_them_and_then_it_is_said_why(unkillable: list[subprocess.Popen], snapshot) -> None:
    found = Programs()
    for _ in range(MOST_STUCK):
        with pytest.raises(SlurmTimeout):
            found.run(["sleep", "60"], ENV, 0.1)
    with pytest.raises(SlurmTimeout) as raised:
        found.run(["echo", "here"], ENV, 30.0)
    assert str(raised.value) == snapshot
    assert len(unkillable) == MOST_STUCK
    os.kill(unkillable[0].pid, 9)
    wait_for(lambda: len(found.stuck()) < MOST_STUCK, "one of them ends")
    assert found.run(["echo", "here"], ENV, 30.0).stdout == b"here\n"


def test_pipes_that_somebody_keeps_open_hold_nobody_up(tmp_path: Path) -> None:
    """A child in a session of its own has the program's output."""
    client = slurm_in(tmp_path, timeout=0.3, scontrol="setsid sleep 20 &\nexec sleep 20")
    began = time.monotonic()
    with pytest.raises(SlurmTimeout, match=r" 0\.3 s"):
        client.nodes()
    assert time.monotonic() - began < 15.0


def test_a_program_that_prints_without_end_is_ended_and_it_is_said(monkeypatch: pytest.MonkeyPatch, snapshot) -> None:
    monkeypatch.setattr(programs, "MOST_BYTES", 4 << 20)
    with pytest.raises(SlurmError) as raised:
        Programs().run(["yes"], ENV, 60.0)
    assert str(raised.value) == snapshot
    assert Programs().run(["echo", "here"], ENV, 30.0).stdout == b"here\n"
