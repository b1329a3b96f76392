"""A script without a session that counts, and keeps its count in memory after each step until SAVES_OUT/stop is there;
SAVES_OUT/begun.RANK has with what each of its processes began."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import transition.memory

OUT = Path(os.environ["SAVES_OUT"])


def main() -> None:
    dist.init_process_group("gloo")
    saved = transition.memory.load()
    iteration = 0 if saved is None else saved.iteration
    with (OUT / f"begun.{os.environ['RANK']}").open("a") as file:
        file.write(f"{iteration} {os.getpid()}\n")
    over = torch.zeros(1)
    while not over.item():
        over.fill_(float((OUT / "stop").exists()))
        dist.all_reduce(over)
        iteration += 1
        transition.memory.save({"x": torch.full((4,), float(iteration))}, iteration, replicated=True)
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
