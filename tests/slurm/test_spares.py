"""A job with a hot spare on a real Slurm: a node is powered off, the spare is in before Slurm has done anything, and
Slurm refills the spare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.arrays import ONE_NODE, all_but, submit_training
from tests.support.controller import Controller
from tests.support.jobs import json_lines
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm


@pytest.mark.wide
def test_a_lost_node_is_replaced_by_the_spare_and_slurm_refills_the_spare(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    options = (*ONE_NODE, "--array=0-3", *all_but(cluster, 5))
    submit_training(cluster, controller, tmp_path, *options, UNICRON_SPARES=1)

    def job() -> dict[str, Any]:
        return controller.job()

    controller.wait(lambda: job().get("spares_ready") == 1 and len(job()["members"]) == 3, "three train, one is ready")
    controller.wait(lambda: job()["planned_nodes"] == 4, "the plan has nodes for all four")
    (spare,), members = job()["spares"], job()["members"]
    lost = members[1]
    (node,) = [element["node"] for element in job()["elements"] if element["element"] == lost]
    last = controller.events()[-1]["id"]
    cluster.power_off(node)
    left = sorted({*members, spare["element"]} - {lost})
    controller.wait(lambda: (job()["members"], job()["state"]) == (left, "running"), "the spare is in")
    trained = job()["iteration"]
    controller.wait(lambda: job()["iteration"] > trained + 2, "and trains")
    assert json_lines(tmp_path / "out" / f"losses.{spare['element']}"), "the spare itself has stepped"

    kinds = [
        (e["kind"], e.get("action")) for e in controller.events("entered", "offer", "slurm_action") if e["id"] > last
    ]
    whole = [kind for kind, _ in kinds].index("offer")
    started = [place for place, (_, action) in enumerate(kinds) if action in ("pin", "requeue", "release")]
    assert all(place > whole for place in started), f"no element is started for the swap: {kinds}"

    controller.wait(
        lambda: [one["element"] for one in job()["spares"] if one["state"] == "ready"] == [lost], "refilled"
    )
    assert job()["members"] == left and job()["ledger_violations"] == 0
    (failure,) = controller.failures()
    assert failure["node"] == node and failure["whole_at"] and failure["restored_at"] is None
    (again,) = [element["node"] for element in job()["elements"] if element["element"] == lost]
    assert again != node and again in cluster.spec.node_names[:5]
