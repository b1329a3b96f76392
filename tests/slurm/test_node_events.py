"""What nodes and Slurm itself say, acted upon in a real Slurm: real agents with idle ranks, a real unicrond; a FIFO
stands for each node's kernel log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.slurm.conftest import wait_until
from unicron_ctl.protocol.client import ask

ROOT = Path(__file__).resolve().parents[2]
GPU_LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
CONFIG = '[controller]\nauth = "none"\nslurm = "command"\nslurm_poll_seconds = 0.5\nmax_isolated_job_share = 1.0\n'
LIMIT = 60.0


@pytest.fixture
def job(cluster, tmp_path):
    """An array of three elements whose agents keep a sleeping rank each, and their controller."""
    (tmp_path / "unicron.toml").write_text(CONFIG)
    for node in cluster.spec.node_names:
        os.mkfifo(tmp_path / f"kmsg.{node}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNICRON", "SLURM"))}
    environment = kept | cluster.env() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "unicron_ctl.controller.main", "--config", str(tmp_path / "unicron.toml")]
    command += ["--listen", "tcp://127.0.0.1:0", "--state-dir", str(tmp_path / "state")]
    with (tmp_path / "log").open("w") as log:
        unicrond = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        address = unicrond.stdout.readline().split()[-1]
        script = tmp_path / "job.sh"
        script.write_text(
            "#!/bin/bash\n"
            f"export PYTHONPATH={ROOT} UNICRON_CONTROLLER={address} UNICRON_NODE_ADDRESS=127.0.0.1\n"
            f"export UNICRON_RANKS_PER_NODE=1 UNICRON_REGISTER_TIMEOUT=30\n"
            f"export UNICRON_KMSG={tmp_path}/kmsg.$SLURMD_NODENAME\n"
            f"echo $$ > {tmp_path}/pid.$SLURM_ARRAY_TASK_ID\n"
            f"exec {sys.executable} -m unicron_ctl.agent.main run -- sleep 600\n"
        )
        done = subprocess.run(
            ["sbatch", "--parsable", "-N1", "--exclusive", "--gres=gpu:1", "--array=0-2", "-o", "/dev/null", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        told = SimpleNamespace(id=done.stdout.strip(), folder=tmp_path)
        told.ask = lambda kind, **more: ask({"kind": kind, **more}, address, timeout=20)
        told.agents = lambda: {e["element"]: e["node"] for job in told.ask("jobs") for e in job["elements"]}
        wait_until(lambda: len(told.agents()) == 3, "three agents", (tmp_path / "log").read_text, LIMIT)
        wait_until(lambda: told.ask("nodes")[0]["states"], "a listing of Slurm's", lambda: told.ask("nodes"), LIMIT)
        yield told
    finally:
        unicrond.terminate()
        unicrond.wait(20)
        unicrond.stdout.close()


def failures(job, element: int) -> list[dict]:
    return [failure for failure in job.ask("status")["failures"] if failure["element"] == element]


def test_the_kernels_word_sets_a_node_down_and_slurms_word_explains_lost_agents(cluster, job):
    client, node = cluster.client(), job.agents()[1]
    with (job.folder / f"kmsg.{node}").open("w") as log:
        log.write(f"3,1,2,-;{GPU_LOST}\n")

    def down() -> bool:
        return any("DOWN" in info.states and "fallen off the bus" in info.reason for info in client.nodes())

    wait_until(down, f"{node} down", client.nodes, LIMIT)
    (failure,) = failures(job, 1)
    assert (failure["node"], failure["severity"], failure["cause"]) == (node, 1, "gpu_lost")
    assert [info.name for info in client.nodes() if "DOWN" in info.states] == [node]

    client.cancel(job.id, 2)
    os.kill(int((job.folder / "pid.0").read_text()), signal.SIGKILL)
    look = lambda: job.ask("status")["failures"]  # noqa: E731

    def explained(element: int, word: str) -> bool:
        return any(f"{job.id}_{element} is {word}" in failure["reason"] for failure in failures(job, element))

    wait_until(lambda: explained(2, "CANCELLED"), "Slurm's word on the cancelled element", look, LIMIT)
    wait_until(lambda: explained(0, "FAILED"), "Slurm's word on the killed agent", look, LIMIT)
    assert failures(job, 0)[0]["cause"] == "killed_from_outside", failures(job, 0)
    assert len(failures(job, 1)) == 1, "the node that was put aside is told of once"
