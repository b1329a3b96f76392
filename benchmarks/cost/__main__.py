"""The cost of Unicron while nothing fails: iteration time with a Session over plain Megatron-core, layout by layout.

    python -m benchmarks.cost [--pairs 12] [--only "DP2 TP2, distributed optimizer"]... [--ranks 2]

Two sets of ranks live at once, of the same layout, model and data: one of sessions, which report to an agent's
stand-in, one of Megatron's own loop in processes that never heard of this project. They take turns: each trains a block
of iterations while the other waits at its gate, so what else the machine does strikes both alike. The ratio is that of
neighbours.

A plain module is trained by a Session under real agents and a real unicrond, and by torch's DistributedDataParallel.
What agents and controller take of the cores is in the time then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.leaderboard.systems.unicron import Shipped
from benchmarks.report import print_figure
from tests.support import rank_harness
from tests.support.processes import outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.warm import Script

SIZE = 4  # ranks of each set
WARM_UP = 2
ASKED = 1.01
SCRIPT = Path(__file__).with_name("ranks.py")
MODULE_SCRIPT = Path(__file__).with_name("plain_ranks.py")
LIMIT = 3600.0
# 32,768 tokens an iteration: see docs/measurements.md for why so many
MODEL = {
    "TINY_HIDDEN": "256",
    "TINY_LAYERS": "4",
    "TINY_SEQUENCE": "128",
    "TINY_SIZE": "4",
    "TINY_MICRO_BATCHES": "64",
}
# For all processes: without it glibc gives memory back to the system, and takes it again, in each micro-batch.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(10**9), "MALLOC_TRIM_THRESHOLD_": str(4 * 10**9)}
SHORT = MODEL | {"TINY_MICRO_BATCHES": "8"}  # an eighth of the work, the same state: what the fixed cost is


@dataclass(frozen=True)
class Layout:
    """One row: tiny_gpt's layout, ranks of a replica, settings beside it."""

    shape: str
    replica: int
    settings: dict[str, str]


SHARDED = {"TINY_DISTOPT": "1"}
LAYOUTS = {
    "DP4": Layout("1 1 1", 1, {}),
    "DP2 TP2, distributed optimizer": Layout("2 1 1", 2, SHARDED),
    "DP2 PP2, distributed optimizer": Layout("1 2 1", 2, SHARDED),
}


@dataclass(frozen=True)
class Module:
    """One row of a plain module: micro-batches of an iteration, in each rank, what each takes on a device of its own,
    and iterations of a block."""

    micro_batches: int
    device_seconds: float
    each: int


MODULES = {
    "plain module, iterations of 160 ms": Module(4, 0.025, 10),
    "plain module, iterations of 50 ms": Module(1, 0.030, 30),
}
PLAIN_WARM_UP = 10


class Quiet(Ranks):
    """A stand-in for agent and controller that sleeps until it hears something."""

    def _hear(self, milliseconds: int) -> None:
        super()._hear(milliseconds and 250)


class Turns(threading.Thread):
    """Opens the gates of the two sets by turns, in the order a b b a; `blocks` has (seconds, processor's seconds)."""

    def __init__(self, folder: Path, pairs: int, size: int = SIZE):
        super().__init__(daemon=True)
        self.folder, self.pairs, self.size = folder, pairs, size
        self.blocks: dict[str, list[tuple[float, float]]] = {"healed": [], "plain": []}
        for kind in self.blocks:
            for rank in range(self.size):
                os.mkfifo(folder / f"{kind}.{rank}")
        os.mkfifo(folder / "done")

    def run(self) -> None:
        gates = {
            kind: [open(self.folder / f"{kind}.{rank}", "wb", 0) for rank in range(self.size)] for kind in self.blocks
        }
        with open(self.folder / "done") as done:
            for _ in range(2 * self.size):
                done.readline()  # the warm-up
            for pair in range(self.pairs):
                kinds = ("healed", "plain") if pair % 2 == 0 else ("plain", "healed")
                for kind in kinds:
                    self.blocks[kind].append(self._block(gates[kind], done))

    def _block(self, gates: list[Any], done: IO[str]) -> tuple[float, float]:
        for gate in gates:
            gate.write(b"x")
        ends = [json.loads(done.readline()) for _ in range(self.size)]
        return max(end[2] for end in ends), sum(end[3] for end in ends)


def run(layout: Layout, model: dict[str, str], pairs: int, each: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and the processor's, of an iteration with and without Unicron, in each pair of blocks."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as name:
        folder = Path(name)
        turns = Turns(folder, pairs)
        turns.start()
        common = {**model, **layout.settings, "TINY_LAYOUT": layout.shape, "TINY_SAVE": "0"}
        common |= {"COST_FOLDER": name, "COST_BLOCKS": str(pairs), "COST_EACH": str(each)}
        common |= {"COST_WARM_UP": str(WARM_UP), "TINY_SCRIPT": str(SCRIPT)}
        shared = port()
        plain = [
            Script(SCRIPT, environment=plain_environment(common, folder, rank, SIZE, shared)) for rank in range(SIZE)
        ]
        ranks = Quiet(folder, SIZE, [], fork=True, replica=layout.replica, **common)
        ranks.drive()
        for script in plain:
            end = script.wait()
            assert end.returncode == 0, end.stderr[-3000:]
        turns.join(LIMIT)
    return {kind: [(wall / each, busy / each) for wall, busy in found] for kind, found in turns.blocks.items()}


def run_module(module: Module, pairs: int, size: int) -> dict[str, list[tuple[float, float]]]:
    """Measure a plain module in so many ranks."""
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as name, shared_memory() as memory:
        folder = Path(name)
        turns = Turns(folder, pairs, size)
        turns.start()
        common = {"COST_FOLDER": name, "COST_BLOCKS": str(pairs), "COST_EACH": str(module.each)}
        common |= {"COST_WARM_UP": str(PLAIN_WARM_UP), "LEADERBOARD_DEVICE_SECONDS": str(module.device_seconds)}
        common["LEADERBOARD_MICRO_BATCHES"] = str(module.micro_batches * size)
        shared = port()
        plain = [
            Script(MODULE_SCRIPT, environment=plain_environment(common, folder, rank, size, shared))
            for rank in range(size)
        ]
        (folder / "unicron").mkdir()
        command = [sys.executable, str(MODULE_SCRIPT)]
        with Shipped(folder / "unicron", size, command=command, UNICRON_MEMORY_DIR=memory, **common) as world:
            assert [agent.wait(LIMIT) for agent in world.agents.values()] == [0] * size, world.told()
        for script in plain:
            end = script.wait()
            assert end.returncode == 0, end.stderr[-3000:]
        turns.join(LIMIT)
    each = module.each
    return {kind: [(wall / each, busy / each) for wall, busy in found] for kind, found in turns.blocks.items()}


@contextlib.contextmanager
def shared_memory() -> Iterator[str]:
    """A folder in it."""
    folder = tempfile.mkdtemp(prefix="unicron-bench-", dir="/dev/shm")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def port() -> int:
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def plain_environment(common: dict[str, str], folder: Path, rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun gives a rank."""
    world = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    out = folder / f"out.{rank}"
    out.mkdir()
    return outside_slurm() | common | world | {"TINY_OUT": str(out), "COST_RANK": str(rank), "OMP_NUM_THREADS": "1"}


# ------------------------------------------------------------ what is printed
def row(name: str, micro_batches: int, found: dict[str, list[tuple[float, float]]]) -> tuple[float, dict[str, Any]]:
    """Prints what was found of one layout; returns the median ratio, and everything."""
    pairs_of = list(zip(found["healed"], found["plain"], strict=True))
    ratios = statistics.quantiles([ours[0] / theirs[0] for ours, theirs in pairs_of], n=4)
    busy = statistics.median(ours[1] / theirs[1] for ours, theirs in pairs_of)
    more = 1e3 * statistics.median(ours[0] - theirs[0] for ours, theirs in pairs_of)
    plain = 1e3 * statistics.median(theirs[0] for _, theirs in pairs_of)
    print(
        f"{name:<36}{micro_batches:>4}{plain:>10.0f}{more:>9.1f}"
        f"{f'{ratios[1]:.4f} ({ratios[0]:.4f}..{ratios[2]:.4f})':>27}{busy:>10.4f}",
        flush=True,
    )
    return ratios[1], {"layout": name, "ratios": ratios, "busy": busy, "more_ms": more, "plain_ms": plain, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks")
    parser.add_argument("--each", type=int, default=1, help="iterations of a block")
    parser.add_argument("--only", action="append", choices=[*LAYOUTS, *MODULES], help="this row; may be given again")
    parser.add_argument("--ranks", type=int, default=SIZE, help="of a plain module")
    parser.add_argument("--short", action="store_true", help="iterations of an eighth of the tokens as well")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rank_harness.LIMIT = LIMIT
    os.environ.update(MEMORY)
    print(f"iteration with Unicron / without; {options.ranks} ranks on {os.cpu_count()} cores, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}; {options.pairs} pairs of {options.each}; ms")
    print("median and quartiles of the pairs' ratios; the processor's time alone")
    print(f"{'layout, micro-batches':<40}{'plain':>10}{'more':>9}{'ratio':>27}{'processor':>10}")
    results, marks = [], []
    for name in options.only or [*LAYOUTS, *MODULES]:
        if name in MODULES:
            found = run_module(MODULES[name], options.pairs, options.ranks)
            ratio, result = row(name, MODULES[name].micro_batches * options.ranks, found)
            results.append(result)
            marks.append((f"iteration with Unicron / plain, {name}", ratio))
            continue
        for model in (MODEL, SHORT) if options.short else (MODEL,):
            each = options.each * (int(MODEL["TINY_MICRO_BATCHES"]) // int(model["TINY_MICRO_BATCHES"]))
            found = run(LAYOUTS[name], model, options.pairs, each)
            ratio, result = row(name, int(model["TINY_MICRO_BATCHES"]), found)
            results.append(result)
            if model is MODEL:
                marks.append((f"iteration with Unicron / plain, {name}", ratio))
    for what, ratio in marks:
        print_figure(what, ratio, "", ASKED)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
