"""Slurm's less usual states, brought about in a real Slurm."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.jobs import sleepers
from tests.support.processes import call, outside_slurm
from unicron_ctl.controller.plan.reconcile import GONE_SECONDS
from unicron_ctl.lab.cluster import LocalCluster

pytestmark = pytest.mark.slurm


def test_a_job_in_special_exit_is_held_and_trains_on_after_its_release(
    cluster: LocalCluster, controller: Controller, tmp_path: Path
) -> None:
    """`scontrol requeuehold State=SpecialExit` on every element: the job has not ended, and nobody but its user
    releases it."""
    environment = outside_slurm() | cluster.env()

    def slurm(*words: str) -> str:
        done = call(*words, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def runs() -> bool:
        found = controller.job()
        return (found.get("state"), found.get("nodes")) == ("running", 2)

    options = ["--parsable", "-N1", "--exclusive", "--requeue", "--array=0-1", "-o", "/dev/null"]
    job = slurm("sbatch", *options, sleepers(tmp_path, controller))
    controller.wait(runs, "both elements run")
    slurm("scontrol", "requeuehold", "State=SpecialExit", job)
    states = ["squeue", "-h", "-r", "-j", job, "-o", "%T"]
    controller.wait(lambda: slurm(*states).split() == ["SPECIAL_EXIT"] * 2, "Slurm holds both")

    def waits() -> list[dict]:
        return controller.ask("explain", job=job)["waiting"]

    controller.wait(lambda: [found["elements"] for found in waits()] == [[0, 1]], "both are known to wait")
    assert waits()[0]["words"] == "it is held" and not waits()[0]["starts"]
    time.sleep(GONE_SECONDS + 2)  # after this a job is over of which Slurm shows nothing: it must stay so
    assert not controller.events("job_ended") and slurm(*states).split() == ["SPECIAL_EXIT"] * 2
    slurm("scontrol", "release", job)
    controller.wait(runs, "both run again")
