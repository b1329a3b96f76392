"""The cost of a session in a real step on the card: a rank of a session and one of plain Megatron-core take turns."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.cost.turns import HEALED, PLAIN, Blocks, Quiet, take_turns
from benchmarks.gpu.rows import on_card, patience, row
from tests.support import rank_harness

SCRIPT = Path(__file__).with_name("cost_ranks.py")
GOAL = 1.005
LARGE = {  # 600 million parameters: the card is the bottleneck, not the core that starts its kernels
    "TINY_HIDDEN": "2048",
    "TINY_LAYERS": "12",
    "TINY_SEQUENCE": "1024",
    "TINY_SIZE": "8",
    "TINY_BF16": "1",
    "TINY_RATE": "1e-4",
}
SMALL = {"TINY_HIDDEN": "64"}


def measure(pairs: int) -> Blocks:
    """Train one rank of each kind."""
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as folder:

        def train_healed(common: dict[str, str]) -> None:
            Quiet(Path(folder), 1, [], fork=True, **common).drive()

        settings = {**(LARGE if on_card() else SMALL), "TINY_SAVE": "0", "GPU_PLAIN": "1", "GPU_BACKEND": "nccl"}
        settings |= {"TINY_SCRIPT": str(SCRIPT), "TINY_ITERATIONS": str(3 + 2 * pairs)}
        return take_turns(Path(folder), SCRIPT, 1, (pairs, 2, 3), settings, {HEALED: train_healed})


def main() -> int:
    rank_harness.LIMIT = 80.0 * patience()
    with row("what a session costs a step, one rank") as saw:
        blocks = measure(12 if on_card() else 4)
        ours, theirs = ([block.wall for block in blocks[kind]] for kind in (HEALED, PLAIN))
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
        more = 1e3 * statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
        plain = 1e3 * statistics.median(theirs)
        text = f"{ratio:.4f} ({low:.4f} to {high:.4f}) of plain Megatron-core's {plain:.1f} ms, {more:+.2f} ms"
        saw(f"{text}; goal <= {GOAL}", ok=ratio <= GOAL or not on_card(), healed=ours, plain=theirs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
