"""The proofs after the last fault: the undisturbed runs, and what the tortured ones have in common with them."""

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
from benchmarks.torture.picture import Curves
from benchmarks.torture.progress import Leg, Progress
from benchmarks.torture.schedule import KINDS, NOBODY
from benchmarks.torture.stage import CHECKPOINTS, MICRO_BATCHES, TRAININGS, Training, reads, wipe
from tests.support.jobs import TINY, json_lines
from tests.support.processes import of_a_world

TOLERANCE = 1e-5
"""Relative, of the loss. fp32 sums in another order differ by 1e-7 (`order_alone` is measured in each run); Adam
carries that on from step to step, little at this rate on a task that can be learnt."""
ORDER_ITERATIONS = 1000  # of the run that shows what the order of sums does alone
QUIET = 0.2  # seconds between two looks


def losses_of(folder: Path) -> dict[int, float]:
    """iteration -> loss, of a run in which nothing fails."""
    return {line["iteration"]: line["loss"] for line in json_lines(folder / "losses.0")}


class Undisturbed:
    """An undisturbed training outside Slurm in `ranks` processes."""

    def __init__(self, folder: Path, training: Training, iterations: int, ranks: int = 1):
        self.folder, self.iterations, self.name = folder, iterations, training.name
        self._processes: list[subprocess.Popen[bytes]] = []
        if len(losses_of(folder)) >= iterations:  # of a run that was interrupted later
            return
        wipe(folder)
        settings = {"TINY_OUT": str(folder), "TINY_ITERATIONS": str(iterations), "OMP_NUM_THREADS": "1"}
        for rank, world in enumerate(of_a_world(ranks)):
            with (folder / f"log.{rank}").open("wb") as log:
                slot = {"UNICRON_SLOT": str(rank)}
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, str(TINY)],
                        env=world | training.settings | settings | slot,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )

    def running(self) -> bool:
        """Raises RuntimeError when it failed."""
        ends = [process.poll() for process in self._processes]
        if any(ends):
            said = (self.folder / "log.0").read_text(errors="replace")[-1000:]
            raise RuntimeError(f"the undisturbed run of {self.name} failed: {said}")
        return None in ends

    def close(self) -> None:
        """Whatever is left of it."""
        for process in self._processes:
            process.kill()
            process.wait()


def run_undisturbed(folder: Path, lasts: dict[str, int], look: Callable[[int], None]) -> float:
    """One undisturbed run of each job to its last iteration, then a short one of two ranks; look(iterations) is called
    all the while, and may raise. Returns the largest relative difference of the order of sums alone."""
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
            time.sleep(QUIET * 10)
    finally:
        for run in runs:
            run.close()


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks of a job of one leg have noted of their steps."""
    return notes_of(folder, "losses")


def notes_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of NAME.SLOT of a job of one leg."""
    found = []
    for path in sorted(folder.glob(f"{name}.*")):
        found += [{"slot": int(path.suffix[1:]), **note} for note in json_lines(path)]
    return found


def read_again(leg: Leg, logs: Path, checkpoints: Path) -> int:
    """Count how often ranks have read a checkpoint since both jobs trained; 0 where they never did. Of a leg that
    ended with its machine the logs tell it, for nobody has counted."""
    name = logs.name
    if name not in leg.reads:
        return 0
    return leg.read.get(name, reads(logs, checkpoints)) - leg.reads[name]


def of_job(folder: Path, progress: Progress, training: Training) -> tuple[dict[str, Any], Curves, list[str]]:
    """(figures, curves for the picture, what is wrong) of one job, over all legs."""
    name, wrong = training.name, []
    legs = [folder / f"leg{number}" / name for number in range(len(progress.legs))]
    paths = [leg for leg in legs if any(leg.glob("losses.*"))]  # a leg may have ended before it trained
    told = [steps_of(path) for path in paths]
    began = [min(step["iteration"] for step in of) for of in told]
    last = max((step["iteration"] for of in told for step in of), default=-1)
    losses: dict[int, float] = {}
    for number, leg in enumerate(legs):
        again = read_again(progress.legs[number], leg, folder / CHECKPOINTS / name)
        wrong += [f"went back to a checkpoint's file {again} times in leg {number}"] if again else []
    for (first, end), of, leg in zip(curves.spans(began, last), told, paths, strict=True):
        wrong += curves.not_once(of, notes_of(leg, "reduced"), first, end, MICRO_BATCHES)
        mine, split = curves.curve(of, first, end)
        losses |= mine
        if split:
            wrong.append(f"members tell different losses of iterations {curves.named(split)}")
    wanted = losses_of(folder / f"undisturbed-{name}")
    apart = curves.apart(losses, wanted, TOLERANCE)
    if apart.over:
        wrong.append(f"{apart.over} losses differ by more than {TOLERANCE:g}: {apart.largest:.1e} at {apart.where}")
    if apart.missing:
        wrong.append(f"no loss of iterations {curves.named(apart.missing)}")
    struck = [done.iteration for done in progress.inflicted if done.job == name]
    figures = {"name": name, "faults": len(struck), "last_iteration": last, **asdict(apart)}
    figures |= {"first_loss": losses.get(0), "last_loss": losses.get(last), "reference_loss": wanted.get(last)}
    kept = {iteration: wanted[iteration] for iteration in losses if iteration in wanted}
    return figures, Curves(name, losses, kept, struck), [f"{name}: {text}" for text in wrong]


def healing(progress: Progress) -> dict[str, Any]:
    """By kind that can be had here: how many, and seconds until the job was sound again."""
    found = {}
    for kind in progress.kinds:
        how = KINDS[kind]
        done = [one for one in progress.inflicted if one.kind == kind]
        after = [one.sound_after for one in done if one.sound_after is not None and how.takes != NOBODY]
        found[kind] = {
            "count": len(done),
            "sound_after_median": median(after) if after else None,
            "sound_after_most": max(after, default=None),
        }
    return found
