"""A script without a session that keeps its state with unicron.memory, as a rank of a world of torchrun's.

With MEMORY_SAVES, a JSON list of [iteration, ranks, replicated], it notes in MEMORY_OUT/loaded.RANK what it finds and
saves these in turn. Else it counts, and keeps its count after each step until MEMORY_OUT/stop is there; begun.RANK has
with what each of its processes began. MEMORY_OWN: each rank keeps a state of its own.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import unicron

OUT, RANK = Path(os.environ["MEMORY_OUT"]), int(os.environ["RANK"])
NUMBERS = 100_000  # of a state


def save_in_turn(saves: list[tuple[int, list[int], bool]]) -> None:
    saved = unicron.memory.load()
    found = None if saved is None else [saved.iteration, saved.state["x"].tolist()]
    (OUT / f"loaded.{RANK}").write_text(json.dumps(found))
    for iteration, ranks, replicated in saves:
        if RANK in ranks:
            value = float(iteration) if replicated else 100.0 * RANK + iteration
            unicron.memory.save({"x": torch.full((2,), value)}, iteration, replicated)
    dist.barrier()


def count(replicated: bool) -> None:
    saved, own = unicron.memory.load(), 0 if replicated else 10**6 * RANK
    iteration = 0 if saved is None else saved.iteration
    if saved is not None:
        wanted = torch.full((NUMBERS,), own + iteration)
        assert torch.equal(saved.state["x"], wanted), "another's state, or a damaged one"
    with (OUT / f"begun.{RANK}").open("a") as file:
        file.write(f"{iteration} {os.getpid()}\n")
    over = torch.zeros(1)
    while not over.item():
        over.fill_(float((OUT / "stop").exists()))
        dist.all_reduce(over)
        iteration += 1
        unicron.memory.save({"x": torch.full((NUMBERS,), own + iteration)}, iteration, replicated=replicated)
        time.sleep(0.05)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if saves := os.environ.get("MEMORY_SAVES"):
        save_in_turn(json.loads(saves))
    else:
        count(replicated=not os.environ.get("MEMORY_OWN"))
    dist.destroy_process_group()
