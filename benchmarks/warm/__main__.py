"""Cold and warm ranks by turns in one run: how soon a process waits for its generation, how soon a job of four is whole
again after kill -9, how soon a job trains and what work that is, and what a warm rank costs in memory.

Real agents, unicrond and ranks with gloo, without Slurm; the machine's own load is in all figures.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.marks import print_figure
from tests.support.jobs import FOREVER, World

SIZE, JOB = 4, "7"


@dataclass
class Figures:
    """Of one way to start; seconds, and MiB."""

    whole: list[float] = field(default_factory=list)
    """From submission until all train."""
    work: list[float] = field(default_factory=list)
    """CPU time of all that the job's agents have started, until then."""
    waiting: list[float] = field(default_factory=list)
    """From the order to start until the rank waits."""
    again: list[float] = field(default_factory=list)
    """From kill -9 until the newcomer's own share is in a step."""
    private: list[float] = field(default_factory=list)
    """Memory of a rank that it shares with nobody."""
    proportional: list[float] = field(default_factory=list)
    """Memory of a rank, what is shared divided by those who share it."""
    zygote: list[float] = field(default_factory=list)
    """Resident memory of a zygote."""


def memory(pid: int) -> dict[str, float]:
    """MiB by kind, of smaps_rollup (proc(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}


def work(agents: set[int]) -> float:
    """CPU seconds of these processes and of their children, those that have ended with them."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(path.parent.name) in agents or int(fields[1]) in agents:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def zygote(rank: int) -> int | None:
    """The zygote process beside a rank: the oldest of those with its command line, the others are its forks."""
    parent = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if (
                fields[1] == parent
                and b"unicron_detector/processes/zygote.py" in (path.parent / "cmdline").read_bytes()
            ):
                found.append((int(fields[19]), int(path.parent.name)))
        except OSError:
            continue
    oldest = min(found)[1] if found else rank
    return oldest if oldest != rank else None


def life(figures: Figures, warm: bool, deaths: int) -> None:
    """One job: its start, what it holds, and the deaths of one rank after another."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        began = time.monotonic()
        settings = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02", "UNICRON_WARM": str(int(warm))}
        with World(Path(folder), SIZE, **settings) as world:
            members = list(range(SIZE))
            world.wait(lambda: world.trains(members, 1), "all train")
            figures.whole.append(time.monotonic() - began)
            figures.work.append(work({agent.process.pid for agent in world.agents.values()}))
            time.sleep(2.0)
            for death in range(deaths):
                slot = death % SIZE
                figures.again.append(_death(world, slot))
                starts = world.events("rank_start", "ranks_ready", job=JOB)
                figures.waiting.append(starts[-1]["time"] - starts[-2]["time"])
                time.sleep(2.0)
            pids = [world.rank(slot, JOB)["pid"] for slot in members]
            for pid in pids:
                held = memory(pid)
                figures.private.append(held["Private_Dirty"] + held["Private_Clean"])
                figures.proportional.append(held["Pss"])
                if (known := zygote(pid)) is not None:
                    figures.zygote.append(memory(known)["Rss"])


def _death(world: World, slot: int) -> float:
    """Kills a rank; seconds until the one after it has stepped in the generation that is whole."""
    before = world.job()["generation"]
    struck = time.time()
    os.kill(world.rank(slot, JOB)["pid"], signal.SIGKILL)
    members = list(range(SIZE))
    world.wait(lambda: world.trains(members) and world.job()["generation"] >= before + 2, "it is whole again", 60.0)
    least = world.job()["iteration"] + 2
    world.wait(lambda: world.trains(members, least), "it trains on")
    steps = world.array.losses(slot)
    return next(step["time"] for step in steps if step["time"] > struck and step["world_size"] == SIZE) - struck


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each kind")
    parser.add_argument(
        "--deaths",
        type=int,
        default=4,
        help="in each job, of one rank after another",
    )
    options = parser.parse_args()
    kinds = {"cold": Figures(), "warm": Figures()}
    for _ in range(options.rounds):
        for name, figures in kinds.items():
            life(figures, name == "warm", options.deaths)
    rows = (
        ("submission -> all train, s", "whole"),
        ("CPU time of the agents until then, s", "work"),
        ("order -> rank waits, s", "waiting"),
        ("kill -9 -> whole again, s", "again"),
        ("private memory of a rank, MiB", "private"),
        ("proportional memory of a rank, MiB", "proportional"),
        ("resident memory of a zygote, MiB", "zygote"),
    )
    print(f"{SIZE} agents with a rank each on {os.cpu_count()} cores, {options.rounds} jobs, median (and largest)")
    print(f"{'':<38}{'cold':>18}{'warm':>18}")
    for title, attribute in rows:
        cells = []
        for figures in kinds.values():
            values = getattr(figures, attribute)
            cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})" if values else "-")
        print(f"{title:<38}" + "".join(f"{cell:>18}" for cell in cells))
    warm = kinds["warm"]
    print_figure("order to start -> warm rank waits, median", statistics.median(warm.waiting), "s", 0.5)
    print_figure("kill -9 of a rank of 4 -> whole again, warm, median", statistics.median(warm.again), "s", 1.5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
