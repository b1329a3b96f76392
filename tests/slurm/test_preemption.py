"""A job whose elements Slurm preempts, with a grace time: their ranks leave at the next boundary, and nobody computes
anything again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.controller import Controller
from tests.support.jobs import AGENT, FOREVER, PLAIN, TINY
from tests.support.processes import ROOT, call, outside_slurm
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm
TIMES = 1
# On two cores two ranks may step as fast as three, and the plan would leave it at that.
SETTINGS = 'slurm = "command"\nslurm_poll_seconds = 0.5\nthroughput = "linear"\n'
CONFIG = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=4 OverSubscribe=EXCLUSIVE",
    "PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF OverSubscribe=EXCLUSIVE",
)
SCRIPT = """#!/bin/bash
export PYTHONPATH={root} UNICRON_CONTROLLER={address} UNICRON_NODE_ADDRESS=127.0.0.1 OMP_NUM_THREADS=1
export UNICRON_RANKS_PER_NODE=1 UNICRON_REGISTER_TIMEOUT=60
export PLAIN_OUT={out} TINY_OUT={out} TINY_SAVE=0 TINY_ITERATIONS={iterations} TINY_SLOW=0.02
exec srun {agent} run -- {python} {script}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path / "slurm", nodes=3, auth="none", config_lines=CONFIG)
    made.up()
    yield made
    made.down()


@pytest.mark.parametrize("program", [TINY, pytest.param(PLAIN, marks=pytest.mark.wide)])
def test_preempted_elements_leave_at_a_boundary_and_come_back(
    cluster: LocalCluster, tmp_path: Path, program: Path
) -> None:
    """A plain program dies of Slurm's SIGTERM; nobody has failed for it."""
    environment = outside_slurm() | cluster.env()
    controller = Controller(tmp_path, SETTINGS, environment)
    script, out = tmp_path / "job.sh", tmp_path / "out"
    out.mkdir()
    said = {"root": ROOT, "address": controller.address, "out": out, "iterations": FOREVER, "script": program}
    script.write_text(SCRIPT.format(**said, agent=" ".join(AGENT), python=AGENT[0]))

    def slurm(*words: str) -> str:
        done = call(*words, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def trains(nodes: int) -> Any:
        job = controller.job()
        return (
            bool(job)
            and job["state"] == "running"
            and len(job["members"]) == nodes
            and (program == PLAIN or job["iteration"] >= 1)
        )

    try:
        options = ["-p", "spot", "-N1", "--gres=gpu:1", "--array=0-2", "--requeue", "--open-mode=append"]
        number = slurm("sbatch", "--parsable", *options, "-o", str(tmp_path / "%a.out"), str(script))
        controller.wait(lambda: trains(3), "all train")
        for _ in range(TIMES):
            urgent = slurm("sbatch", "--parsable", "-p", "urgent", "-N1", "-o", "/dev/null", "--wrap", "sleep 600")
            controller.wait(lambda: trains(2), "two train on")
            controller.wait(
                lambda urgent=urgent: slurm("squeue", "-h", "-j", urgent, "-o", "%T") == "RUNNING",
                "the other job has the node",
            )
            slurm("scancel", urgent)
            controller.wait(lambda: trains(3), "all train again")
        job = controller.job()
        assert job["failures"] == 0 and job["ledger_violations"] == 0, controller.failures()
        # Slurm may preempt a second one while the first is still ending; nobody else is to start again.
        restarts = sum(each.restarts for each in cluster.client().elements() if each.job == number)
        assert TIMES <= len(controller.events("noticed")) == restarts
        slurm("scancel", number)
        controller.wait(lambda: controller.job()["ended"], "it is over")
        job = controller.job()
        assert (job["ended"]["code"], job["failures"]) == (143, 0), (job, controller.failures())
    finally:
        controller.close()
