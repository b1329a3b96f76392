"""The cost of audits and comparisons in a real step on the card: two sessions of two ranks take turns, and one of them
audits and compares in each iteration.

    python -m benchmarks.gpu.audits gloo|nccl|apart
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.cost.turns import HEALED, Blocks, Quiet, Train, take_turns
from benchmarks.gpu.cost import LARGE, SCRIPT, SMALL
from benchmarks.gpu.heal import environment
from benchmarks.gpu.rows import on_card, patience, row
from tests.support import rank_harness
from unicron_transition.session.checks import AUDIT, COMPARE, DEFAULTS

RANKS, MICRO_BATCHES, AUDITED = 2, 8, "audited"
CHECKS = {HEALED: {AUDIT: "0", COMPARE: "0"}, AUDITED: {AUDIT: "1", COMPARE: "1"}}
GOAL = 0.01  # of an iteration


def measure(backend: str, pairs: int) -> Blocks:
    """Train two ranks of each kind, and of plain Megatron-core."""
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as folder:

        def trains(name: str) -> Train:
            out = Path(folder, f"{name}-ranks")
            out.mkdir()
            return lambda common: Quiet(out, RANKS, [], fork=True, **common | CHECKS[name]).drive()

        settings = {**environment(backend), **(LARGE if on_card() else SMALL), "TINY_SAVE": "0", "GPU_PLAIN": "1"}
        settings |= {"TINY_SCRIPT": str(SCRIPT), "TINY_MICRO_BATCHES": str(MICRO_BATCHES)}
        settings |= {"TINY_ITERATIONS": str(3 + 2 * pairs)}
        return take_turns(Path(folder), SCRIPT, RANKS, (pairs, 2, 3), settings, {name: trains(name) for name in CHECKS})


def main() -> int:
    backend = sys.argv[1]
    rank_harness.LIMIT = 80.0 * patience()
    with row(f"{backend}, what an audit and a comparison cost a step, two ranks") as saw:
        blocks = measure(backend, 12 if on_card() else 4)
        plain, checked = ([block.wall for block in blocks[name]] for name in (HEALED, AUDITED))
        low, ratio, high = statistics.quantiles([a / b - 1.0 for a, b in zip(checked, plain, strict=True)], n=4)
        share = ratio / DEFAULTS[COMPARE]  # an audit comes with each comparison, and none between two of them
        text = f"{ratio:.3f} ({low:.3f} to {high:.3f}) of an iteration of {1e3 * statistics.median(plain):.1f} ms with "
        text += f"{MICRO_BATCHES // RANKS} micro-batches a rank; one in {DEFAULTS[COMPARE]} has them: {share:.5f}"
        saw(f"{text}; goal <= {GOAL}", ok=share <= GOAL or not on_card(), checked=checked, plain=plain)
    return 0


if __name__ == "__main__":
    sys.exit(main())
