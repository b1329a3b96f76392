"""Cold and warm ranks by turns: how soon a rank waits for its generation, a killed one is replaced, and a job trains.

Real agents, unicrond and ranks with gloo, without Slurm; the machine's own load is in all figures.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.report import Report
from tests.support.jobs import FOREVER, World

SIZE, JOB = 4, "7"
ZYGOTE = b"unicron_detector/processes/zygote.py"


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
    """Start a job, kill one rank after the other, and read what it holds."""
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


def processes() -> Iterator[tuple[int, list[str]]]:
    """Yield (pid, fields of /proc/PID/stat after the name) of every process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield int(path.parent.name), path.read_text().rpartition(")")[2].split()
        except OSError:
            continue


def cpu_seconds(agents: set[int]) -> float:
    """Return the CPU time of the agents and of their children, ended ones included."""
    found = (fields for pid, fields in processes() if pid in agents or int(fields[1]) in agents)
    return sum(sum(map(int, fields[11:15])) for fields in found) / os.sysconf("SC_CLK_TCK")


def read_memory(rank: int, figures: dict[str, list[float]]) -> None:
    """Add the memory of a rank, and of the zygote that it is a fork of."""
    held = memory_mib(rank)
    figures["private"].append(held["Private_Dirty"] + held["Private_Clean"])
    figures["proportional"].append(held["Pss"])
    parent = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]
    siblings = [(int(fields[19]), pid) for pid, fields in processes() if fields[1] == parent and is_zygote(pid)]
    if siblings and (oldest := min(siblings)[1]) != rank:  # the others are its forks
        figures["zygote"].append(memory_mib(oldest)["Rss"])


def is_zygote(pid: int) -> bool:
    """Return whether the process, or the one that it is a fork of, was started as a zygote."""
    try:
        return ZYGOTE in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def memory_mib(pid: int) -> dict[str, float]:
    """Return the memory by kind, from smaps_rollup (proc(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
