"""Munge as Slurm has it: unicrond and agents find munged by slurm.conf, and the controller's key by munge."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.controller import Controller
from tests.support.processes import ROOT, outside_slurm
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm


def test_a_job_s_agent_is_known_by_its_key(cluster: LocalCluster, tmp_path, monkeypatch) -> None:
    """Nothing but the controller's address is handed to the job."""
    conf = str(cluster.layout.slurm_conf)
    for name in ("MUNGE_SOCKET", "UNICRON_PUBLIC_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CONF", conf)
    controller = Controller(tmp_path, 'auth = "munge"\n', outside_slurm() | {"SLURM_CONF": conf})
    script = tmp_path / "job.sh"
    agent = f"{controller.command[0]} -m unicron_ctl.agent.start.agent_main run -- sleep 600"
    script.write_text(
        f"#!/bin/bash\nexport PATH=$PATH:/usr/bin:/bin PYTHONPATH={ROOT} SLURM_CONF={conf} UNICRON_MODE=session "
        f"UNICRON_CONTROLLER={controller.address} UNICRON_REGISTER_TIMEOUT=80\nsrun {agent}\n"
    )
    submit = ["sbatch", "--parsable", "-N1", f"--output={tmp_path}/out", str(script)]
    done = subprocess.run(
        submit, env=os.environ | cluster.env(), capture_output=True, text=True, timeout=30, check=True
    )
    job = done.stdout.strip()
    try:
        controller.wait(lambda: controller.job(job), lambda: (tmp_path / "out").read_text())
        (registered,) = controller.events("agent_registered", job=job)
        assert len(registered["key"]) == 40
    finally:
        controller.close()
