"""Unicron in both modes: a real unicrond, agents and ranks, without Slurm.

The benchmark brings a node back; under Slurm the requeued element would start there.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks.leaderboard import processes
from benchmarks.leaderboard.systems.base import NODES, RANKS, System
from benchmarks.report import commit
from tests.support.jobs import World


class Shipped(World):
    """A world whose unicrond has the product's defaults, without Slurm and munge."""

    usual = 'auth = "none"\nslurm = "none"\n'


class Session(System):
    """docs/user-guide.md, *Any PyTorch loop*."""

    name = "unicron"
    script = "session.py"

    world: Shipped

    def __init__(self, folder: Path, size: int = NODES, **variables: str) -> None:
        super().__init__(folder, size, **variables)
        self.memory = Path(tempfile.mkdtemp(prefix="leaderboard-", dir="/dev/shm"))

    def start(self) -> None:
        place = self.folder / "unicron"
        place.mkdir()
        command = [sys.executable, str(RANKS / self.script)]
        self.world = Shipped(place, 0, command=command, SLURM_ARRAY_TASK_COUNT=str(self.size), **self.variables)
        for node in range(self.size):
            self.power_on(node)

    def power_on(self, node: int) -> None:
        memory = self.memory / str(node)
        memory.mkdir()
        self.world.start_agent(node, **{processes.NODE: str(node), "UNICRON_MEMORY_DIR": str(memory)})

    def power_off(self, node: int) -> None:
        super().power_off(node)
        shutil.rmtree(self.memory / str(node), ignore_errors=True)  # a node without power loses its memory
        self.world.agents[node].process.wait()

    def kill_coordinator(self) -> None:
        self.world.kill()

    def start_coordinator(self) -> None:
        self.world.start()

    def close(self) -> None:
        super().close()
        try:
            if hasattr(self, "world"):
                self.world.kill()
                self.world.close()
        finally:
            shutil.rmtree(self.memory, ignore_errors=True)

    def logs(self, most: int = 2000) -> str:
        ends = (f"--- agent {element}\n{agent.log[-most:]}" for element, agent in self.world.agents.items())
        return "\n".join([*ends, "--- unicrond", self.world.log[-most:]])

    @classmethod
    def version(cls) -> str:
        return f"unicron {version('unicron-slurm')}, commit {commit()}"


class ShardedSession(Session):
    """docs/user-guide.md, the same with `fully_shard`: two elements of one rank are a replica."""

    shard = 2


class Restart(Session):
    """docs/user-guide.md, *Restart mode*, with the two lines of `unicron.memory`."""

    name = "unicron-restart"
    script = "restarted.py"
