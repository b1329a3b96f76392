"""Unmodified scripts of Lightning and Accelerate, the real packages, in restart mode: they take Unicron for torchrun,
not one element's Slurm step for their launcher, and go on from their own checkpoints.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.controller import Controller
from tests.support.jobs import HERE, Job, json_lines
from tests.support.processes import wait_for

pytestmark = pytest.mark.process
FRAMEWORKS = ("lightning", "accelerate")
NODES, STEPS = 2, 40
ACCELERATE = str(Path(sys.executable).with_name("accelerate"))
LAUNCHED = {
    "lightning": [sys.executable],
    "accelerate": [ACCELERATE, "launch", "--cpu", "--mixed_precision", "bf16"],  # left out, but for its variables
}
SETTINGS = "lease_periods = 4\nforming_settle_seconds = 4\njoin_after_seconds = 1\n"
# What srun tells in the step of one element (Slurm 22.05).
STEP = {
    "SLURM_NTASKS": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_NODELIST": "n1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "PMI_SIZE": "1",
    "PMI_RANK": "0",
}


class Run:
    """A job of one of the scripts, of which a rank is killed once it has a checkpoint."""

    def __init__(self, folder: Path, address: str, framework: str, number: str):
        self.out = folder / framework
        self.out.mkdir()
        command = [*LAUNCHED[framework], str(HERE / f"{framework}_train.py"), str(self.out), str(NODES), str(STEPS)]
        self.job = Job(folder, address, number, NODES, command, **STEP, UNICRON_MIN_NODES=str(NODES))
        self._killed = False

    def last(self, rank: int) -> dict[str, Any]:
        """The rank's last step."""
        return (json_lines(self.out / f"steps.{rank}") or [{"step": 0}])[-1]

    def killed(self) -> bool:
        """SIGKILL to the second one, once they train; True when that has been done."""
        if not self._killed and min(map(self.last_step, range(NODES))) > 10:
            os.kill(self.last(1)["pid"], signal.SIGKILL)
            self._killed = True
        return self._killed

    def last_step(self, rank: int) -> int:
        return self.last(rank)["step"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Both at once: most of the time goes into imports."""
    folder = tmp_path_factory.mktemp("frameworks")
    controller = Controller(folder, SETTINGS)
    started: dict[str, Run] = {}
    try:
        for number, framework in enumerate(FRAMEWORKS, 70):
            started[framework] = Run(folder, controller.address, framework, str(number))
        all_killed = lambda: all([run.killed() for run in started.values()])  # noqa: E731
        wait_for(all_killed, "they train", now=lambda: [run.job.logs for run in started.values()])
        yield started
    finally:
        for run in started.values():
            run.job.close()
        controller.close()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.long
def test_a_script_trains_as_one_world_and_goes_on_after_a_kill(runs: dict[str, Run], framework: str) -> None:
    run = runs[framework]
    assert run.job.wait() == [0] * NODES, run.job.logs
    for rank in range(NODES):
        last = run.last(rank)
        assert (last["step"], last["size"]) == (STEPS, NODES)
        assert last["begun"] >= 10, "on from the checkpoint of iteration 10"
