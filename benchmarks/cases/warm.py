"""Cold and warm ranks by turns: the start of a rank, the replacement of a killed one, and the start of a job.

The agents, unicrond and ranks are real, without Slurm; the machine's load is in all figures.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from benchmarks.report import Report
from tests.support.jobs import FOREVER, World

SIZE, JOB = 4, "7"
ZYGOTE = "unicron_detector/processes/zygote.py"


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    rounds: int = 2
    """Jobs of each kind."""
    deaths: int = 4
    """Killed ranks in each job, one after the other."""


SMALLEST = Sizes(1, 1)
ROWS = {
    "whole": "submission -> all train, s",
    "work": "CPU time of the agents until then, s",
    "waiting": "order -> rank waits, s",
    "again": "kill -9 -> whole again, s",
    "private": "private memory of a rank, MiB",
    "proportional": "proportional memory of a rank, MiB",
    "zygote": "resident memory of a zygote, MiB",
}


def measure(sizes: Sizes, report: Report) -> None:
    """Run jobs of both kinds by turns."""
    kinds = {kind: {name: list[float]() for name in ROWS} for kind in ("cold", "warm")}
    for _ in range(sizes.rounds):
        for kind, figures in kinds.items():
            run_job(figures, kind == "warm", sizes.deaths)
    report.text(f"{SIZE} agents with a rank each, {sizes.rounds} jobs, median (and largest)")
    report.row("", *kinds, width=18)
    for name, title in ROWS.items():
        values = [figures[name] for figures in kinds.values()]
        report.row(title, *(f"{statistics.median(v):.2f} ({max(v):.2f})" if v else "-" for v in values), width=18)
    warm = kinds["warm"]
    report.figure("order to start -> warm rank waits, median", statistics.median(warm["waiting"]), "s", 0.5)
    report.figure("kill -9 of a rank of 4 -> whole again, warm, median", statistics.median(warm["again"]), "s", 1.5)
    report.details = dict(kinds)


def run_job(figures: dict[str, list[float]], warm: bool, deaths: int) -> None:
    """Start a job, kill one rank after the other, and read the memory."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        began = time.monotonic()
        settings = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02", "UNICRON_WARM": str(int(warm))}
        with World(Path(folder), SIZE, **settings) as world:
            members = list(range(SIZE))
            world.wait(lambda: world.trains(members, 1), "all train")
            figures["whole"].append(time.monotonic() - began)
            figures["work"].append(cpu_seconds({agent.process.pid for agent in world.agents.values()}))
            time.sleep(2.0)
            for death in range(deaths):
                figures["again"].append(replace_rank(world, death % SIZE))
                starts = world.events("rank_start", "ranks_ready", job=JOB)
                figures["waiting"].append(starts[-1]["time"] - starts[-2]["time"])
                time.sleep(2.0)
            for slot in members:
                read_memory(world.rank(slot, JOB)["pid"], figures)


def replace_rank(world: World, slot: int) -> float:
    """Kill a rank. Return the seconds until its successor has stepped in a complete generation."""
    before = world.job()["generation"]
    struck = time.time()
    os.kill(world.rank(slot, JOB)["pid"], signal.SIGKILL)
    members = list(range(SIZE))
    world.wait(lambda: world.trains(members) and world.job()["generation"] >= before + 2, "it is whole again", 60.0)
    least = world.job()["iteration"] + 2
    world.wait(lambda: world.trains(members, least), "it trains on")
    steps = world.array.losses(slot)
    return next(step["time"] for step in steps if step["time"] > struck and step["world_size"] == SIZE) - struck


def cpu_seconds(agents: set[int]) -> float:
    """Return the CPU time of the agents and of their children, ended ones included."""
    family = [process for pid in agents for process in (psutil.Process(pid), *psutil.Process(pid).children())]
    return sum(sum(process.cpu_times()[:4]) for process in family)


def read_memory(rank: int, figures: dict[str, list[float]]) -> None:
    """Add the memory of a rank, and of the zygote that it is a fork of."""
    process = psutil.Process(rank)
    held = process.memory_full_info()
    figures["private"].append(held.uss / 2**20)
    figures["proportional"].append(held.pss / 2**20)
    parent = process.parent()
    assert parent is not None
    zygotes = [each for each in parent.children() if any(ZYGOTE in word for word in each.cmdline())]
    if zygotes:
        oldest = min(zygotes, key=lambda each: (each.create_time(), each.pid))
        if oldest.pid != rank:  # the others are its forks
            figures["zygote"].append(oldest.memory_info().rss / 2**20)
