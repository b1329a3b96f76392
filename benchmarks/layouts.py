"""Hundreds of iterations with random losses in layouts with a distributed optimizer, against the same run undisturbed.

    python -m benchmarks.layouts [--iterations 300] [--losses 30] [--only tp]...

Real ranks, gloo and ZeroMQ under the test harness; Slurm and its messages are not in it. Each loss strikes a random
rank of a whole job at a random moment; the process is started again and completes its replica with those that stood by.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import proof, rank_harness
from tests.support.rank_harness import Ranks

SHAPES = {  # TP PP VPP, ranks of a replica
    "tp": ("2 1 1", 2),
    "pp": ("1 2 1", 2),
    "tp-pp": ("2 2 1", 4),
}
REPLICAS = 2
LEAST_APART, MOST_APART = 0.2, 1.5  # seconds from a job that is whole to the next loss
HOUR = 3600.0


class Struck(Ranks):
    """Ranks of which random ones are killed, each when the job is whole again."""

    def __init__(self, *arguments: Any, losses: int, seed: int, **keywords: Any):
        super().__init__(*arguments, restart=True, fork=True, **keywords)
        self.left, self.random, self.due = losses, random.Random(seed), 0.0
        self.struck: list[tuple[float, int]] = []

    def _disturb(self) -> None:
        super()._disturb()
        whole = len(self.members) == self.size and all(
            rank.status.state == "running" and rank.status.generation == self.generation for rank in self.ranks.values()
        )
        now = time.monotonic()
        if not whole:
            self.due = 0.0
        elif not self.due:
            self.due = now + self.random.uniform(LEAST_APART, MOST_APART)
        elif now >= self.due and self.left:
            slot = self.random.randrange(self.size)
            self.left, self.due = self.left - 1, 0.0
            self.struck.append((time.time(), slot))
            self.ranks[slot].kill()


def train(out: Path, shape: str, iterations: int, losses: int, seed: int = 0) -> Struck:
    """One run to its end, its ledgers proven."""
    layout, size = SHAPES[shape]
    settings = {"TINY_LAYOUT": layout, "TINY_DISTOPT": "1", "TINY_ITERATIONS": str(iterations), "TINY_SAVE": "0"}
    ranks = Struck(out, REPLICAS * size, [], losses=losses, seed=seed, replica=size, **settings)
    ranks.drive()
    for iteration in range(iterations):
        steps = [step for step in ranks.steps if step["iteration"] == iteration]
        counts = sorted(index for step in steps for index in step["micro_batches"])
        assert len(set(counts)) == len(counts), f"iteration {iteration} counts twice: {counts}"
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--losses", type=int, default=30)
    parser.add_argument("--only", action="append", choices=sorted(SHAPES), help="this layout; may be given again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rank_harness.LIMIT = HOUR
    rows = []
    for shape in options.only or SHAPES:
        with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
            calm, struck = Path(folder) / "calm", Path(folder) / "struck"
            calm.mkdir()
            struck.mkdir()
            train(calm, shape, options.iterations, 0)
            ranks = train(struck, shape, options.iterations, options.losses, options.seed)
            wanted, found = proof.losses(calm), proof.losses(struck)
            worst = max(abs(max(found[i]) / max(wanted[i]) - 1.0) for i in range(options.iterations))
            again = [t["seconds"]["stepped"] for t in ranks.timings if "broken" in t["seconds"]]
        row = {
            "layout": f"DP{REPLICAS} {shape.upper()}, distributed optimizer",
            "losses": len(ranks.struck),
            "generations": len(ranks.plans),
            "loss_difference": worst,
            "loss_to_next_step_median": statistics.median(again) if again else None,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
