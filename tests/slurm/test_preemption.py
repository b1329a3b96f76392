"""A job whose elements Slurm preempts, with a grace time: their ranks leave at the next boundary, and nobody computes
anything again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.arrays import slurm, submit_training
from tests.support.controller import Controller
from tests.support.jobs import PLAIN, TINY, TINY_PLAIN
from tests.support.processes import outside_slurm
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm
TIMES = 1
# On two cores two ranks may step as fast as three, and the plan would leave it at that.
SETTINGS = 'slurm = "command"\nslurm_poll_seconds = 0.5\nthroughput = "linear"\n'
CONFIG = (
    # Slurm's default. An agent waits for half of it until the controller has seen that Slurm preempts; with the 2 s of
    # the local cluster a busy machine is too late, and an element that ends by itself is not requeued.
    "KillWait=30",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=4 OverSubscribe=EXCLUSIVE",
    "PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF OverSubscribe=EXCLUSIVE",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path / "slurm", nodes=3, auth="none", config_lines=CONFIG)
    made.up()
    yield made
    made.down()


@pytest.mark.parametrize(
    "program",
    [Path(TINY_PLAIN[1]), pytest.param(TINY, marks=pytest.mark.wide), pytest.param(PLAIN, marks=pytest.mark.wide)],
    ids=["session", "megatron", "plain"],
)
def test_preempted_elements_leave_at_a_boundary_and_come_back(
    cluster: LocalCluster, tmp_path: Path, program: Path
) -> None:
    """A plain program dies of Slurm's SIGTERM; nobody has failed for it."""
    controller = Controller(tmp_path, SETTINGS, outside_slurm() | cluster.env())

    def trains(nodes: int) -> Any:
        job = controller.job()
        return (
            bool(job)
            and job["state"] == "running"
            and len(job["members"]) == nodes
            and (program == PLAIN or job["iteration"] >= 1)
        )

    try:
        options = ("-p", "spot", "-N1", "--gres=gpu:1", "--array=0-2")
        given = {"program": program, "TINY_SLOW": 0.2}
        number = submit_training(cluster, controller, tmp_path, *options, launch="srun", **given)
        controller.wait(lambda: trains(3), "all train")
        for _ in range(TIMES):
            urgent = slurm(
                cluster, "sbatch", "--parsable", "-p", "urgent", "-N1", "-o", "/dev/null", "--wrap", "sleep 600"
            )
            controller.wait(lambda: trains(2), "two train on")
            controller.wait(
                lambda urgent=urgent: slurm(cluster, "squeue", "-h", "-j", urgent, "-o", "%T") == "RUNNING",
                "the other job has the node",
            )
            slurm(cluster, "scancel", urgent)
            controller.wait(lambda: trains(3), "all train again")
        job = controller.job()
        assert job["failures"] == 0 and job["ledger_violations"] == 0, controller.failures()
        # Slurm may preempt a second one while the first is still ending; nobody else is to start again.
        restarts = sum(each.restarts for each in cluster.client().elements() if each.job == number)
        assert TIMES <= len(controller.events("noticed")) == restarts
        slurm(cluster, "scancel", number)
        controller.wait(lambda: controller.job()["ended"], "it is over")
        job = controller.job()
        assert (job["ended"]["code"], job["failures"]) == (143, 0), (job, controller.failures())
    finally:
        controller.close()
