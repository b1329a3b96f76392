"""Export and copies of a distributed optimizer's shards: rooms in images of shared memory against the ranks' own.

    python -m benchmarks.memory.shards [--pairs 3] [--iterations 20]

Runs of both kinds take turns (a b b a), each with ranks of its own. export and copy: the calls of each iteration;
settle: what the training waited for the sums; sums: what the thread beside it took; keep: export, copy and their
acknowledgement. Medians of the iterations in milliseconds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tests.support.rank_harness import Ranks

SCRIPT = Path(__file__).with_name("shard_ranks.py")
RANKS = 4
MODEL = {
    "TINY_HIDDEN": "256",
    "TINY_LAYERS": "4",
    "TINY_MICRO_BATCHES": "8",
    "TINY_SEQUENCE": "64",
    "TINY_DISTOPT": "1",
}
PARTS = ("export", "copy", "settle", "sums", "keep", "iteration")
WARM_UP = 3


def run(iterations: int, images: bool, **more: str) -> dict[str, list[float]]:
    """Milliseconds of each iteration, by part. more: of the ranks' environment."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-", dir="/dev/shm") as folder:
        memory = Path(folder, "memory")
        memory.mkdir()
        settings = {
            **MODEL,
            "TINY_ITERATIONS": str(WARM_UP + iterations),
            "TINY_SAVE": "0",
            "TINY_SCRIPT": str(SCRIPT),
            **more,
        }
        settings["UNICRON_MEMORY"] = str(memory) if images else ""
        ranks = Ranks(Path(folder), RANKS, [], fork=True, **settings)
        ranks.drive()
        said = [
            [json.loads(line) for line in Path(folder, f"parts.{slot}").read_text().splitlines()[WARM_UP:]]
            for slot in range(RANKS)
        ]
    return {part: [1e3 * max(each.get(part, 0.0) for each in at) for at in zip(*said, strict=True)] for part in PARTS}


def main() -> None:
    """Print the table, and the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    found: dict[bool, dict[str, list[float]]] = {kind: {part: [] for part in PARTS} for kind in (False, True)}
    for number in range(options.pairs):
        for kind in (False, True) if number % 2 == 0 else (True, False):
            for part, times in run(options.iterations, kind).items():
                found[kind][part] += times
    middle = {kind: {part: statistics.median(times) for part, times in parts.items()} for kind, parts in found.items()}
    print(f"{'ms':>10} {'own memory':>12} {'images':>12}")
    for part in PARTS:
        print(f"{part:>10} {middle[False][part]:12.2f} {middle[True][part]:12.2f}")
    ratio = middle[True]["iteration"] / middle[False]["iteration"]
    print(json.dumps({"own": middle[False], "images": middle[True], "ratio": ratio}))


if __name__ == "__main__":
    main()
