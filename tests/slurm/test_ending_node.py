"""A node that is shut down while its job trains: its ports refuse connections, which only shows that the agent is gone;
the job gets another node all the same, and not by slurmctld's finding it out."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.arrays import ONE_NODE, submit_training
from tests.support.controller import Controller, quick_on_slurm
from tests.support.processes import LIMIT, outside_slurm, wait_for
from unicron_ctl.lab.cluster import LocalCluster, cluster_processes

pytestmark = pytest.mark.slurm


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster whose slurmctld takes no node for dead as long as a test lasts."""
    cluster = LocalCluster(tmp_path / "slurm", nodes=4, config_lines=["SlurmdTimeout=3600"])
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def _kill(cluster: LocalCluster, node: str) -> None:
    """As at a shutdown: processes end, and the kernel that is still there refuses what comes for them."""
    cluster_processes.kill_all(lambda: [one for one in cluster.processes() if one.node == node], LIMIT)


def _ask_to_end(cluster: LocalCluster, node: str) -> None:
    """As systemd does, which kills only those that do not."""
    asked = [one for one in cluster.processes() if one.node == node and one.kind in ("slurmd", "task")]
    for one in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGTERM)
    wait_for(lambda: not any(cluster_processes.is_alive(one.pid) for one in asked), "they have ended")
    _kill(cluster, node)


@pytest.mark.parametrize(
    "end", [pytest.param(_kill, marks=pytest.mark.wide), pytest.param(_ask_to_end, marks=pytest.mark.long)]
)
def test_a_node_whose_ports_refuse_for_good_is_replaced(
    end: Callable[[LocalCluster, str], None], patient: LocalCluster, tmp_path: Path
) -> None:
    controller = Controller(tmp_path, quick_on_slurm("act"), outside_slurm() | patient.env())
    try:
        submit_training(patient, controller, tmp_path, *ONE_NODE, "--array=0-2")

        def job() -> dict[str, Any]:
            return controller.job()

        def trains() -> bool:
            return (job().get("members"), job().get("state")) == ([0, 1, 2], "running")

        controller.wait(lambda: trains() and job()["iteration"] > 2, "three train")
        (node,) = [element["node"] for element in job()["elements"] if element["element"] == 1]
        (free,) = set(patient.spec.node_names) - {element["node"] for element in job()["elements"]}
        last = controller.events()[-1]["id"]
        end(patient, node)

        def came() -> list[dict[str, Any]]:
            return [e for e in controller.events("agent_registered") if e["id"] > last and e["element"] == 1]

        controller.wait(came, "the element has another agent", LIMIT)
        controller.wait(trains, "the job is whole again", LIMIT)
        (agent,) = came()
        (failure,) = [one for one in controller.failures() if one["id"] > last and one["node"] == node]
        assert (failure["kind"], failure["element"]) == ("agent", 1)
        known = "nothing else of its node has answered" if end is _kill else "stopped by SIGTERM"
        assert known in failure["reason"] and "slurmd refused" in failure["reason"]
        assert agent["node"] == free
        after = [e for e in controller.events("failure_detected", "node_lost", "slurm_action") if e["id"] > last]
        told = [e["action"] if e["kind"] == "slurm_action" else e["kind"] for e in after if e["node"] == node]
        assert [what for what in told if what != "requeue"] == ["failure_detected", "node_lost", "down"]
        assert all(e["id"] < agent["id"] for e in after), "all of it before the other agent came"
        (shown,) = [one for one in patient.client().nodes() if one.name == node]
        assert "DOWN" in shown.states and shown.reason.startswith("unicron[node_problem]"), "Slurm was told"
        assert job()["ledger_violations"] == 0
    finally:
        controller.close()
