"""An unmodified script, as torchrun would start it: env:// variables and an all-reduce in each step.

It writes a line after its imports, after the rendezvous and at each step, into a file of its own beside those of the
other nodes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

IMPORTED = time.time()
OUT = Path(os.environ["FENCE_OUT"])
GENERATION = int(os.environ.get("UNICRON_GENERATION", "0"))
NODE = os.environ["SLURMD_NODENAME"]


def note(what: str, at: float = 0.0, step: int = 0) -> None:
    """Write one line."""
    line = {"what": what, "generation": GENERATION, "node": NODE, "step": step, "time": at or time.time()}
    with (OUT / f"lines.{NODE}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train for ever."""
    note("imported", IMPORTED)
    dist.init_process_group("gloo")
    note("joined")
    for step in range(1_000_000):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        note("step", step=step)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
