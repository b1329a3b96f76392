"""``python -m benchmarks.starts [--times N]``: what plugin and agent add to a step's start, on a real Slurm.

By turns, inside one allocation each: `srun true` with the plugin and a job that asked for Unicron, and on a cluster
without the plugin; then a training, from `srun` to its first step. Last, a script of `srun --ntasks-per-node=2` on two
nodes, a rank of which is killed N times: seconds from the kill to the job's next step, with forked (warm) ranks.

Before that, pairs of launches as a user has them, side by side: `srun true` and a training of one step as jobs of
their own, with plugin, agent, prolog and epilog and without any of them, until `srun` has ended and until the node is
free again.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.marks import print_figure
from tests.support.jobs import json_lines
from tests.support.plugin_site import Site
from tests.support.processes import wait_for
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.lab.cluster.health_program import PROLOG, wrapper

NODES, TASKS, LIMIT = 2, 2, 120.0
EPILOG = PROLOG.parent.parent / "epilog.d" / PROLOG.name
OLD_SECONDS = 21.0  # the processes of a younger world get 2 s to show an error of their own
TRAIN = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rank, generation = dist.get_rank(), int(os.environ.get("UNICRON_GENERATION", "0"))
for step in range(int(sys.argv[1])):
    time.sleep(0.05)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    if step == 0:
        print("stepped", time.time(), flush=True)
    with open(f"{os.environ['PLAIN_OUT']}/steps.{rank}", "a") as file:
        line = {"rank": rank, "generation": generation, "pid": os.getpid()}
        file.write(json.dumps(line) + "\\n")
time.sleep(0.5)
dist.destroy_process_group()
"""
# torch's variables, which Unicron sets and a script without it needs itself.
ALONE = "env RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29555"


def allocated(folder: Path, environment: dict[str, str], options: list[str], script: str) -> str:
    """What a batch script prints that is run to its end."""
    file = folder / "job.sh"
    file.write_text(f"#!/bin/bash\n{script}")
    command = ["sbatch", "--wait", "-N1", "--exclusive", "--gres=gpu:1", "-o", str(folder / "job.out"), *options]
    done = subprocess.run(
        [*command, str(file)], env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT
    )
    said = (folder / "job.out").read_text() if (folder / "job.out").exists() else ""
    if done.returncode:
        sys.exit(f"the job failed: {done.stderr}{said}")
    return said


def step_seconds(times: int, command: str) -> str:
    """A batch script that prints how long each of `times` steps took."""
    lines = f"begun=$EPOCHREALTIME; srun {command} >/dev/null 2>&1; echo $begun $EPOCHREALTIME\n"
    return f"for i in $(seq {times}); do\n{lines}done\n"


def measure_starts(folder: Path, site: Site, bare: dict[str, str], times: int) -> None:
    """`srun true` and a training, with and without, by turns."""
    ours = ["--unicron", "--unicron-min-nodes=1"]
    sides: list[tuple[dict[str, str], list[str]]] = [(site.environment, ours), (bare, [])]
    empty: list[list[float]] = [[], []]
    training: list[list[float]] = [[], []]
    script = folder / "train.py"
    script.write_text(TRAIN)
    for _ in range(times):
        for side, (environment, options) in enumerate(sides):
            said = allocated(folder, environment, options, step_seconds(5, "true"))
            pairs = [line.split() for line in said.splitlines() if line[:1].isdigit()]
            empty[side] += [float(end) - float(begun) for begun, end in pairs]
            before = "" if side == 0 else ALONE
            words = f"echo begun $EPOCHREALTIME\nsrun {before} {sys.executable} {script} 1\n"
            said = allocated(folder, environment, options, words)
            at = dict(line.split()[:2] for line in said.splitlines() if line.startswith(("begun ", "stepped ")))
            training[side].append(float(at["stepped"]) - float(at["begun"]))
    ratio = statistics.median(empty[0]) / statistics.median(empty[1])
    print(f"srun true: {statistics.median(empty[0]):.3f} s with, {statistics.median(empty[1]):.3f} s without")
    print_figure("srun true, with plugin and agent over without", ratio, "", most=1.1)
    with_it, without = map(statistics.median, training)
    print(f"srun to the first step of a training: {with_it:.2f} s with, {without:.2f} s without")
    print_figure("start of a training, with less without", with_it - without, "s", most=1.0)


def prolog_lines(folder: Path) -> list[str]:
    """Lines of slurm.conf for prolog and epilog as they are shipped, without health.conf."""
    folder.mkdir()
    (folder / "prolog.conf").write_text(f"UNICRON_LOG={folder}/log\nUNICRON_HEALTH_CONF={folder}/health.conf\n")
    (folder / "epilog.conf").write_text(f"UNICRON_LOG={folder}/log\n")
    prolog = wrapper(folder, PROLOG, "UNICRON_PROLOG_CONF")
    return [f"Prolog={prolog}", f"Epilog={wrapper(folder, EPILOG, 'UNICRON_EPILOG_CONF')}"]


def launch_seconds(environment: dict[str, str], options: list[str], words: list[str]) -> tuple[float, float]:
    """Seconds of a job until `srun` has ended, and until its node is free again."""
    command = ["srun", "-N1", "--exclusive", "--gres=gpu:1", "--nodelist=n1", *options, *words]
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    ended = time.monotonic()
    if done.returncode:
        sys.exit(f"the job failed: {done.stderr}{done.stdout}")

    def is_free() -> bool:
        look = ["sinfo", "-h", "-n", "n1", "-o", "%T"]
        return subprocess.run(look, env=environment, capture_output=True, text=True).stdout.strip() == "idle"

    wait_for(is_free, "the node is free again", LIMIT)
    return ended - begun, time.monotonic() - begun


def measure_launches(folder: Path, site: Site, bare: dict[str, str], times: int) -> None:
    """Pairs of jobs, with and without: of `true`, and of a training of one step."""
    ours = ["--unicron", "--unicron-min-nodes=1"]
    script = folder / "launched.py"
    script.write_text(TRAIN)
    training = [sys.executable, str(script), "1"]
    whats = (
        ("a job of srun true", [(site.environment, ours, ["true"]), (bare, [], ["true"])], times),
        (
            "a job of a training's one step",
            [(site.environment, ours, training), (bare, [], [*ALONE.split(), *training])],
            max(3, times // 4),
        ),
    )
    for what, sides, count in whats:
        with_it, without, ratio = pairs(sides, count)
        for place, until in enumerate(("", ", until its node is free")):
            print(f"{what}{until}: {with_it[place]:.3f} s with, {without[place]:.3f} s without")
            print_figure(f"{what}{until}: with all over without", ratio[place], "", most=1.2)


def pairs(sides: list[tuple[dict[str, str], list[str], list[str]]], count: int) -> list[tuple[float, float]]:
    """Medians of the first side, of the second, and of their ratios; the other one is first in each second pair."""
    found: list[list[tuple[float, float]]] = [[], [], []]
    for side in sides:
        launch_seconds(*side)  # the first one finds nothing in the caches
    for turn in range(count):
        took = {side: launch_seconds(*sides[side]) for side in ((0, 1), (1, 0))[turn % 2]}
        ratio = took[0][0] / took[1][0], took[0][1] / took[1][1]
        for kept, each in zip(found, (took[0], took[1], ratio), strict=True):
            kept.append(each)
    return [(statistics.median(a for a, _ in kept), statistics.median(b for _, b in kept)) for kept in found]


def newest(folder: Path) -> dict[int, dict]:
    """The last line of each rank."""
    found: dict[int, dict] = {}
    for path in folder.glob("steps.*"):
        found |= {int(line["rank"]): line for line in json_lines(path)}
    return found


def measure_kills(site: Site, times: int) -> None:
    """A rank of an unmodified script is killed; all ranks step again."""
    size = NODES * TASKS
    words = ["sbatch", "--parsable", "--unicron", f"-N{NODES}", "--exclusive", "--wrap"]
    (site.folder / "train.py").write_text(TRAIN)
    words.append(f"srun --ntasks-per-node={TASKS} {sys.executable} train.py 1000000")
    number = subprocess.run(words, env=site.environment, cwd=site.folder, capture_output=True, text=True, check=True)
    taken = []

    def whole(after: int) -> Callable[[], dict[int, dict] | None]:
        def look() -> dict[int, dict] | None:
            ranks = newest(site.folder)
            return ranks if len(ranks) == size and all(line["generation"] > after for line in ranks.values()) else None

        return look

    ranks = wait_for(whole(0), site.logs, LIMIT) or {}
    for turn in range(times):
        time.sleep(OLD_SECONDS)
        generation = max(line["generation"] for line in ranks.values())
        os.kill(newest(site.folder)[turn % size]["pid"], signal.SIGKILL)
        begun = time.monotonic()
        ranks = wait_for(whole(generation), site.logs, LIMIT) or {}
        taken.append(time.monotonic() - begun)
    subprocess.run(["scancel", number.stdout.strip()], env=site.environment, check=True)
    print("a rank of four killed, to the next step of all: " + ", ".join(f"{each:.2f}" for each in taken) + " s")
    print_figure("a killed rank of --ntasks-per-node, to the next step", statistics.median(taken), "s", most=1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="turns, and kills")
    parser.add_argument("--launches", type=int, default=20, help="pairs of launches")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-starts-") as name:
        folder = Path(name)
        (folder / "site").mkdir()
        site = Site(folder / "site", NODES, config_lines=prolog_lines(folder / "hooks"))
        bare = LocalCluster(folder / "bare", nodes=NODES, gpus_per_node=1, auth="none")
        try:
            bare.up()
            environment = site.environment | {"SLURM_CONF": str(bare.layout.slurm_conf)}
            measure_launches(folder, site, environment, options.launches)
            measure_starts(folder, site, environment, options.times)
            measure_kills(site, options.times)
        finally:
            site.close()
            bare.down()


if __name__ == "__main__":
    main()
