"""Replicas on a real Slurm: a pipeline over two nodes loses one of them, and is whole again with a spare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.arrays import ONE_NODE, submit_training
from tests.support.controller import Controller
from tests.support.jobs import json_lines
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm


@pytest.mark.wide
@pytest.mark.parametrize("silent", [0, 1], ids=["", "collectives of a broken generation give garbage, as NCCL's"])
def test_a_pipeline_over_nodes_that_loses_one(
    cluster: LocalCluster, controller: Controller, tmp_path: Path, silent: int
) -> None:
    # Two replicas of two stages, each over two nodes.
    layout = {"TINY_LAYOUT": "1 2 1", "TINY_DISTOPT": 1, "TINY_SILENT": silent}
    submit_training(cluster, controller, tmp_path, *ONE_NODE, "--array=0-3", **layout)

    def job() -> dict[str, Any]:
        return controller.job()

    def trained(slot: int) -> int:
        return len(json_lines(tmp_path / "out" / f"losses.{slot}"))

    controller.wait(lambda: job().get("state") == "running" and len(job()["members"]) == 4, "two replicas train")
    before = trained(0)
    controller.wait(lambda: trained(0) > before + 2, "they get on")
    (node,) = [element["node"] for element in job()["elements"] if element["element"] == 3]
    cluster.power_off(node)
    controller.wait(lambda: job()["members"] == [0, 1], "the other replica goes on")
    alone = trained(0)
    controller.wait(lambda: job()["standbys"] == [2], "the first stage of the broken one keeps its state")
    controller.wait(lambda: len(job()["members"]) == 4, "a spare node completes the replica again")
    (instead,) = [e["node"] for e in job()["elements"] if e["element"] == 3 and not e["gone"]]
    assert instead != node
    together = trained(3)
    controller.wait(lambda: trained(3) > together + 1 and trained(0) > alone + 1, "all of them train")
    assert job()["ledger_violations"] == 0
