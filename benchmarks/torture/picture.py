"""The picture at the end: the losses of each job over the undisturbed ones, their difference, and every fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unicron_planner.simulate import figure

CALM, STRUCK, FAULT = figure.INK, figure.PARTS[0][2], figure.PARTS[2][2]
TINIEST = 1e-12  # where a logarithm needs something to show


@dataclass(frozen=True)
class Curves:
    """The curves of one job, by iteration. faults: the iterations in which one struck."""

    name: str
    losses: Mapping[int, float]
    undisturbed: Mapping[int, float]
    faults: Sequence[int]


def draw(jobs: Sequence[Curves], tolerance: float, path: str | Path, title: str) -> None:
    """Writes a .png or .svg file. Raises PlanError, one line, for another ending or without matplotlib."""
    picture = figure.empty(path, (13, 3.4 * len(jobs)))
    grid = picture.add_gridspec(2 * len(jobs), 1, height_ratios=[3, 1] * len(jobs))
    for row, job in enumerate(jobs):
        axes = picture.add_subplot(grid[2 * row])
        axes.plot(list(job.undisturbed), list(job.undisturbed.values()), color=CALM, linewidth=2.2, label="undisturbed")
        axes.plot(list(job.losses), list(job.losses.values()), color=STRUCK, linewidth=0.9, label="tortured")
        low = [0.03] * len(job.faults)  # of the height: over the curve a thousand of them would hide it
        marks = {"color": FAULT, "markersize": 9, "label": f"{len(job.faults)} faults"}
        axes.plot(list(job.faults), low, "|", transform=axes.get_xaxis_transform(), **marks)
        axes.set_ylabel(f"loss of {job.name}", fontsize=8, color=figure.MUTED)
        axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper right")
        below = picture.add_subplot(grid[2 * row + 1], sharex=axes)
        both = [i for i in job.losses if job.undisturbed.get(i)]
        apart = [max(abs(job.losses[i] / job.undisturbed[i] - 1.0), TINIEST) for i in both]
        below.semilogy(both, apart, ".", color=STRUCK, markersize=2)
        below.axhline(tolerance, color=FAULT, linewidth=0.8)
        below.set_ylabel("relative\ndifference", fontsize=8, color=figure.MUTED)
        below.set_xlabel("iteration; red line: the tolerance", fontsize=8, color=figure.MUTED)
        for each in (axes, below):
            each.grid(axis="y", color=figure.GRID, linewidth=0.6)
            each.tick_params(labelsize=8, colors=figure.MUTED)
            each.spines[["top", "right"]].set_visible(False)
    picture.suptitle(title, fontsize=11, color=figure.INK, x=0.01, ha="left")
    figure.save(picture, path)
