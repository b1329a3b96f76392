"""What the parts of ``benchmarks.memory`` have in common: the model, and how pairs of iterations are compared."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from benchmarks.marks import print_figure

MODEL = {
    "TINY_HIDDEN": "256",
    "TINY_LAYERS": "4",
    "TINY_SEQUENCE": "128",
    "TINY_SIZE": "4",
    "TINY_MICRO_BATCHES": "32",
}
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(10**9), "MALLOC_TRIM_THRESHOLD_": str(4 * 10**9)}  # as benchmarks.cost
DEARER = 1.01  # an iteration may take so many times as long


def medians(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Between which the median lies in 95 of 100 cases, by drawing again from what was measured (bootstrap)."""
    draw = random.Random(0)
    found = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(draws))
    return found[draws // 40], found[-draws // 40]


def dearer(what: str, ratios: Sequence[float], about: str) -> None:
    """Of pairs of iterations, with something over without it: what they were, and the mark."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    sure = medians(ratios)
    print(
        f"{about}; {len(ratios)} ratios: quartiles {low:.4f}..{high:.4f}, 95 % of medians {sure[0]:.4f}..{sure[1]:.4f}"
    )
    print_figure(what, middle, "", DEARER)
