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
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm
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


def submit(around: dict[str, str], folder: Path, *words: object) -> str:
    """The template on two nodes, with its checkpoints in the folder and more of its words; the job's id."""
    options = ["--parsable", "--array=0-1", "--gres=gpu:1", "-o", folder / "%A_%a.out", FOLDER / "array.sbatch"]
    all_words = [sys.executable, *WORDS, "--iterations", FOREVER, "--save", folder / "saves", *words]
    submitted = call("sbatch", *options, *all_words, cwd=folder, environment=around)
    assert submitted.returncode == 0, submitted.stderr
    return submitted.stdout.strip()


def two_train(job: dict[str, Any], least: int) -> bool:
    return job.get("members") == [0, 1] and job["state"] == "running" and job["iteration"] >= least


@pytest.mark.wide
def test_a_rank_is_killed_and_the_losses_are_those_of_one_undisturbed_process(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    around = environment(cluster, controller)
    prefix = tmp_path / "metrics" / "first"
    submitted = submit(around, tmp_path, "--metrics", prefix)

    def job() -> dict[str, Any]:
        return controller.job()

    def trains(least: int) -> bool:
        return two_train(job(), least)

    controller.wait(lambda: trains(2), "two ranks train")
    assert job()["mode"] == "session"
    os.kill(controller.rank(1)["pid"], signal.SIGKILL)
    controller.wait(lambda: job()["failures"] == 1, "the kill is seen")
    controller.wait(lambda: trains(0), "the rank is back")
    more = job()["iteration"] + 3
    controller.wait(lambda: trains(more), "they go on")
    call("scancel", "--state=RUNNING", "--signal=USR2", submitted, environment=around)
    controller.wait(lambda: "was saved in" in "".join(path.read_text() for path in tmp_path.glob("*.out")), "a file")
    more = job()["iteration"] + 2
    controller.wait(lambda: trains(more), "nothing ends by that")
    assert job()["failures"] == 1
    call("scancel", "--state=RUNNING", "--signal=USR1", submitted, environment=around)
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


@pytest.mark.long
def test_what_slurm_ends_is_in_the_checkpoints_and_another_job_goes_on_from_there(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """By a plain scancel, long before the script would have saved anything itself."""
    around = environment(cluster, controller)
    first = submit(around, tmp_path)
    controller.wait(lambda: two_train(controller.job(first), 5), "two ranks train")
    reached = controller.job(first)["iteration"]
    assert not (tmp_path / "saves").exists() or not list((tmp_path / "saves").iterdir())
    call("scancel", first, environment=around)

    def states() -> set[str]:
        return {element.state for element in cluster.client().elements() if element.job == first}

    controller.wait(lambda: states() <= {"CANCELLED"}, states)
    second = submit(around, tmp_path, "--metrics", tmp_path / "metrics")
    controller.wait(lambda: two_train(controller.job(second), reached + 2), "it goes on")
    assert read_metrics(tmp_path / "metrics")[0]["iteration"] >= reached
    call("scancel", second, environment=around)
