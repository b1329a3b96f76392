"""Preemptions with a grace time on a real Slurm: repeated micro-batches, failures, and pauses.

A job of three one-node elements trains in the partition `spot`. Again and again a job in `urgent` takes one of its
nodes. The figures come from the event log; a pause is the longest time between two steps around a preemption, in
iterations of the job before it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Report
from tests.support.arrays import slurm, submit_training
from tests.support.controller import Controller
from tests.support.processes import outside_slurm
from unicron_ctl.lab.cluster import LocalCluster


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    times: int = 10
    """Preemptions; the promised figure is of 100."""


SMALLEST = Sizes(1)
NODES, GRACE, LIMIT = 3, 10, 180.0
CONFIG = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    f"PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE} OverSubscribe=EXCLUSIVE",
    "PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF OverSubscribe=EXCLUSIVE",
)
SETTINGS = 'slurm = "command"\nslurm_poll_seconds = 0.5\nthroughput = "linear"\n'


def measure(sizes: Sizes, report: Report) -> None:
    """Run the job and preempt it."""
    with tempfile.TemporaryDirectory(prefix="unicron-preemption-") as name:
        job, events = preempted_job(Path(name), sizes.times)
    again = sum(event["recomputed"] for event in events if event["kind"] == "plan")
    found = pauses(events)
    report.text(f"{sizes.times} preemptions with {GRACE} s of grace, {job['iteration']} iterations")
    report.figure("micro-batches computed again", float(again), most=0)
    report.figure("failures", float(job["failures"]), most=0)
    report.figure("longest pause, in iterations", max(found), most=2.0)
    report.figure("median pause; 1 is a step without a preemption", statistics.median(found))


def preempted_job(folder: Path, times: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the job at its end, and all events."""
    cluster = LocalCluster(folder / "slurm", nodes=NODES, auth="none", config_lines=CONFIG)
    controller = Controller(folder, SETTINGS, outside_slurm() | cluster.env())

    def await_training(nodes: int) -> None:
        def trains() -> bool:
            job = controller.job()
            return bool(job) and job["state"] == "running" and len(job["members"]) == nodes and job["iteration"] >= 1

        controller.wait(trains, f"the job trains on {nodes} nodes", LIMIT)

    try:
        cluster.up()
        options = ("-p", "spot", "-N1", "--gres=gpu:1", f"--array=0-{NODES - 1}")
        submit_training(cluster, controller, folder, *options, launch="srun")
        await_training(NODES)
        events = controller.events()
        urgent = ("sbatch", "--parsable", "-p", "urgent", "-N1", "-o", "/dev/null", "--wrap", "sleep 600")
        for _ in range(times):
            number = slurm(cluster, *urgent)
            await_training(NODES - 1)
            state = ("squeue", "-h", "-j", number, "-o", "%T")
            controller.wait(lambda state=state: slurm(cluster, *state) == "RUNNING", "the other job runs", LIMIT)
            slurm(cluster, "scancel", number)
            await_training(NODES)
            events += controller.events(after=events[-1]["id"])  # before the log is thinned
        return controller.job(), events
    finally:
        controller.close()
        cluster.down()


def pauses(events: list[dict[str, Any]]) -> list[float]:
    """Return for each preemption the longest time between two steps, from its notice to the fifth step after it.

    The unit is the median time between the twenty steps before it.
    """
    steps = [event["time"] for event in events if event["kind"] == "step"]
    found = []
    for at in (event["time"] for event in events if event["kind"] == "noticed"):
        before = [time for time in steps if time <= at][-20:]
        around = [*before[-1:], *[time for time in steps if time > at][:5]]
        usual = statistics.median(b - a for a, b in itertools.pairwise(before))
        found.append(max(b - a for a, b in itertools.pairwise(around)) / usual)
    return found
