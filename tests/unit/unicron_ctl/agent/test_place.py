"""What an agent reads of its place in Slurm's environment."""

from __future__ import annotations

import pytest

from unicron_ctl.agent.place import read_place

SLURM = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURMD_NODENAME": "n2", "SLURM_STEP_ID": "3"}


@pytest.mark.parametrize(("first", "step"), [("0", 3), ("3", 0), ("2", 1), ("9", 0)])
def test_steps_that_a_restart_only_uses_up_are_not_counted(first, step):
    assert read_place(SLURM | {"UNICRON_FIRST_STEP": first}, "tcp://127.0.0.1:7451").step == step
