"""A job of two nodes, each with half of a model and a copy of the other half."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.jobs import World
from unicron_transition.snapshot.image_format import ImagePage, inventory

SETTINGS = {"TINY_ITERATIONS": "100000", "TINY_SLOW": "0.05", "TINY_LAYOUT": "2 1 1"}
SHARED_EXPERTS = {  # each node has half of the experts
    "TINY_LAYOUT": "1 1 1 2 1",
    "TINY_EXPERTS": "aux_loss",
    "TINY_EXPERT_COUNT": "8",
    "TINY_DISPATCHER": "alltoall",
}


class Halves(World):
    """Two nodes, each with half of the model."""

    def memory(self, node: str) -> Path:
        return next(Path(self.array.environment["UNICRON_MEMORY_DIR"]).glob(f"unicron.*.{node}.*"))

    def copies(self, node: str, slot: int) -> list[ImagePage]:
        """What a node has of another one's state, the oldest first."""
        found = [one for one in inventory(self.memory(node)) if one.path.name.startswith("copy-")]
        return sorted((one for one in found if one.key.slot == slot), key=lambda one: one.key.iteration)

    def both_copied(self) -> int:
        """The iteration of which each node has the other's half."""
        self.wait(lambda: self.trains([0, 1], 1), "training")
        self.wait(lambda: self.copies("n0", 1) and self.copies("n1", 0), "a copy of each half in the other node")
        cut = self.copies("n0", 1)[0].key.iteration
        self.wait(lambda: self.trains([0, 1], cut + 3), "some iterations more")
        return cut

    def power_failure(self, element: int, node: str) -> None:
        self.agents[element].kill()
        shutil.rmtree(self.memory(node))

    def on_again(self) -> dict:
        """Wait until it trains in another generation; returns the first plan for that."""
        self.wait(lambda: len([e for e in self.events("step") if e["generation"] > 1]) > 2, "on again")
        return self.events("plan")[1]["plan"]
