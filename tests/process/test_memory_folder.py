"""Shared memory that outlives ranks and agents, under real agents and a real unicrond."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.jobs import Job
from tests.support.processes import wait_for

pytestmark = pytest.mark.process
SETTINGS = """
forming_settle_seconds = 0.5
restart_grace = 20
"""
# Each start of the program leaves a file in the memory, and it ends when it is told to.
PROGRAM = (
    'echo "$UNICRON_MEMORY" >> "$OUT/folders"; touch "$UNICRON_MEMORY/$$.image"; ls "$UNICRON_MEMORY" | wc -l >> '
    '"$OUT/counts"; while [ ! -e "$OUT/stop" ]; do sleep 0.05; done'
)


@pytest.fixture
def controller(tmp_path: Path):
    (tmp_path / "controller").mkdir()
    started = Controller(tmp_path / "controller", SETTINGS)
    yield started
    started.close()


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_it_outlives_the_agent_and_ends_with_the_job(controller: Controller, tmp_path: Path) -> None:
    memory, out = tmp_path / "memory", tmp_path / "out"
    memory.mkdir()
    out.mkdir()
    settings = {"UNICRON_MEMORY_DIR": str(memory), "OUT": str(out)}
    job = Job(tmp_path, controller.address, "70", 1, ["/bin/sh", "-c", PROGRAM], **settings)
    try:
        wait_for(lambda: lines(out / "counts") == ["1"], "the first start", now=lambda: job.logs)
        job.agents[0].kill()
        job.start(0)
        wait_for(lambda: lines(out / "counts") == ["1", "2"], "a start by the next agent", now=lambda: job.logs)
        (folder,) = set(lines(out / "folders"))
        assert Path(folder).parent == memory and Path(folder).name.startswith("unicron.70.")
        assert Path(folder).name.endswith(f".n0.{os.getuid()}")
        (out / "stop").touch()
        assert job.wait() == [0]
        assert not list(memory.iterdir())
    finally:
        job.close()
