"""Preemptions with a grace time on a real Slurm: repeated micro-batches, failures, and pauses.

A job of three one-node elements trains in the partition `spot`. Again and again a job in `urgent` takes one of its
nodes. The figures come from the event log; a pause is the longest time between two steps around a preemption, in
iterations of the job before it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Report
from tests.support.controller import Controller
from tests.support.jobs import AGENT, FOREVER, TINY
from tests.support.processes import ROOT, call, outside_slurm
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
SCRIPT = """#!/bin/bash
export PYTHONPATH={root} UNICRON_CONTROLLER={address} UNICRON_NODE_ADDRESS=127.0.0.1 OMP_NUM_THREADS=1
export UNICRON_RANKS_PER_NODE=1 UNICRON_REGISTER_TIMEOUT=60
export TINY_OUT={out} TINY_SAVE=0 TINY_ITERATIONS={iterations} TINY_SLOW=0.1
exec srun {agent} run -- {python} {script}
"""


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


@dataclass
class Site:
    """A cluster with both partitions, and a controller."""

    controller: Controller
    environment: dict[str, str]

    def slurm(self, *words: str) -> str:
        """Return the output of a command of Slurm's."""
        done = call(*words, environment=self.environment)
        assert not done.returncode, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def trains(self, nodes: int) -> bool:
        """Return whether the job trains on so many nodes."""
        job = self.controller.job()
        return bool(job) and job["state"] == "running" and len(job["members"]) == nodes and job["iteration"] >= 1

    def preempt(self) -> None:
        """Take one node from the job and give it back."""
        words = ("sbatch", "--parsable", "-p", "urgent", "-N1", "-o", "/dev/null", "--wrap", "sleep 600")
        urgent, wait = self.slurm(*words), self.controller.wait
        state = ("squeue", "-h", "-j", urgent, "-o", "%T")
        wait(lambda: self.trains(NODES - 1), "the others train on", LIMIT)
        wait(lambda: self.slurm(*state) == "RUNNING", "the other job has the node", LIMIT)
        self.slurm("scancel", urgent)
        wait(lambda: self.trains(NODES), "all train again", LIMIT)


def preempted_job(folder: Path, times: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the job at its end, and all events."""
    cluster = LocalCluster(folder / "slurm", nodes=NODES, auth="none", config_lines=CONFIG)
    environment = outside_slurm() | cluster.env()
    site = Site(Controller(folder, SETTINGS, environment), environment)
    out = folder / "out"
    out.mkdir()
    words = {"root": ROOT, "address": site.controller.address, "out": out, "iterations": FOREVER, "script": TINY}
    (folder / "job.sh").write_text(SCRIPT.format(**words, agent=" ".join(AGENT), python=AGENT[0]))
    try:
        cluster.up()
        options = ["-p", "spot", "-N1", "--gres=gpu:1", f"--array=0-{NODES - 1}", "--requeue", "--open-mode=append"]
        site.slurm("sbatch", *options, "-o", str(folder / "%a.out"), str(folder / "job.sh"))
        site.controller.wait(lambda: site.trains(NODES), "all train", LIMIT)
        events = site.controller.events()
        for _ in range(times):
            site.preempt()
            events += site.controller.events(after=events[-1]["id"])  # before the log is thinned
        return site.controller.job(), events
    finally:
        site.controller.close()
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
