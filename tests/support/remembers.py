"""A script without a session that keeps its state with unicron.memory, as a rank of a world of torchrun's.

It notes in REMEMBERS_OUT/loaded.RANK what it finds, then saves in turn what REMEMBERS_SAVES says, a JSON list of
[iteration, ranks, replicated].
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

import unicron

RANK = int(os.environ["RANK"])


def main() -> None:
    dist.init_process_group("gloo")
    saved = unicron.memory.load()
    told = None if saved is None else [saved.iteration, saved.state["x"].tolist()]
    Path(os.environ["REMEMBERS_OUT"], f"loaded.{RANK}").write_text(json.dumps(told))
    for iteration, ranks, replicated in json.loads(os.environ.get("REMEMBERS_SAVES", "[]")):
        if RANK in ranks:
            value = float(iteration) if replicated else 100.0 * RANK + iteration
            unicron.memory.save({"x": torch.full((2,), value)}, iteration, replicated)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
