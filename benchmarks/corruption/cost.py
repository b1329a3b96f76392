"""What audits and comparisons cost: sessions of a plain module with other settings take turns with sessions without."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.cases import cost
from benchmarks.cost import turns

FOLDER = Path(turns.__file__).parent
OFF, ON = "off", "on"


def blocks(ranks: int, each_rank: int, device: float, audit: int, compare: int, pairs: int, each: int) -> turns.Blocks:
    """Train sets of ranks with and without these checks by turns. each_rank: micro-batches of a rank in an iteration.
    device: seconds of each. each: iterations of a block."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        roots: dict[str, int] = {}

        def trains(name: str, checks: tuple[int, int]) -> turns.Train:
            more = {"UNICRON_AUDIT": str(checks[0]), "UNICRON_COMPARE": str(checks[1])}
            world = Path(folder, f"{name}-world")
            return lambda common: cost.train_world(cost.ROOT, world, ranks, common | more, name, roots)

        settings = {"LEADERBOARD_DEVICE_SECONDS": str(device), "LEADERBOARD_MICRO_BATCHES": str(each_rank * ranks)}
        sessions = {OFF: trains(OFF, (0, 0)), ON: trains(ON, (audit, compare))}
        return turns.take_turns(
            Path(folder), FOLDER / "plain_ranks.py", ranks, (pairs, each, 10), settings, sessions, roots
        )
