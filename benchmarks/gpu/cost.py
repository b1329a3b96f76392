"""The cost of a session in a real step on the card: a rank of a session and one of plain Megatron-core take turns."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.cost.__main__ import Quiet, Turns, plain_environment, port
from benchmarks.gpu.rows import on_card, patience, row
from tests.support import rank_harness
from tests.support.warm import Script

SCRIPT = Path(__file__).with_name("cost_ranks.py")
ASKED = 1.005
LIMIT = 80.0 * patience()
WARM_UP = 3
LARGE = {  # 600 million parameters: the card is the bottleneck, not the core that starts its kernels
    "TINY_HIDDEN": "2048",
    "TINY_LAYERS": "12",
    "TINY_SEQUENCE": "1024",
    "TINY_SIZE": "8",
    "TINY_BF16": "1",
    "TINY_RATE": "1e-4",
}
SMALL = {"TINY_HIDDEN": "64"}


def measure(pairs: int, each: int) -> dict[str, list[float]]:
    """Seconds of an iteration of each block, of both."""
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as name:
        folder = Path(name)
        turns = Turns(folder, pairs, 1)
        turns.start()
        common = {**(LARGE if on_card() else SMALL), "TINY_SAVE": "0", "GPU_PLAIN": "1", "GPU_BACKEND": "nccl"}
        common |= {"COST_FOLDER": name, "COST_BLOCKS": str(pairs), "COST_EACH": str(each)}
        common |= {"COST_WARM_UP": str(WARM_UP), "TINY_SCRIPT": str(SCRIPT), "TINY_ITERATIONS": str(10**6)}
        common["TINY_ITERATIONS"] = str(WARM_UP + pairs * each)
        plain = Script(SCRIPT, environment=plain_environment(common, folder, 0, 1, port()))
        Quiet(folder, 1, [], fork=True, **common).drive()
        end = plain.wait(LIMIT)
        assert end.returncode == 0, end.stderr[-2000:]
        turns.join(LIMIT)
        return {kind: [wall / each for wall, _ in found] for kind, found in turns.blocks.items()}


def main() -> int:
    rank_harness.LIMIT = LIMIT
    with row("what a session costs a step, one rank") as saw:
        found = measure(*((12, 2) if on_card() else (4, 2)))
        ratios = sorted(ours / theirs for ours, theirs in zip(found["healed"], found["plain"], strict=True))
        ratio, plain = statistics.median(ratios), statistics.median(found["plain"])
        few = statistics.quantiles(ratios, n=4)
        text = f"{ratio:.4f} ({few[0]:.4f} to {few[2]:.4f}) of plain Megatron-core's {1e3 * plain:.1f} ms"
        more = 1e3 * statistics.median([a - b for a, b in zip(found["healed"], found["plain"], strict=True)])
        text += f", {more:+.2f} ms; asked <= {ASKED}"
        saw(text, ok=ratio <= ASKED or not on_card(), **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
