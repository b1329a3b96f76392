"""The proofs after the last fault: the undisturbed runs, and the tortured ones compared with them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import relative_difference
from benchmarks.torture import curves
from benchmarks.torture.progress import Leg, Progress
from benchmarks.torture.schedule import KINDS, NOTHING
from benchmarks.torture.stage import CHECKPOINTS, MICRO_BATCHES, TRAININGS, Training, reads, wipe
from tests.support.jobs import TINY, json_lines
from tests.support.processes import of_a_world

TOLERANCE = 1e-5
"""The largest relative difference of a loss.

The order of fp32 sums alone gives 1e-7, which each run measures; Adam amplifies it little at this rate on a learnable
task.
"""
ORDER_ITERATIONS = 1000  # of the run that measures the order of sums alone
POLL = 2.0  # seconds


def losses_of(folder: Path) -> dict[int, float]:
    """Return the losses by iteration of a run in which nothing fails."""
    return {line["iteration"]: line["loss"] for line in json_lines(folder / "losses.0")}


class Undisturbed:
    """An undisturbed training outside Slurm in `ranks` processes."""

    def __init__(self, folder: Path, training: Training, iterations: int, ranks: int = 1):
        self.folder, self.iterations, self.name = folder, iterations, training.name
        self._processes: list[subprocess.Popen[bytes]] = []
        if len(losses_of(folder)) >= iterations:  # the run was interrupted after it
            return
        wipe(folder)
        settings = {"TINY_OUT": str(folder), "TINY_ITERATIONS": str(iterations), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(TINY)]
        for rank, world in enumerate(of_a_world(ranks)):
            own = world | training.settings | settings | {"UNICRON_SLOT": str(rank)}
            with (folder / f"log.{rank}").open("wb") as log:
                process = subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                self._processes.append(process)

    def running(self) -> bool:
        """Return whether it runs. Raises RuntimeError if it failed."""
        ends = [process.poll() for process in self._processes]
        if any(ends):
            log = (self.folder / "log.0").read_text(errors="replace")[-1000:]
            raise RuntimeError(f"the undisturbed run of {self.name} failed: {log}")
        return None in ends

    def close(self) -> None:
        """Kill its processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def run_undisturbed(folder: Path, lasts: dict[str, int], look: Callable[[int], None]) -> float:
    """Train each job undisturbed to its last iteration, then a short run of two ranks.

    `look` gets the iterations again and again, and may raise. Return the largest relative difference of a loss that the
    order of sums alone makes.
    """
    _drive([Undisturbed(folder / f"undisturbed-{t.name}", t, lasts[t.name] + 1) for t in TRAININGS], look)
    first = TRAININGS[0]
    short = min(ORDER_ITERATIONS, lasts[first.name] + 1)
    _drive([Undisturbed(folder / "order", first, short, ranks=2)], look)
    one, two = losses_of(folder / f"undisturbed-{first.name}"), losses_of(folder / "order")
    return max(relative_difference(two[i], one[i]) for i in range(short))


def _drive(runs: Sequence[Undisturbed], look: Callable[[int], None]) -> None:
    try:
        while [run for run in runs if run.running()]:
            look(sum(len(losses_of(run.folder)) for run in runs))
            time.sleep(POLL)
    finally:
        for run in runs:
            run.close()


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that the ranks of a job of one leg have noted."""
    return notes_of(folder, "losses")


def notes_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of the files NAME.SLOT of a job of one leg."""
    found = []
    for path in sorted(folder.glob(f"{name}.*")):
        found += [{"slot": int(path.suffix[1:]), **note} for note in json_lines(path)]
    return found


def read_again(leg: Leg, logs: Path, checkpoints: Path) -> int:
    """Count how often ranks have read a checkpoint since both jobs trained; 0 if they never did.

    If a leg ended with its machine, the logs are counted.
    """
    name = logs.name
    if name not in leg.reads:
        return 0
    return leg.read.get(name, reads(logs, checkpoints)) - leg.reads[name]


def of_job(folder: Path, progress: Progress, training: Training) -> tuple[dict[str, Any], list[str]]:
    """Return (figures, what is wrong) of one job, over all legs."""
    name, wrong = training.name, []
    legs = [folder / f"leg{number}" / name for number in range(len(progress.legs))]
    paths = [leg for leg in legs if any(leg.glob("losses.*"))]  # a leg may have ended before it trained
    steps = [steps_of(path) for path in paths]
    began = [min(step["iteration"] for step in of) for of in steps]
    last = max((step["iteration"] for of in steps for step in of), default=-1)
    losses: dict[int, float] = {}
    for number, leg in enumerate(legs):
        again = read_again(progress.legs[number], leg, folder / CHECKPOINTS / name)
        wrong += [f"went back to a checkpoint's file {again} times in leg {number}"] if again else []
    for (first, end), of, leg in zip(curves.spans(began, last), steps, paths, strict=True):
        wrong += curves.not_once(of, notes_of(leg, "reduced"), first, end, MICRO_BATCHES)
        mine, split = curves.curve(of, first, end)
        losses |= mine
        if split:
            wrong.append(f"members report different losses of iterations {curves.named(split)}")
    wanted = losses_of(folder / f"undisturbed-{name}")
    apart = curves.apart(losses, wanted, TOLERANCE)
    if apart.over:
        wrong.append(f"{apart.over} losses differ by more than {TOLERANCE:g}: {apart.largest:.1e} at {apart.where}")
    if apart.missing:
        wrong.append(f"no loss of iterations {curves.named(apart.missing)}")
    struck = sum(done.job == name for done in progress.inflicted)
    figures = {"name": name, "faults": struck, "last_iteration": last, **asdict(apart)}
    figures |= {"first_loss": losses.get(0), "last_loss": losses.get(last), "reference_loss": wanted.get(last)}
    return figures, [f"{name}: {text}" for text in wrong]


def healing(progress: Progress) -> dict[str, Any]:
    """Return for each kind the number of faults and the seconds until the job was sound again."""
    found = {}
    for kind in progress.kinds:
        how = KINDS[kind]
        done = [one for one in progress.inflicted if one.kind == kind]
        after = [one.sound_after for one in done if one.sound_after is not None and how.takes != NOTHING]
        found[kind] = {
            "count": len(done),
            "sound_after_median": median(after) if after else None,
            "sound_after_most": max(after, default=None),
        }
    return found
