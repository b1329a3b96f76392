"""The largest differences of healed runs from undisturbed ones, by layout and kind of training.

The ranks of a small GPT are real. One is killed in the middle of its micro-batches, in another run after its reduce has
begun. The columns are relative differences: "struck" of the reduced gradient of that iteration, "later" of the
gradients after it, whose parameters differ already, "loss" of the losses. 0 means bit-equal.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from benchmarks.report import Report, relative_difference
from tests.support import proof
from tests.support.matrix import ITERATIONS, KINDS, LAYOUTS, size_of, train
from tests.support.moments import moments


class Sizes(msgspec.Struct, frozen=True):
    """Rows of a run."""

    only: str = ""
    """A kind of training; empty for all."""
    layout: str = ""
    """A layout; empty for all."""


SMALLEST = Sizes("plain", "dp")
ROWS = (  # layout, kind
    ("dp", "plain"),
    ("dp", "dropout"),
    ("dp", "bf16"),
    ("dp", "sharded"),
    ("tp", "plain"),
    ("tp", "sharded-bf16"),
    ("pp", "fp16"),
    ("pp", "tokens"),
    ("vpp", "sharded-overlap"),
    ("dp", "experts"),
    ("tp-pp", "sharded"),
)
MOMENTS = ("data", "reduce")  # of tests.support.moments; both strike iteration 1
STRIKE_AT = 1


def measure(sizes: Sizes, report: Report) -> None:
    """Kill a rank at both moments of each row."""
    report.row("layout, kind, killed in", "struck", "later", "loss", width=12)
    worst = []
    for layout, kind in ROWS:
        if sizes.only not in ("", kind) or sizes.layout not in ("", layout):
            continue
        with tempfile.TemporaryDirectory(prefix="unicron-exactness-") as folder:
            for moment, figures in differences(layout, kind, Path(folder)).items():
                worst.append(figures[0])
                report.row(f"{layout}, {kind}, {moment}", *(f"{figure:.1e}" for figure in figures), width=12)
    report.figure("gradient of the struck iteration, healed beside undisturbed", max(worst), "", 1e-6)


def differences(layout: str, kind: str, folder: Path) -> dict[str, tuple[float, float, float]]:
    """Return for each moment the differences of the struck gradient, the later ones, and the loss."""
    reference, rows = folder / "reference", {}
    reference.mkdir(parents=True)
    train(reference, layout, KINDS[kind], [])
    size = size_of(LAYOUTS[layout][0])
    for moment in MOMENTS:
        out = folder / moment
        out.mkdir()
        train(out, layout, KINDS[kind], moments(size)[moment])
        found = proof.gradient_differences(out, reference, ITERATIONS, size, relative=True)
        later = max(value for iteration, value in found.items() if iteration > STRIKE_AT)
        rows[moment] = found[STRIKE_AT], later, loss_difference(out, reference)
    return rows


def loss_difference(out: Path, reference: Path) -> float:
    """Return the largest relative difference of a loss."""
    wanted, found = proof.losses(reference), proof.losses(out)
    pairs = ((one, other) for iteration, values in found.items() for one in values for other in wanted[iteration])
    return max(relative_difference(one, other) for one, other in pairs)
