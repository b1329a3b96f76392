"""Hundreds of iterations with random losses in layouts with a distributed optimizer, against the same run undisturbed.

    python -m benchmarks.layouts [--iterations 300] [--losses 30] [--only tp]...

Real ranks, gloo and ZeroMQ under the test harness; Slurm and its messages are not in it. Each loss strikes a random
rank of a whole job at a random moment; the process is started again and completes its replica with those that stood by.

What a loss changes in the sums is their order. How far that alone drives two trainings apart depends on the training,
so a third run shows it: one replica instead of two, nothing lost. At tiny_gpt's usual rate of learning, and on noise,
it is 1e-3 after 40 iterations of a pipeline; with a task that can be learnt and a lower rate it stays at the rounding.
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

from benchmarks.marks import print_figure
from tests.support import proof, rank_harness
from tests.support.rank_harness import Ranks

SHAPES = {  # TP PP VPP, ranks of a replica
    "tp": ("2 1 1", 2),
    "pp": ("1 2 1", 2),
    "tp-pp": ("2 2 1", 4),
}
REPLICAS = 2
TRAINING = {"TINY_RATE": "1e-3", "TINY_RULE": "0.6", "TINY_SAVE": "0", "TINY_DISTOPT": "1"}
SLOW = "0.01"  # seconds of sleep per micro-batch where ranks are lost, for their processes start anew meanwhile
WITHIN = 0.3  # seconds in which a loss strikes once it is due: the better part of an iteration
CLOSE = 1e-5  # relative
HOUR = 3600.0


class Struck(Ranks):
    """Ranks of which random ones are killed, each when the job is whole and its share of the iterations is over."""

    def __init__(self, *arguments: Any, iterations: int, losses: int, seed: int, **keywords: Any):
        super().__init__(*arguments, restart=True, fork=True, **keywords)
        self.random, self.at = random.Random(seed), 0.0
        self.due = [iterations * number // (losses + 1) for number in range(1, losses + 1)]
        self.struck: list[int] = []

    def _disturb(self) -> None:
        super()._disturb()
        statuses = [rank.status for rank in self.ranks.values()]
        whole = len(self.members) == self.size and all(
            status.state == "running" and status.generation == self.generation for status in statuses
        )
        if not whole or not self.due or min(status.iteration for status in statuses) < self.due[0]:
            self.at = 0.0
            return
        now = time.monotonic()
        self.at = self.at or now + self.random.uniform(0.0, WITHIN)
        if now >= self.at:
            self.due.pop(0)
            self.struck.append(self.random.randrange(self.size))
            self.ranks[self.struck[-1]].kill()


def train(out: Path, shape: str, iterations: int, losses: int, seed: int = 0, replicas: int = REPLICAS) -> Struck:
    """One run to its end, its ledgers proven."""
    layout, size = SHAPES[shape]
    out.mkdir()
    settings = {
        **TRAINING,
        "TINY_LAYOUT": layout,
        "TINY_ITERATIONS": str(iterations),
        "TINY_SLOW": SLOW if losses else "0",
    }
    ranks = Struck(out, replicas * size, [], iterations=iterations, losses=losses, seed=seed, replica=size, **settings)
    ranks.drive()
    for iteration in range(iterations):
        steps = [step for step in ranks.steps if step["iteration"] == iteration]
        counts = sorted(index for step in steps for index in step["micro_batches"])
        assert len(set(counts)) == len(counts), f"iteration {iteration} counts twice: {counts}"
    return ranks


def curve(out: Path, iterations: int) -> list[float]:
    """The loss of each iteration, which all members must have told alike."""
    told = proof.losses(out)
    assert all(len(told[iteration]) == 1 for iteration in range(iterations)), "members tell different losses"
    return [next(iter(told[iteration])) for iteration in range(iterations)]


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(mine / theirs - 1.0) for mine, theirs in zip(one, other, strict=True))


def measure(shape: str, iterations: int, losses: int, seed: int) -> dict[str, Any]:
    """The three runs of a layout."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as name:
        folder = Path(name)
        train(folder / "calm", shape, iterations, 0)
        train(folder / "ordered", shape, iterations, 0, replicas=1)
        ranks = train(folder / "struck", shape, iterations, losses, seed)
        calm, ordered, struck = (curve(folder / kind, iterations) for kind in ("calm", "ordered", "struck"))
        again = [timing["seconds"]["stepped"] for timing in ranks.timings if "broken" in timing["seconds"]]
    return {
        "layout": f"DP{REPLICAS} {shape.upper()}",
        "losses": len(ranks.struck),
        "generations": len(ranks.plans),
        "loss_difference": apart(struck, calm),
        "of_the_order_alone": apart(ordered, calm),
        "first_and_last_loss": (calm[0], calm[-1]),
        "loss_to_next_step_median": statistics.median(again) if again else None,
    }


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
        rows.append(measure(shape, options.iterations, options.losses, options.seed))
        print(json.dumps(rows[-1]), flush=True)
    for row in rows:
        what = f"loss curve, {row['losses']} losses in {options.iterations}, {row['layout']}"
        print_figure(what, row["loss_difference"], "", CLOSE)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
