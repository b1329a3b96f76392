"""Sets of ranks take turns: each trains a block of iterations while the others wait at their gates.

One set is a plain loop in processes without Unicron, the others are sessions, of this build or of an earlier one. So
other work on the machine slows all down alike, and the ratio of neighbouring blocks is the cost of a session.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.support.processes import outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.warm import Script

LIMIT = 3600.0
PLAIN, HEALED = "plain", "healed"  # kinds of ranks, and names of sets


class Block(NamedTuple):
    """An iteration of a set, as the mean of a block."""

    wall: float
    """Seconds."""
    ranks: float
    """CPU seconds of all ranks."""
    all: float
    """The same with their agents and the controller, if the set has a process that these descend from."""


Blocks = dict[str, list[Block]]
"""The blocks of each set, by its name."""
Train = Callable[[dict[str, str]], object]
"""Trains a set of sessions to its end, with this environment."""


class Quiet(Ranks):
    """A stand-in for agent and controller that sleeps until a message comes."""

    def _hear(self, milliseconds: int) -> None:
        super()._hear(milliseconds and 250)


class Turns(threading.Thread):
    """Opens the gates of the sets by turns, in the order a b c c b a. roots: the process of which a set's agents and
    controller descend, by the set's name."""

    def __init__(self, folder: Path, names: list[str], pairs: int, size: int, roots: Mapping[str, int]):
        super().__init__(daemon=True)
        self.folder, self.pairs, self.size, self.roots = folder, pairs, size, roots
        self.blocks: Blocks = {name: [] for name in names}
        for name in names:
            (folder / name).mkdir()
            for gate in self._gates(name):
                os.mkfifo(gate)
            os.mkfifo(folder / name / "done")

    def _gates(self, name: str) -> list[Path]:
        kind = PLAIN if name == PLAIN else HEALED
        return [self.folder / name / f"{kind}.{rank}" for rank in range(self.size)]

    def run(self) -> None:
        gates, done = {}, {}
        for name in self.blocks:
            gates[name] = [open(gate, "wb", 0) for gate in self._gates(name)]
            done[name] = open(self.folder / name / "done")
            for _ in range(self.size):
                done[name].readline()  # the warm-up
        for pair in range(self.pairs):
            for name in list(self.blocks) if pair % 2 == 0 else list(reversed(self.blocks)):
                self.blocks[name].append(self._block(name, gates[name], done[name]))
        for each in done.values():
            each.close()

    def _block(self, name: str, gates: list[Any], done: IO[str]) -> Block:
        root = self.roots.get(name)
        before = descendants_seconds(root) if root is not None else 0.0
        for gate in gates:
            gate.write(b"x")
        ends = [json.loads(done.readline()) for _ in range(self.size)]
        ranks = sum(end[3] for end in ends)
        busy = descendants_seconds(root) - before if root is not None else ranks
        return Block(max(end[2] for end in ends), ranks, busy)


def descendants_seconds(root: int) -> float:
    """Return the CPU seconds of all living processes that descend from a process."""
    parents, seconds = {}, {}
    for entry in os.listdir("/proc"):
        try:
            words = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split() if entry.isdigit() else []
        except OSError:
            continue  # it has ended
        if words:
            parents[int(entry)] = int(words[1])
            seconds[int(entry)] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    found, added = {root}, {root}
    while added:
        added = {child for child, parent in parents.items() if parent in added} - found
        found |= added
    return sum(seconds[each] for each in found - {root} if each in seconds)


def take_turns(
    folder: Path,
    script: Path,
    size: int,
    counts: tuple[int, int, int],
    settings: dict[str, str],
    sessions: Mapping[str, Train],
    roots: Mapping[str, int] | None = None,
) -> Blocks:
    """Let the plain ranks of `script` and the sets of `sessions`, each of `size` ranks, train by turns; `counts` are
    pairs of blocks, iterations a block, and of a warm-up. roots: as for :class:`Turns`; may be filled meanwhile."""
    turns = Turns(folder, [*sessions, PLAIN], counts[0], size, {} if roots is None else roots)
    turns.start()
    names = ("COST_BLOCKS", "COST_EACH", "COST_WARM_UP")
    common = settings | dict(zip(names, map(str, counts), strict=True))
    plain = start_plain(script, common | {"COST_FOLDER": str(folder / PLAIN)}, folder, size)
    with ThreadPoolExecutor(len(sessions)) as pool:
        trained = [pool.submit(train, common | {"COST_FOLDER": str(folder / name)}) for name, train in sessions.items()]
        for each in trained:
            each.result()
    end_plain(plain)
    turns.join(LIMIT)
    each = counts[1]
    return {
        name: [Block(*(value / each for value in block)) for block in found] for name, found in turns.blocks.items()
    }


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
