"""A script without a session that counts, and keeps its count in memory after each step until SAVES_OUT/stop is there;
SAVES_OUT/begun.RANK has with what each of its processes began. SAVES_OWN: each rank keeps a state of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import unicron

OUT, OWN = Path(os.environ["SAVES_OUT"]), bool(os.environ.get("SAVES_OWN"))
NUMBERS = 100_000  # of a state


def main() -> None:
    dist.init_process_group("gloo")
    saved, own = unicron.memory.load(), 10**6 * dist.get_rank() if OWN else 0
    iteration = 0 if saved is None else saved.iteration
    if saved is not None:
        assert torch.equal(saved.state["x"], torch.full((NUMBERS,), own + iteration)), (
            "another's state, or a damaged one"
        )
    with (OUT / f"begun.{os.environ['RANK']}").open("a") as file:
        file.write(f"{iteration} {os.getpid()}\n")
    over = torch.zeros(1)
    while not over.item():
        over.fill_(float((OUT / "stop").exists()))
        dist.all_reduce(over)
        iteration += 1
        unicron.memory.save({"x": torch.full((NUMBERS,), own + iteration)}, iteration, replicated=not OWN)
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
