"""``python -m benchmarks.preemption [--times N]``: what preemptions with a grace time cost a job, on a real Slurm.

A job of three one-node elements trains in the partition `spot`. A job in `urgent` takes one of its nodes and gives it
back, N times, with a grace time of 10 s. From the event log: micro-batches that were computed again, failures, and the
longest time between two steps around a preemption, in iterations of the job before it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.marks import print_figure
from tests.support.controller import Controller
from tests.support.jobs import AGENT, FOREVER, TINY
from tests.support.processes import ROOT, call, outside_slurm
from unicron_ctl.lab.cluster import LocalCluster

NODES, GRACE = 3, 10
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
LIMIT = 180.0


@dataclass
class Site:
    """A cluster with both partitions, a controller, and the job."""

    cluster: LocalCluster
    controller: Controller
    environment: dict[str, str]

    def slurm(self, *words: str) -> str:
        done = call(*words, environment=self.environment)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: {done.stderr}")
        return done.stdout.strip()

    def wait(self, look: Callable[[], Any], what: str) -> None:
        self.controller.wait(look, what, LIMIT)

    def trains(self, nodes: int) -> bool:
        job = self.controller.job()
        return bool(job) and job["state"] == "running" and len(job["members"]) == nodes and job["iteration"] >= 1


def preempt(site: Site) -> None:
    """One node is taken from the job, and given back."""
    words = ("sbatch", "--parsable", "-p", "urgent", "-N1", "-o", "/dev/null", "--wrap", "sleep 600")
    urgent = site.slurm(*words)
    site.wait(lambda: site.trains(NODES - 1), "the others train on")
    site.wait(lambda: site.slurm("squeue", "-h", "-j", urgent, "-o", "%T") == "RUNNING", "the other job has the node")
    site.slurm("scancel", urgent)
    site.wait(lambda: site.trains(NODES), "all train again")


def pauses(events: list[dict[str, Any]]) -> list[float]:
    """For each preemption the longest time between two steps from its notice to the fifth step after it, over the
    median time between the twenty steps before it."""
    steps = [event["time"] for event in events if event["kind"] == "step"]
    found = []
    for at in (event["time"] for event in events if event["kind"] == "noticed"):
        before = [time for time in steps if time <= at][-20:]
        after = [time for time in steps if time > at][:5]
        usual = statistics.median(b - a for a, b in itertools.pairwise(before))
        around = [*before[-1:], *after]
        found.append(max(b - a for a, b in itertools.pairwise(around)) / usual)
    return found


def measure(folder: Path, times: int) -> None:
    """Runs the job and prints the figures."""
    cluster = LocalCluster(folder / "slurm", nodes=NODES, auth="none", config_lines=CONFIG)
    environment = outside_slurm() | cluster.env()
    controller = Controller(folder, SETTINGS, environment)
    site, out = Site(cluster, controller, environment), folder / "out"
    out.mkdir()
    said = {"root": ROOT, "address": controller.address, "out": out, "iterations": FOREVER, "script": TINY}
    (folder / "job.sh").write_text(SCRIPT.format(**said, agent=" ".join(AGENT), python=AGENT[0]))
    try:
        cluster.up()
        options = ["-p", "spot", "-N1", "--gres=gpu:1", f"--array=0-{NODES - 1}", "--requeue", "--open-mode=append"]
        site.slurm("sbatch", *options, "-o", str(folder / "%a.out"), str(folder / "job.sh"))
        site.wait(lambda: site.trains(NODES), "all train")
        events = controller.events()
        for _ in range(times):
            preempt(site)
            events += controller.events(after=events[-1]["id"])  # the log thins its steps out
        job = controller.job()
    finally:
        controller.close()
        cluster.down()
    again = sum(event["recomputed"] for event in events if event["kind"] == "plan")
    print(f"{times} preemptions with {GRACE} s of grace, {job['iteration']} iterations")
    print_figure("micro-batches computed again", float(again), "", most=0)
    print_figure("failures", float(job["failures"]), "", most=0)
    found = pauses(events)
    print_figure("longest pause, in iterations", max(found), "", most=2.0)
    print(f"  median {statistics.median(found):.2f}; 1 is the time from one step to the next without a preemption")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="preemptions")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-preemption-") as folder:
        measure(Path(folder), options.times)


if __name__ == "__main__":
    main()
