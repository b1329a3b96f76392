"""Steps of `unicronctl` on nodes: their environment, and what is said where none can start. Their interrupt is in the
tests of who starts them (tests/support/hanging_sruns.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron_ctl.shared.slurm.steps import Steps
from unicron_ctl.shared.system.errors import UserError


def test_a_surrounding_job_and_the_plugin_are_kept_out() -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "SBATCH_PARTITION": "x", "HOME": "/h", "UNICRON": "1"}
    steps = Steps("test-", given)
    assert steps._environment == {"SLURM_CONF": "/c", "HOME": "/h", "UNICRON": "0"}


def test_without_srun_it_says_what_to_install_and_after_the_end_none_is_started(tmp_path: Path) -> None:
    steps = Steps("test-", {"PATH": str(tmp_path)})
    with pytest.raises(UserError, match="apt-get install slurm-client"), steps.running("1", ["srun"]):
        pass
    steps.stop()
    with pytest.raises(UserError, match="interrupted"), steps.running("2", ["sleep", "300"]):
        pass
