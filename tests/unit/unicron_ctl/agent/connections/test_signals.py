"""What an agent asks of Slurm when a signal comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_programs import program
from unicron_ctl.agent.connections.signals import proctrack_type


@pytest.mark.parametrize(("signals", "found"), [(0, "proctrack/linuxproc"), (2, "proctrack/linuxproc"), (9, "")])
def test_a_signal_that_ends_scontrol_does_not_hide_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: int, found: str
) -> None:
    """Defect: Slurm's SIGTERM reached the scontrol that was asked, too, and the ranks got one more from the agent."""
    calls, answer = tmp_path / "calls", "echo 'ProctrackType           = proctrack/linuxproc'"
    program(
        tmp_path / "scontrol", f'echo >> "{calls}"\n[ $(wc -l < "{calls}") -gt {signals} ] || kill -TERM $$\n{answer}'
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert proctrack_type() == found
