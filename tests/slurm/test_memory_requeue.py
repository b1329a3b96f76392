"""An element of a real job is requeued, and the job goes on from its nodes' memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.arrays import ONE_NODE, slurm, submit_training
from tests.support.controller import Controller
from tests.support.jobs import json_lines
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm


def test_an_element_that_is_requeued_goes_on_with_what_the_nodes_have_in_memory(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """Each of two nodes has half of the model, and there are no files."""
    options = (*ONE_NODE, "--array=0-1")
    number = submit_training(cluster, controller, tmp_path, *options, TINY_LAYOUT="2 1 1")

    def trains(least: int) -> bool:
        job = controller.job()
        return bool(job) and (job["members"], job["state"]) == ([0, 1], "running") and job["iteration"] >= least

    controller.wait(lambda: trains(1), "both halves train")
    controller.wait(lambda: len(_copied(cluster)) >= 2, "each has a copy in the other node")
    generation, least = controller.job()["generation"], min(_copied(cluster))
    controller.wait(lambda: trains(least + 3), "and they train on")
    slurm(cluster, "scontrol", "requeue", f"{number}_1")
    controller.wait(lambda: controller.job()["generation"] > generation and trains(least), "on again")
    plan = next(event["plan"] for event in controller.events("plan") if event["generation"] > generation)
    assert plan["iteration"] >= least and plan["members"] == [0, 1]
    before = {row["iteration"]: row["loss"] for row in json_lines(tmp_path / "out/losses.0")}
    last = max(before)
    controller.wait(lambda: trains(last + 2), "it trains on")
    assert controller.job()["ledger_violations"] == 0


@pytest.mark.wide
def test_an_allocation_that_loses_its_batch_host_goes_on_with_what_the_others_have_in_memory(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """Without --no-kill Slurm requeues the whole job, on other nodes."""
    options = ("-N2", "--exclusive", "--gres=gpu:1")
    number = submit_training(cluster, controller, tmp_path, *options, launch="srun")

    def trains(least: int) -> bool:
        job = controller.job()
        return bool(job) and (len(job["members"]), job["state"]) == (2, "running") and job["iteration"] >= least

    controller.wait(lambda: trains(5), "both train")
    generation, node = controller.job()["generation"], slurm(cluster, "squeue", "-h", "-j", number, "-o", "%B")
    cluster.power_off(node)
    slurm(cluster, "scontrol", "update", f"nodename={node}", "state=down", "reason=power")
    controller.wait(lambda: controller.job()["generation"] > generation and trains(6), "on again")
    assert slurm(cluster, "squeue", "-h", "-j", number, "-O", "RestartCnt") == "1"
    plan = next(e["plan"] for e in reversed(controller.events("plan")) if e["plan"]["members"] == [0, 1])
    assert plan["iteration"] >= 5, "it begins where it was, and there are no files"


def _copied(cluster: LocalCluster) -> list[int]:
    """The iterations of which there are copies: the last number in their names."""
    found = cluster.layout.memory_dir.glob("*/unicron.*/copy-*.image")
    return [int(path.stem.rsplit("-", 1)[1]) for path in found]
