"""python -m benchmarks.queue: what a listing costs while the queue is long, on a real Slurm of this machine.

Arrays of others and one of our own wait in a private cluster. Measured are the seconds of this interpreter (user and
system time of this process with its threads, and not of Slurm's programs) for a usual listing, for the whole queue, and
for a placement of the own array; and slurmctld's own microseconds for what these ask it (sdiag), beside those of
`squeue --me`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicron_ctl.controller.plan.placement import Need, place
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.shared.slurm import CommandLineClient

OF_AN_ARRAY = 4000  # elements of others


def seconds_of(work: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The medians of this process's own processor time and of the time that passes."""
    own, passed = [], []
    for _ in range(rounds):
        cpu, clock = time.process_time(), time.monotonic()
        work()
        own.append(time.process_time() - cpu)
        passed.append(time.monotonic() - clock)
    return statistics.median(own), statistics.median(passed)


def rpcs(environment: dict[str, str]) -> dict[str, tuple[int, int]]:
    """slurmctld's own count and microseconds by kind of question."""
    said = subprocess.run(["sdiag"], env=environment, capture_output=True, text=True, check=True, timeout=30).stdout
    found = re.findall(r"(REQUEST_\w+)\s*\(\s*\d+\)\s*count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)", said)
    return {name: (int(count), int(total)) for name, count, total in found[: len({name for name, *_ in found})]}


def costs(environment: dict[str, str], work: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """What a piece of work costs here and in slurmctld, each time."""
    before = rpcs(environment)
    own, passed = seconds_of(work, rounds)
    after = rpcs(environment)
    asked = {
        name: (count - before.get(name, (0, 0))[0], total - before.get(name, (0, 0))[1])
        for name, (count, total) in after.items()
        if name != "REQUEST_STATS_INFO"
    }
    micros = sum(total for _, total in asked.values()) / rounds
    return {
        "interpreter_seconds": round(own, 4),
        "seconds": round(passed, 3),
        "rpcs": sum(count for count, _ in asked.values()) / rounds,
        "slurmctld_microseconds": round(micros),
    }


def measure(elements: int, own: int, rounds: int) -> dict[str, Any]:
    """All figures, on a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="queue-") as folder:
        lines = (f"MaxJobCount={2 * (elements + own) + 1000}", f"MaxArraySize={max(own, OF_AN_ARRAY) + 1}")
        cluster = LocalCluster(Path(folder) / "state", nodes=8, gpus_per_node=0, config_lines=lines)
        try:
            cluster.up()
            environment = {**os.environ, **cluster.env()}
            others = [_submit(environment, OF_AN_ARRAY) for _ in range(elements // OF_AN_ARRAY)]
            return figures(cluster.client(), environment, {_submit(environment, own)}, len(others), rounds)
        finally:
            cluster.down()


def figures(
    client: CommandLineClient, environment: dict[str, str], mine: set[str], arrays: int, rounds: int
) -> dict[str, Any]:
    nodes = client.nodes()
    client.others(mine)
    listed = client.elements(mine)
    me = ["squeue", "--me", "--noheader"]
    return {
        "arrays_of_others": arrays,
        "own_jobs": len(mine),
        "own_elements_read": len(listed),
        "usual_listing": costs(environment, lambda: (client.nodes(), client.elements(mine)), rounds),
        "whole_queue": costs(environment, lambda: client.others(mine), rounds),
        "squeue_me": costs(
            environment,
            lambda: subprocess.run(me, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=60),
            rounds,
        ),
        "placement_seconds": round(
            seconds_of(lambda: place([Need(job, desired=8) for job in mine], listed, nodes), rounds)[0], 4
        ),
    }


def _submit(environment: dict[str, str], count: int) -> str:
    words = ["sbatch", "--parsable", "--begin=now+10hours", f"--array=0-{count - 1}", "-N1", "--wrap", "sleep 1"]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=True, timeout=60, cwd="/"
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue", description=__doc__)
    parser.add_argument("--elements", type=int, default=100_000, help="of others")
    parser.add_argument("--own", type=int, default=100_000, help="of our own array")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    found = measure(options.elements, options.own, options.rounds)
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
