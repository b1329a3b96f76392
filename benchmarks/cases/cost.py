"""The cost of Unicron while nothing fails: iterations of a session over those of plain Megatron-core or plain torch.

Both train the same layout, model and data, and take turns (:mod:`benchmarks.cost.turns`). Megatron's sessions report to
a stand-in of their agent. A plain module trains under real agents and a real unicrond, so the cores that those take are
in the time, beside torch's DistributedDataParallel.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.cost import turns
from benchmarks.cost.turns import LIMIT, Blocks, Quiet, take_turns
from benchmarks.leaderboard.systems.unicron import Shipped
from benchmarks.report import Report
from tests.support import rank_harness

FOLDER = Path(turns.__file__).parent
MODEL = {"TINY_HIDDEN": "256", "TINY_LAYERS": "4", "TINY_SEQUENCE": "128", "TINY_SIZE": "4", "TINY_SAVE": "0"}
SHORT = 8  # micro-batches; so few show the fixed cost
# Without it glibc gives memory back to the system and takes it again in each micro-batch.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(10**9), "MALLOC_TRIM_THRESHOLD_": str(4 * 10**9)}
SHARDED = {"TINY_DISTOPT": "1"}


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    pairs: int = 10
    """Pairs of blocks."""
    each: int = 1
    """Iterations of a block of Megatron's."""
    ranks: int = 4
    """Ranks of a plain module."""
    only: str = ""
    """Rows, with commas between; empty for all."""
    micro_batches: int = 64
    """Micro-batches of an iteration of Megatron's: 32,768 tokens, for which docs/measurements.md has the reason."""
    short: bool = False
    """Measure iterations of fewer tokens, too."""


SMALLEST = Sizes(2, 1, 2, "dp4,module-50ms", SHORT)


@dataclass(frozen=True)
class Layout:
    """A layout of Megatron's."""

    title: str
    shape: str
    """TP PP VPP."""
    replica: int = 1
    """Ranks of a replica."""
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """A plain module."""

    title: str
    micro_batches: int
    """Micro-batches of an iteration in each rank."""
    device_seconds: float
    """Time of a micro-batch on a device of its own."""
    each: int
    """Iterations of a block."""


ROWS: dict[str, Layout | Module] = {
    "dp4": Layout("DP4", "1 1 1"),
    "dp2-tp2": Layout("DP2 TP2, distributed optimizer", "2 1 1", 2, SHARDED),
    "dp2-pp2": Layout("DP2 PP2, distributed optimizer", "1 2 1", 2, SHARDED),
    "module-160ms": Module("plain module, iterations of 160 ms", 4, 0.025, 10),
    "module-50ms": Module("plain module, iterations of 50 ms", 1, 0.030, 30),
}


def measure(sizes: Sizes, report: Report) -> None:
    """Measure the chosen rows."""
    rank_harness.LIMIT = LIMIT
    os.environ.update(MEMORY)
    report.row("", "plain, ms", "more, ms", "CPU time", label=60, width=10)
    for name in sizes.only.split(",") if sizes.only else ROWS:
        row = ROWS[name]
        if isinstance(row, Module):
            show(row.title, module_blocks(row, sizes), report, 1.01)
            continue
        show(row.title, layout_blocks(row, sizes, sizes.micro_batches, sizes.each), report, 1.01)
        if sizes.short:
            each = sizes.each * sizes.micro_batches // SHORT
            show(f"{row.title}, {SHORT} micro-batches", layout_blocks(row, sizes, SHORT, each), report, None)


def layout_blocks(layout: Layout, sizes: Sizes, micro_batches: int, each: int) -> Blocks:
    """Train four ranks of each kind in a layout of Megatron's."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:

        def train_healed(common: dict[str, str]) -> None:
            Quiet(Path(folder), 4, [], fork=True, replica=layout.replica, **common).drive()

        script, own = FOLDER / "ranks.py", {"TINY_LAYOUT": layout.shape, "TINY_MICRO_BATCHES": str(micro_batches)}
        settings = MODEL | layout.settings | own | {"TINY_SCRIPT": str(script)}
        return take_turns(Path(folder), script, 4, (sizes.pairs, each, 2), settings, train_healed)


def module_blocks(module: Module, sizes: Sizes) -> Blocks:
    """Train a plain module in both ways."""
    with (
        tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="unicron-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as memory,
    ):
        script, state = FOLDER / "plain_ranks.py", Path(folder, "unicron")
        state.mkdir()

        def train_healed(common: dict[str, str]) -> None:
            command = [sys.executable, str(script)]
            with Shipped(state, sizes.ranks, command=command, UNICRON_MEMORY_DIR=memory, **common) as world:
                assert [agent.wait(LIMIT) for agent in world.agents.values()] == [0] * sizes.ranks, world.told()

        settings = {"LEADERBOARD_DEVICE_SECONDS": str(module.device_seconds)}
        settings["LEADERBOARD_MICRO_BATCHES"] = str(module.micro_batches * sizes.ranks)
        return take_turns(Path(folder), script, sizes.ranks, (sizes.pairs, module.each, 10), settings, train_healed)


def show(title: str, blocks: Blocks, report: Report, most: float | None) -> None:
    """Print the ratio of neighbouring blocks, and what a session takes more."""
    (ours, our_cpu), (theirs, their_cpu) = (zip(*blocks[kind], strict=True) for kind in ("healed", "plain"))
    more = 1e3 * statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    busy = statistics.median(a / b for a, b in zip(our_cpu, their_cpu, strict=True))
    report.row(title, 1e3 * statistics.median(theirs), more, f"{busy:.4f}", label=60, width=10, digits=1)
    report.details[title] = dict(blocks)
    report.ratio(f"iteration with Unicron / plain, {title}", ours, theirs, most)
