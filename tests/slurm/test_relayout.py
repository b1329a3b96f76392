"""A job on a real Slurm that can run in two layouts: what a lost node leaves of it goes on in the other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.arrays import ONE_NODE, all_but, submit_training
from tests.support.controller import Controller
from tests.support.jobs import HERE, json_lines
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]
SHARDED = HERE / "tiny_sharded.py"
EVERY = 10  # iterations between two checkpoints
LOSSES = 1e-5  # relative, in fp32


def submit(cluster: LocalCluster, controller: Controller, folder: Path, nodes: int, elements: int) -> None:
    """Elements of one rank for the first `nodes` nodes; the others of the cluster are not for them."""
    options = (*ONE_NODE, f"--array=0-{elements - 1}", *all_but(cluster, nodes))
    layout = {"UNICRON_LAYOUTS": "TP2, TP1", "TINY_LAYERS": 2, "TINY_DISTOPT": 1}
    saves = {"TINY_CHECKPOINTS": folder / "out/saves", "TINY_CHECKPOINT_EVERY": EVERY}
    submit_training(cluster, controller, folder, *options, **layout, **saves)


def test_what_is_left_of_a_replica_goes_on_in_another_layout(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """A replica over two nodes loses one of them, and there is no other."""
    submit(cluster, controller, tmp_path, 2, elements=2)

    def job() -> dict[str, Any]:
        return controller.job()

    def steps() -> list[dict[str, Any]]:
        return json_lines(tmp_path / "out" / "losses.0")

    controller.wait(lambda: job().get("state") == "running" and job()["members"] == [0, 1], "one replica trains")
    assert (job()["layout"], job()["replica"], job()["layouts"]) == ("TP2", 2, ["TP2", "TP1"])
    controller.wait(lambda: len(steps()) > EVERY and len(steps()) % EVERY in (4, 5, 6), "some iterations after a save")
    (node,) = [element["node"] for element in job()["elements"] if element["element"] == 1]
    cluster.power_off(node)
    controller.wait(lambda: job()["layout"] == "TP1" and job()["members"] == [0], "the plan has it go on as TP1")
    controller.wait(lambda: [step["world_size"] for step in steps()[-EVERY:]] == [1] * EVERY, "it gets on")

    pairs = [step for step in steps() if step["world_size"] == 2]
    alone = [step for step in steps() if step["world_size"] == 1]
    last = pairs[-1]["iteration"]
    assert alone[0]["iteration"] == (last + 1) // EVERY * EVERY > 0, "from the newest checkpoint"
    again = {step["iteration"]: step["loss"] for step in alone if step["iteration"] <= last}
    before = {step["iteration"]: step["loss"] for step in pairs if step["iteration"] in again}
    assert len(again) >= 3 and again == pytest.approx(before, rel=LOSSES)
    assert [step["iteration"] for step in alone] == list(range(alone[0]["iteration"], alone[-1]["iteration"] + 1))
    assert job()["ledger_violations"] == 0
    said = controller.ask("explain", job=job()["job"])["decisions"]
    assert any("goes from TP2 to TP1" in decision["reason"] for decision in said)


def test_shard_groups_are_resized_to_what_is_left(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """A group of four nodes loses one of them: two of the others go on as a group of two, from blocks of the whole."""
    options = (*ONE_NODE, "--array=0-3", *all_but(cluster, 4))
    saves = {"TINY_CHECKPOINTS": tmp_path / "out/saves", "TINY_CHECKPOINT_EVERY": EVERY}
    submit_training(cluster, controller, tmp_path, *options, program=SHARDED, UNICRON_LAYOUTS="F4, F2", **saves)

    def job() -> dict[str, Any]:
        return controller.job()

    def steps() -> list[dict[str, Any]]:
        return json_lines(tmp_path / "out" / "losses.0")

    controller.wait(lambda: job().get("state") == "running" and job()["members"] == [0, 1, 2, 3], "one group trains")
    assert (job()["layout"], job()["replica"], job()["layouts"]) == ("F4", 4, ["F4", "F2"])
    controller.wait(lambda: len(steps()) > EVERY and len(steps()) % EVERY in (4, 5, 6), "some iterations after a save")
    (node,) = [element["node"] for element in job()["elements"] if element["element"] == 3]
    cluster.power_off(node)
    controller.wait(lambda: job()["layout"] == "F2" and job()["members"] == [0, 1], "the plan has it go on as F2")
    controller.wait(lambda: [step["world_size"] for step in steps()[-EVERY:]] == [2] * EVERY, "it gets on")

    four = [step for step in steps() if step["world_size"] == 4]
    two = [step for step in steps() if step["world_size"] == 2]
    last = four[-1]["iteration"]
    assert two[0]["iteration"] == (last + 1) // EVERY * EVERY > 0, "from the newest checkpoint"
    again = {step["iteration"]: step["loss"] for step in two if step["iteration"] <= last}
    before = {step["iteration"]: step["loss"] for step in four if step["iteration"] in again}
    assert len(again) >= 3 and again == pytest.approx(before, rel=LOSSES)
    assert job()["ledger_violations"] == 0


def test_a_better_layout_is_begun_from_what_the_ranks_save(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """A third node comes back, of which a replica of two ranks could make no use."""
    client, third = cluster.client(), cluster.spec.node_names[2]
    client.drain(third, "not yet")
    submit(cluster, controller, tmp_path, 3, elements=4)

    def job() -> dict[str, Any]:
        return controller.job()

    def steps() -> list[dict[str, Any]]:
        return json_lines(tmp_path / "out" / "losses.0")

    controller.wait(lambda: job().get("state") == "running" and len(job()["members"]) == 2, "one replica trains")
    assert job()["layout"] == "TP2"
    controller.wait(lambda: len(steps()) > EVERY and len(steps()) % EVERY in (2, 3), "some iterations after a save")
    client.resume(third)
    controller.wait(lambda: job()["layout"] == "TP1" and len(job()["members"]) == 3, "three replicas of one rank train")
    controller.wait(lambda: [step["world_size"] for step in steps()[-3:]] == [3] * 3, "they get on")
    # Whoever starts first in the new layout trains at once, and the others join: of each iteration all say the same.
    said = [json_lines(tmp_path / "out" / f"losses.{slot}") for slot in range(3)]
    for each in said:
        assert len({step["iteration"] for step in each}) == len(each), "a rank computes nothing twice"
    before = {step["iteration"] for each in said for step in each if step["generation"] == 1}
    after = {step["iteration"] for each in said for step in each if step["generation"] > 1}
    assert max(before) + 1 == min(after), "nothing is computed twice: the ranks saved before they ended"
    assert before | after == set(range(max(after) + 1)), "and nothing is left out"
    assert job()["ledger_violations"] == 0 and job()["failures"] == 0
