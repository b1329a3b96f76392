"""Listing a long queue on a real Slurm of this machine: this interpreter's seconds, and slurmctld's microseconds.

Arrays of others and one of our own wait in a private cluster. The seconds are CPU time of this process with its
threads, and not of Slurm's programs, for a usual listing, for the whole queue, and for a placement of the own array;
slurmctld's own microseconds for what these ask it (sdiag) stand beside those of `squeue --me`.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.report import Report
from unicron_ctl.controller.plan.placement import Need, place
from unicron_ctl.lab.cluster import LocalCluster


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    elements: int = 100_000
    """Waiting elements of others."""
    own: int = 100_000
    """Waiting elements of our own array."""
    rounds: int = 5


SMALLEST = Sizes(100, 100, 1)
OF_AN_ARRAY = 4000  # elements of others
RPC = re.compile(r"(REQUEST_\w+)\s*\(\s*\d+\)\s*count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)")


def measure(sizes: Sizes, report: Report) -> None:
    """Fill the queue and list it."""
    most = max(sizes.own, OF_AN_ARRAY) + 1
    lines = (f"MaxJobCount={2 * (sizes.elements + sizes.own) + 1000}", f"MaxArraySize={most}")
    with tempfile.TemporaryDirectory(prefix="queue-") as folder:
        cluster = LocalCluster(Path(folder) / "state", nodes=8, gpus_per_node=0, config_lines=lines)
        try:
            cluster.up()
            list_queue(cluster, sizes, report)
        finally:
            cluster.down()


def list_queue(cluster: LocalCluster, sizes: Sizes, report: Report) -> None:
    """Measure each listing."""
    environment, client = {**os.environ, **cluster.env()}, cluster.client()

    def run_command(*words: str) -> str:
        done = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    def submit(count: int) -> str:
        return run_command(
            "sbatch", "--parsable", "--begin=now+10hours", f"--array=0-{count - 1}", "-N1", "--wrap", "sleep 1"
        )

    def slurmctld_microseconds() -> int:
        totals = {
            name: int(total) for name, _, total in reversed(RPC.findall(run_command("sdiag")))
        }  # by kind, not by user
        return sum(total for name, total in totals.items() if name != "REQUEST_STATS_INFO")

    for first in range(0, sizes.elements, OF_AN_ARRAY):
        submit(min(OF_AN_ARRAY, sizes.elements - first))
    mine = {submit(sizes.own)}
    nodes, listed = client.nodes(), client.elements(mine)
    client.others(mine)
    works: dict[str, Callable[[], object]] = {
        "a usual listing": lambda: (client.nodes(), client.elements(mine)),
        "the whole queue": lambda: client.others(mine),
        "squeue --me": lambda: run_command("squeue", "--me", "--noheader"),
        "a placement": lambda: place([Need(job, desired=8) for job in mine], listed, nodes),
    }
    for name, work in works.items():
        before, began, passed = slurmctld_microseconds(), time.process_time(), time.monotonic()
        for _ in range(sizes.rounds):
            work()
        seconds, passed = (end / sizes.rounds for end in (time.process_time() - began, time.monotonic() - passed))
        asked = (slurmctld_microseconds() - before) / sizes.rounds
        report.figure(f"{name}: this interpreter", 1e3 * seconds, "ms")
        report.figure(f"{name}: by the clock", 1e3 * passed, "ms")
        report.figure(f"{name}: slurmctld", asked / 1e3, "ms")
