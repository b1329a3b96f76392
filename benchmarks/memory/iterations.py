"""What an iteration costs more where the state is kept: in the node's memory, with copies in another node beside it,
and with a distributed optimizer, whose ranks give their shards to each other."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.memory import shards
from benchmarks.memory.figures import MEMORY, MODEL, dearer
from tests.support.jobs import World
from tests.support.rank_harness import Ranks

SHM = "/dev/shm"
SCRIPT = Path(__file__).with_name("ranks.py")
RANKS = 2
EACH = 4  # iterations of a block with a ring: two cuts or so
LIMIT = 3600.0  # seconds of a run


def kept(pairs: int) -> None:
    """Two replicas, one iteration with a copy beside one without."""
    os.environ.update(MEMORY)
    with tempfile.TemporaryDirectory(dir=SHM) as shared, tempfile.TemporaryDirectory() as name:
        settings = _settings(Path(name, "times"), pairs, 1) | {"UNICRON_MEMORY": shared, "TINY_SCRIPT": str(SCRIPT)}
        Ranks(Path(name), RANKS, [], fork=True, **settings).drive()
        told = json.loads(Path(name, "times").read_text())
    ratios, busy = _ratios(told["blocks"])
    dearer("iteration with copies to memory / without", ratios, _about(told, f"{RANKS} replicas"))
    print(f"  the processor's time of the rank that copies: {statistics.median(busy):.4f}")


def with_a_ring(pairs: int) -> None:
    """Halves of one replica in two nodes, under agents: in every other block of iterations each rank keeps its half,
    and its agent gives it to the other one's, as often as the controller asks for it."""
    os.environ.update(MEMORY)
    with tempfile.TemporaryDirectory(dir=SHM) as shared, tempfile.TemporaryDirectory() as name:
        out = Path(name, "times")
        settings = _settings(out, pairs, EACH) | {"TINY_LAYOUT": "2 1 1", "UNICRON_MEMORY_DIR": shared}
        with World(Path(name), RANKS, command=[sys.executable, str(SCRIPT)], **settings) as job:
            job.wait(out.exists, "the ranks have trained", LIMIT)
        told = json.loads(out.read_text())
    went = told["copied"]
    assert went >= 2, f"copies were given to another node {went} times only"
    about = f"{_about(told, 'each half in two nodes')}, {went} times to the other node"
    dearer("iteration with copies to memory and ring / without", _ratios(told["blocks"])[0], about)


def of_shards(pairs: int, iterations: int = 6) -> None:
    """A distributed optimizer on four ranks, in runs that take turns: shards in images and a copy of each with its
    partner, over neither."""
    os.environ.update(MEMORY)
    ratios = []
    for number in range(pairs):
        order = (True, False) if number % 2 else (False, True)
        found = {
            there: shards.run(iterations, there, **MODEL, UNICRON_STATE_COPIES=str(int(there)))["iteration"]
            for there in order
        }
        ratios.append(statistics.median(found[True]) / statistics.median(found[False]))
    about = (
        f"a distributed optimizer, {shards.RANKS} ranks, iterations of {statistics.median(found[False]) / 1e3:.2f} s"
    )
    dearer("iteration with shards in memory and with partners / with neither", ratios, about)


def _settings(out: Path, pairs: int, each: int) -> dict[str, str]:
    blocks = {"MEMORY_OUT": str(out), "MEMORY_BLOCKS": str(2 * pairs), "MEMORY_EACH": str(each)}
    return MODEL | blocks | {"TINY_SAVE": "0", "TINY_ITERATIONS": "1000000"}


def _ratios(blocks: list[list[float]]) -> tuple[list[float], list[float]]:
    """Of each pair of blocks, with copies over without: seconds, and seconds of the processor."""
    ratios, busy = [], []
    for one, other in zip(blocks[::2], blocks[1::2], strict=True):
        assert one[0] != other[0]
        copied, bare = (one, other) if one[0] else (other, one)
        ratios.append(copied[1] / bare[1])
        busy.append(copied[2] / bare[2])
    return ratios, busy


def _about(told: dict[str, Any], what: str) -> str:
    usual = statistics.median(seconds for copied, seconds, _ in told["blocks"] if not copied)
    return f"{what}, iterations of {usual:.2f} s, {told['size'] / 1e6:.0f} MB copied in each"
