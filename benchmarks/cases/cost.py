"""The cost of Unicron while nothing fails: iterations of a session over those of plain Megatron-core or plain torch.

Both train the same layout, model and data, and take turns (:mod:`benchmarks.cost.turns`). Megatron's sessions report to
a stand-in of their agent. A plain module trains under real agents and a real unicrond, so the cores that those take are
in the time, beside torch's DistributedDataParallel or `fully_shard`; of the latter the memory of a rank is
compared, too. `other=FOLDER` names the checkout of another build, with its own
.venv, whose sessions of a plain module take turns, too: the figure is what a session adds here over what it adds there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.cost import turns
from benchmarks.cost.turns import HEALED, LIMIT, PLAIN, Blocks, Quiet, Train, take_turns
from benchmarks.report import ROOT, Report
from tests.support import rank_harness

FOLDER = Path(turns.__file__).parent
MODEL = {"TINY_HIDDEN": "256", "TINY_LAYERS": "4", "TINY_SEQUENCE": "128", "TINY_SIZE": "4", "TINY_SAVE": "0"}
SHORT = 8  # micro-batches; so few show the fixed cost
# Without it glibc gives memory back to the system and takes it again in each micro-batch.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(10**9), "MALLOC_TRIM_THRESHOLD_": str(4 * 10**9)}
SHARDED = {"TINY_DISTOPT": "1"}
OTHER = "other"  # the set of another build
Memory = dict[str, float]
"""MB of a rank: its own, at most, and in shared memory."""
MOST_SHARDED = 1 / 0.98  # iterations of a session over those of `fully_shard` alone
MOST_MEMORY = 1.05  # of a rank under `fully_shard` alone
MOST_ADDED = 0.4  # of what a session of the build before the issue added


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
    other: str = ""
    """The checkout of another build, whose sessions of a plain module are measured beside ours."""


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
    most: float | None
    """The goal: iterations of a session over plain ones."""
    shard: int = 1
    """Ranks that share the parameters of a replica."""
    width: int = 96
    """Of the model."""
    memory: bool = False
    """Compare the ranks' memory."""


ROWS: dict[str, Layout | Module] = {
    "dp4": Layout("DP4", "1 1 1"),
    "dp2-tp2": Layout("DP2 TP2, distributed optimizer", "2 1 1", 2, SHARDED),
    "dp2-pp2": Layout("DP2 PP2, distributed optimizer", "1 2 1", 2, SHARDED),
    "module-160ms": Module("plain module, iterations of 160 ms", 4, 0.025, 10, 1.015),
    "module-50ms": Module("plain module, iterations of 50 ms", 1, 0.030, 30, 1.05),
    "hsdp": Module("sharded module, iterations of 160 ms", 4, 0.025, 10, MOST_SHARDED, shard=2),
    "hsdp-memory": Module("sharded module of 14 million parameters", 1, 0.0, 1, None, shard=2, width=768, memory=True),
}


def measure(sizes: Sizes, report: Report) -> None:
    """Measure the chosen rows."""
    rank_harness.LIMIT = LIMIT
    os.environ.update(MEMORY)
    report.row("", "plain, ms", "more, ms", "CPU time", label=60, width=10)
    for name in sizes.only.split(",") if sizes.only else ROWS:
        row = ROWS[name]
        if isinstance(row, Module) and row.memory:
            compare_memory(row, sizes, report)
            continue
        if isinstance(row, Module):
            blocks = module_blocks(row, sizes)
            show(row.title, blocks, report, row.most)
            if sizes.other:
                compare(row.title, blocks, report)
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
        return take_turns(Path(folder), script, 4, (sizes.pairs, each, 2), settings, {HEALED: train_healed})


def module_blocks(module: Module, sizes: Sizes, memory: dict[str, Memory] | None = None) -> Blocks:
    """Train a plain module in both ways, and in sessions of the other build if there is one. The memory of a rank of
    each set is noted in `memory`."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        builds = {HEALED: ROOT} | ({OTHER: Path(sizes.other).resolve()} if sizes.other else {})
        roots: dict[str, int] = {}

        def trains(name: str, build: Path) -> Train:
            return lambda common: train_world(build, Path(folder, f"{name}-world"), sizes.ranks, common, name, roots)

        settings = {"LEADERBOARD_DEVICE_SECONDS": str(module.device_seconds)}
        settings["LEADERBOARD_MICRO_BATCHES"] = str(module.micro_batches * sizes.ranks)
        settings |= {"LEADERBOARD_SHARD": str(module.shard), "LEADERBOARD_WIDTH": str(module.width)}
        warm_up = 3 if module.memory else 10
        settings |= {"COST_GIVE_BACK": "1"} if module.memory else {}
        counts, sessions = (
            (sizes.pairs, module.each, warm_up),
            {name: trains(name, build) for name, build in builds.items()},
        )
        blocks = take_turns(Path(folder), FOLDER / "plain_ranks.py", sizes.ranks, counts, settings, sessions, roots)
        if memory is not None:
            memory |= {name: rank_memory(Path(folder, name), sizes.ranks) for name in (HEALED, PLAIN)}
        return blocks


def train_world(build: Path, state: Path, ranks: int, common: dict[str, str], name: str, roots: dict[str, int]) -> None:
    """Train a set of sessions of a build under its agents and its unicrond. Its process is noted in `roots`."""
    state.mkdir()
    python = sys.executable if build == ROOT else str(build / ".venv" / "bin" / "python")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(build)}
    with tempfile.TemporaryDirectory(prefix="unicron-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as memory:
        words = [str(state), str(ranks), str(build / "benchmarks" / "cost" / "plain_ranks.py")]
        settings = json.dumps(common | {"UNICRON_MEMORY_DIR": memory})
        process = subprocess.Popen([python, str(FOLDER / "world.py"), *words, settings], cwd=build, env=environment)
        roots[name] = process.pid
        try:
            assert process.wait(LIMIT) == 0, f"the sessions of {build} failed"
        finally:
            process.kill()


def show(title: str, blocks: Blocks, report: Report, most: float | None) -> None:
    """Print the ratio of neighbouring blocks, and what a session takes more."""
    ours, theirs = blocks[HEALED], blocks[PLAIN]
    more = 1e3 * statistics.median(a.wall - b.wall for a, b in zip(ours, theirs, strict=True))
    busy = statistics.median(a.ranks / b.ranks for a, b in zip(ours, theirs, strict=True))
    plain = 1e3 * statistics.median(block.wall for block in theirs)
    report.row(title, plain, more, f"{busy:.4f}", label=60, width=10, digits=1)
    report.details[title] = dict(blocks)
    walls = [block.wall for block in ours], [block.wall for block in theirs]
    report.ratio(f"iteration with Unicron / plain, {title}", *walls, most)


def rank_memory(folder: Path, ranks: int) -> Memory:
    """Return what the ranks of a set have noted, as a mean in MB."""
    found = [json.loads((folder / f"memory.{folder.name}.{rank}").read_text()) for rank in range(ranks)]
    return {key: statistics.mean(each[key] for each in found) / 1e6 for key in found[0]}


def compare_memory(module: Module, sizes: Sizes, report: Report) -> None:
    """Print what the parameters take in a rank's memory at most, with Unicron over without: the difference of two
    models, so that programs do not count. Copies of the state are in shared memory, which is shown by itself."""
    large, small = dict[str, Memory](), dict[str, Memory]()
    module_blocks(module, sizes, large)
    module_blocks(replace(module, width=Module.width), sizes, small)
    ours, theirs = ({key: large[name][key] - small[name][key] for key in large[name]} for name in (HEALED, PLAIN))
    both = f"{ours['own']:.1f} and {theirs['own']:.1f} MB"
    report.text(
        f"{module.title}: a rank's with and without Unicron {both}; copies of the state {ours['shared']:.1f} MB"
    )
    what = f"memory of a rank with Unicron / plain, {module.title}"
    report.figure(what, ours["own"] / theirs["own"], "", MOST_MEMORY)


def compare(title: str, blocks: Blocks, report: Report) -> None:
    """Print what a session adds to the processor's time of an iteration, in this build over the other one."""
    for number, of in ((1, "the ranks"), (2, "ranks, agents and unicrond")):
        plain = [block[number] for block in blocks[PLAIN]]
        adds = {
            name: statistics.median(block[number] - base for block, base in zip(blocks[name], plain, strict=True))
            for name in (HEALED, OTHER)
        }
        both = f"{1e3 * adds[HEALED]:.2f} and {1e3 * adds[OTHER]:.2f} ms to {1e3 * statistics.median(plain):.2f} ms"
        report.text(f"{title}, {of}: this build and the other one add {both}")
        report.figure(f"CPU time that a session adds / other build's, {of}", adds[HEALED] / adds[OTHER], "", MOST_ADDED)
    ours, theirs = ([block.wall for block in blocks[name]] for name in (HEALED, OTHER))
    report.ratio(f"iteration / other build's, {title}", ours, theirs, None)
