"""Several steps of one batch script: the job is the one whose command trains, not the first."""

from __future__ import annotations

import pytest

from tests.support.controller import Controller
from tests.support.jobs import Job, scripted
from tests.support.processes import wait_for

pytestmark = pytest.mark.process
MONITOR = "import os, time\nprint('watching as rank', os.environ.get('RANK'), flush=True)\ntime.sleep(600)\n"
# What it is about shows in its imports; here they need not be there.
TRAINING = "import time\ntry:\n    import some_framework\nexcept ImportError:\n    time.sleep(600)\n"


@pytest.fixture
def controller(tmp_path):
    started = Controller(tmp_path)
    yield started
    started.close()


def test_a_monitor_that_came_first_is_not_the_job(controller, tmp_path):
    """Defect: the training had to wait for a helper in the background, and trained unprotected after 10 s."""
    for name in ("monitor", "training"):
        (tmp_path / name).mkdir()
    job = Job(tmp_path, controller.address, "40", 1, scripted(tmp_path / "monitor", MONITOR), SLURM_STEP_ID="0")
    monitor = job.agents[0]
    try:
        before = controller.wait(lambda: controller.rank(0, "40").get("pid"), "the monitor is taken for the job")
        training = job.start(0, scripted(tmp_path / "training", TRAINING), SLURM_STEP_ID="1")

        def trains() -> bool:
            rank = controller.rank(0, "40")
            return rank.get("pid", 0) not in (0, before) and controller.job("40")["state"] == "running"

        controller.wait(trains, lambda: f"the training is the job\n{training.log}")
        wait_for(lambda: "step 1 is the job; this step goes on unprotected" in monitor.log, "the monitor's log says so")
        assert monitor.alive and training.alive and "unprotected" not in training.log
        assert monitor.log.count("watching as rank") == 1, "it was not disturbed"
    finally:
        monitor.kill()
        job.close()


def test_a_monitor_that_comes_later_runs_beside_the_job(controller, tmp_path):
    for name in ("monitor", "training"):
        (tmp_path / name).mkdir()
    job = Job(tmp_path, controller.address, "40", 1, scripted(tmp_path / "training", TRAINING), SLURM_STEP_ID="0")
    training = job.agents[0]
    try:
        pid = controller.wait(lambda: controller.rank(0, "40").get("pid"), "the training is the job")
        monitor = job.start(0, scripted(tmp_path / "monitor", MONITOR), SLURM_STEP_ID="1")
        wait_for(
            lambda: "watching as rank None" in monitor.log,
            lambda: f"it runs at once, as without Unicron\n{monitor.log}",
            45.0,
        )
        assert "trains nothing, and step 0 is the job" in monitor.log
        assert controller.rank(0, "40")["pid"] == pid and training.alive
    finally:
        training.kill()
        job.close()
