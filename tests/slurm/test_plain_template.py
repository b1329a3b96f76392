"""The template of plain PyTorch on a real Slurm: a rank is killed, a checkpoint is asked for, nothing else changes."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from sbatch_templates.training_metrics import read_metrics
from tests.support.controller import Controller
from tests.support.jobs import FOREVER
from tests.support.processes import ROOT, call, outside_slurm
from unicron_ctl.localslurm import LocalCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
FOLDER = ROOT / "sbatch_templates"
WORDS = [FOLDER / "train_plain.py", "--text", FOLDER]
LOSSES = 1e-4  # relative; ranks add the same gradients in another order


def environment(cluster: LocalCluster, controller: Controller) -> dict[str, str]:
    """Without the plugin: the batch script writes the agent out."""
    outside = outside_slurm()
    said = {
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), outside["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "UNICRON_CONTROLLER": controller.address,
        "UNICRON_NODE_ADDRESS": "127.0.0.1",
        "UNICRON_RANKS_PER_NODE": "1",
        "UNICRON_REGISTER_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
    }
    return outside | cluster.env() | said


@pytest.mark.wide
def test_a_rank_is_killed_and_the_losses_are_those_of_one_undisturbed_process(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    around = environment(cluster, controller)
    prefix = tmp_path / "metrics" / "first"
    options = ["--parsable", "--array=0-1", "--gres=gpu:1", "-o", tmp_path / "%a.out", FOLDER / "any_script.sbatch"]
    words = [sys.executable, *WORDS, "--iterations", FOREVER, "--metrics", prefix, "--save", tmp_path / "saves"]
    submitted = call("sbatch", *options, *words, cwd=tmp_path, environment=around)
    assert submitted.returncode == 0, submitted.stderr

    def job() -> dict[str, Any]:
        return controller.job()

    def trains(least: int) -> bool:
        return job().get("members") == [0, 1] and job()["state"] == "running" and job()["iteration"] >= least

    controller.wait(lambda: trains(2), "two ranks train")
    assert job()["mode"] == "session"
    os.kill(controller.rank(1)["pid"], signal.SIGKILL)
    controller.wait(lambda: job()["failures"] == 1, "the kill is seen")
    controller.wait(lambda: trains(0), "the rank is back")
    more = job()["iteration"] + 3
    controller.wait(lambda: trains(more), "they go on")
    call("scancel", "--state=RUNNING", "--signal=USR2", submitted.stdout.strip(), environment=around)
    controller.wait(lambda: "was saved in" in "".join(path.read_text() for path in tmp_path.glob("*.out")), "a file")
    more = job()["iteration"] + 2
    controller.wait(lambda: trains(more), "nothing ends by that")
    call("scancel", "--state=RUNNING", "--signal=USR1", submitted.stdout.strip(), environment=around)
    controller.wait(lambda: (job().get("ended") or {}).get("code") == 0, "all end after the same iteration")
    assert job()["ledger_violations"] == 0

    found = read_metrics(prefix)[:20]
    assert [each["iteration"] for each in found] == list(range(len(found))) and len(found) > 6
    alone = tmp_path / "metrics" / "alone"
    done = call(
        sys.executable, *WORDS, "--iterations", len(found), "--metrics", alone, cwd=tmp_path, environment=around
    )
    assert done.returncode == 0, done.stderr
    wanted = [each["loss"] for each in read_metrics(alone)]
    assert [each["loss"] for each in found] == pytest.approx(wanted, rel=LOSSES)
