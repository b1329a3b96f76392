"""Turns of a rank with the ranks of the other set (:mod:`benchmarks.cost.turns`).

After its warm-up a rank waits at its gate, a FIFO, before each block, and reports afterwards how many seconds and CPU
seconds the block took. At its end it notes its memory in COST_FOLDER/memory.KIND.RANK. Environment: COST_FOLDER, with
the gates; COST_RANK of a plain rank; COST_BLOCKS; COST_EACH, iterations of a block; COST_WARM_UP, iterations;
COST_GIVE_BACK=1: what the process does not use goes back to the system.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

KIND = "healed" if "UNICRON_AGENT" in os.environ else "plain"
FOLDER, RANK = Path(os.environ["COST_FOLDER"]), int(os.environ.get("UNICRON_SLOT") or os.environ["COST_RANK"])
BLOCKS, EACH, WARM_UP = (int(os.environ[f"COST_{name}"]) for name in ("BLOCKS", "EACH", "WARM_UP"))
ITERATIONS = WARM_UP + BLOCKS * EACH


def memory() -> dict[str, int]:
    """Return the most bytes of this process so far that are in no file, and those in shared memory now: copies of the
    state."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most, files, shared = (1024 * int(lines[name].split()[0]) for name in ("VmHWM", "RssFile", "RssShmem"))
    return {"own": most - files - shared, "shared": shared}


def give_back() -> None:
    """Have large blocks of memory from the system, and give them back at once, so that the process has what it uses."""
    library = ctypes.CDLL(None)
    for parameter in (-1, -3):  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD; a fork has its parent's
        library.mallopt(parameter, 1 << 17)


def train(iterations: Iterable[object]) -> None:
    """Do all iterations, block by block."""
    began = (0.0, 0.0)
    if os.environ.get("COST_GIVE_BACK") == "1":
        give_back()
    with (FOLDER / f"{KIND}.{RANK}").open("rb", buffering=0) as gate, (FOLDER / "done").open("wb", buffering=0) as done:
        for count, _ in enumerate(iterations, 1):
            if count < WARM_UP or (count - WARM_UP) % EACH:
                continue
            dist.barrier()
            now = time.perf_counter(), time.process_time()
            took = [now[0] - began[0], now[1] - began[1]] if count > WARM_UP else [0.0, 0.0]
            done.write(json.dumps([KIND, RANK, *took]).encode() + b"\n")
            if count == ITERATIONS:
                (FOLDER / f"memory.{KIND}.{RANK}").write_text(json.dumps(memory()))
            else:
                gate.read(1)
                dist.barrier()
                began = time.perf_counter(), time.process_time()
