"""Two sets of ranks take turns: each trains a block of iterations while the other waits at its gate.

One set are sessions, the other a plain loop in processes without Unicron. So other work on the machine slows both down
alike, and the ratio of neighbouring blocks is the cost of a session.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tests.support.processes import outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.warm import Script

LIMIT = 3600.0
Blocks = dict[str, list[tuple[float, float]]]
"""Seconds and CPU seconds of an iteration in each block, of the kinds "healed" and "plain"."""


class Quiet(Ranks):
    """A stand-in for agent and controller that sleeps until a message comes."""

    def _hear(self, milliseconds: int) -> None:
        super()._hear(milliseconds and 250)


class Turns(threading.Thread):
    """Opens the gates of the two sets by turns, in the order a b b a."""

    def __init__(self, folder: Path, pairs: int, size: int):
        super().__init__(daemon=True)
        self.folder, self.pairs, self.size = folder, pairs, size
        self.blocks: Blocks = {"healed": [], "plain": []}
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
                for kind in ("healed", "plain") if pair % 2 == 0 else ("plain", "healed"):
                    self.blocks[kind].append(self._block(gates[kind], done))

    def _block(self, gates: list[Any], done: IO[str]) -> tuple[float, float]:
        for gate in gates:
            gate.write(b"x")
        ends = [json.loads(done.readline()) for _ in range(self.size)]
        return max(end[2] for end in ends), sum(end[3] for end in ends)


def take_turns(
    folder: Path,
    script: Path,
    size: int,
    counts: tuple[int, int, int],
    settings: dict[str, str],
    train_healed: Callable[[dict[str, str]], object],
) -> Blocks:
    """Let two sets of `size` ranks train `script`; `counts` are pairs of blocks, iterations a block, and of a warm-up.

    `train_healed` trains the set of sessions to its end, with the environment that it gets.
    """
    turns = Turns(folder, counts[0], size)
    turns.start()
    names = ("COST_BLOCKS", "COST_EACH", "COST_WARM_UP")
    common = settings | {"COST_FOLDER": str(folder)} | dict(zip(names, map(str, counts), strict=True))
    plain = start_plain(script, common, folder, size)
    train_healed(common)
    end_plain(plain)
    turns.join(LIMIT)
    each = counts[1]
    return {kind: [(wall / each, busy / each) for wall, busy in found] for kind, found in turns.blocks.items()}


def start_plain(script: Path, common: dict[str, str], folder: Path, size: int) -> list[Script]:
    """Start the plain ranks with the environment that torchrun would give them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    scripts = []
    for rank in range(size):
        out = folder / f"out.{rank}"
        out.mkdir()
        own = {"RANK": str(rank), "COST_RANK": str(rank), "TINY_OUT": str(out)}
        scripts.append(Script(script, environment=outside_slurm() | common | world | own))
    return scripts


def end_plain(scripts: list[Script]) -> None:
    """Wait until the plain ranks have ended well."""
    for script in scripts:
        ended = script.wait(LIMIT)
        assert ended.returncode == 0, ended.stderr[-3000:]
