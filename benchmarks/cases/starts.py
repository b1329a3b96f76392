"""The start of a job and of a step on a real Slurm, with Unicron and without, by turns.

First jobs of `srun true` and of a training's one step, with plugin, agent, prolog and epilog and on a cluster without
them: until `srun` has ended, and until the node is free again. Then `srun true` and a training inside allocations: the
training until its first step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.report import Report, turns
from tests.support.plugin_site import Site
from tests.support.processes import call, wait_for
from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.lab.cluster.health_program import PROLOG, wrapper


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    times: int = 5
    """Turns inside an allocation."""
    launches: int = 20
    """Pairs of launches; a quarter of it for trainings."""


SMALLEST = Sizes(1, 1)
LIMIT = 120.0
EPILOG = PROLOG.parent.parent / "epilog.d" / PROLOG.name
TRAIN = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    time.sleep(0.05)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    if step == 0:
        print("stepped", time.time(), flush=True)
time.sleep(0.5)
dist.destroy_process_group()
"""
# torch's variables, which Unicron sets.
ALONE = "env RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29555"
OURS = ("--unicron", "--unicron-min-nodes=1")


@dataclass(frozen=True)
class Side:
    """One of the two clusters."""

    environment: dict[str, str]
    options: tuple[str, ...] = ()
    """Options of a job."""
    before: tuple[str, ...] = ()
    """Words before a training's command."""


def measure(sizes: Sizes, report: Report) -> None:
    """Start both clusters and compare them."""
    with tempfile.TemporaryDirectory(prefix="unicron-starts-") as name:
        folder = Path(name)
        (folder / "site").mkdir()
        (folder / "train.py").write_text(TRAIN)
        site = Site(folder / "site", 2, config_lines=prolog_lines(folder / "hooks"))
        bare = LocalCluster(folder / "bare", nodes=2, gpus_per_node=1, auth="none")
        try:
            bare.up()
            environment = site.environment | {"SLURM_CONF": str(bare.layout.slurm_conf)}
            sides = Side(site.environment, OURS), Side(environment, before=tuple(ALONE.split()))
            launches(folder, sides, sizes.launches, report)
            steps(folder, sides, sizes.times, report)
        finally:
            site.close()
            bare.down()


def prolog_lines(folder: Path) -> list[str]:
    """Return the lines of slurm.conf for prolog and epilog as they are shipped, without health.conf."""
    folder.mkdir()
    (folder / "prolog.conf").write_text(f"UNICRON_LOG={folder}/log\nUNICRON_HEALTH_CONF={folder}/health.conf\n")
    (folder / "epilog.conf").write_text(f"UNICRON_LOG={folder}/log\n")
    prolog = wrapper(folder, PROLOG, "UNICRON_PROLOG_CONF")
    return [f"Prolog={prolog}", f"Epilog={wrapper(folder, EPILOG, 'UNICRON_EPILOG_CONF')}"]


def launches(folder: Path, sides: tuple[Side, Side], count: int, report: Report) -> None:
    """Compare pairs of jobs: of `true`, and of a training of one step."""
    training = (sys.executable, str(folder / "train.py"), "1")
    for what, words, pairs in (
        ("a job of srun true", ("true",), count),
        ("a job of a training's one step", training, max(min(3, count), count // 4)),
    ):
        commands = [words if words == ("true",) else (*side.before, *words) for side in sides]
        found: list[list[tuple[float, float]]] = [[], []]
        for turn in range(-1, pairs):
            for index in turns(turn, 0, 1):
                seconds = launch(sides[index], commands[index])
                if turn >= 0:  # the first one fills the caches
                    found[index].append(seconds)
        for place, until in enumerate(("", ", until its node is free")):
            ours, theirs = ([times[place] for times in side] for side in found)
            report.text(
                f"{what}{until}: {statistics.median(ours):.3f} s with, {statistics.median(theirs):.3f} s without"
            )
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            report.figure(f"{what}{until}: with all over without", ratio, "", most=1.2)


def launch(side: Side, words: tuple[str, ...]) -> tuple[float, float]:
    """Return the seconds of a job until `srun` has ended, and until its node is free again."""
    began = time.monotonic()
    slurm(side, "srun", "-N1", "--exclusive", "--gres=gpu:1", "--nodelist=n1", *side.options, *words)
    ended = time.monotonic()
    wait_for(lambda: slurm(side, "sinfo", "-h", "-n", "n1", "-o", "%T") == "idle", "the node is free again", LIMIT)
    return ended - began, time.monotonic() - began


def steps(folder: Path, sides: tuple[Side, Side], times: int, report: Report) -> None:
    """Compare `srun true` and a training inside an allocation."""
    empty: list[list[float]] = [[], []]
    training: list[list[float]] = [[], []]
    loop = "begun=$EPOCHREALTIME; srun true >/dev/null 2>&1; echo $begun $EPOCHREALTIME\n"
    for turn in range(times):
        for index in turns(turn, 0, 1):
            side = sides[index]
            output = in_allocation(folder, side, f"for i in $(seq 5); do\n{loop}done\n")
            pairs = [line.split() for line in output.splitlines() if line[:1].isdigit()]
            empty[index] += [float(end) - float(begun) for begun, end in pairs]
            words = " ".join([*side.before, sys.executable, str(folder / "train.py"), "1"])
            output = in_allocation(folder, side, f"echo begun $EPOCHREALTIME\nsrun {words}\n")
            at = dict(line.split()[:2] for line in output.splitlines() if line.startswith(("begun ", "stepped ")))
            training[index].append(float(at["stepped"]) - float(at["begun"]))
    ours, theirs = map(statistics.median, empty)
    report.text(f"srun true: {ours:.3f} s with, {theirs:.3f} s without")
    report.figure("srun true, with plugin and agent over without", ours / theirs, "", most=1.1)
    ours, theirs = map(statistics.median, training)
    report.text(f"srun to the first step of a training: {ours:.2f} s with, {theirs:.2f} s without")
    report.figure("start of a training, with less without", ours - theirs, "s", most=1.0)


def in_allocation(folder: Path, side: Side, script: str) -> str:
    """Run a batch script to its end. Return its output."""
    file, out = folder / "job.sh", folder / "job.out"
    file.write_text(f"#!/bin/bash\n{script}")
    slurm(side, "sbatch", "--wait", "-N1", "--exclusive", "--gres=gpu:1", "-o", out, *side.options, file)
    return out.read_text()


def slurm(side: Side, *words: object) -> str:
    """Return the output of one of Slurm's commands, which succeeds."""
    done = call(*words, environment=side.environment, limit=LIMIT)
    assert not done.returncode, f"{words} failed: {done.stderr}{done.stdout}"
    return done.stdout.strip()
