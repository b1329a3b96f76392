"""Train with DistributedDataParallel, or `fully_shard`, and checkpoints, as torch's documents do for elastic jobs.

torchrun, a plain Slurm job and Unicron's restart mode start it. Under ft_launcher (`--heartbeats`) it also sends the
heartbeats of NVRx's documents.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.leaderboard.ranks import core, sharded


class Keeper(Protocol):
    """The place of the state."""

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int: ...

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, following: int, rank: int) -> None: ...


def train(keeper: Keeper, monitor: Any = None) -> None:
    """Train from the newest state to the end; `monitor` is NVRx's RankMonitorClient."""
    dist.init_process_group("gloo", timeout=core.START_TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    notes = core.Notes(rank)
    if monitor is not None:
        monitor.init_workload_monitoring()
    # Ranks may be slow to connect, but a collective may not be slow.
    group = dist.new_group(timeout=core.TIMEOUT)
    if core.SHARD > 1:
        model, optimizer = sharded.build(sharded.hybrid_mesh(rank, size, core.TIMEOUT))
    else:
        model, optimizer = core.build()
    first = keeper.load(model, optimizer)
    trained = model if core.SHARD > 1 else DistributedDataParallel(model, process_group=group)
    for iteration in range(first, core.ITERATIONS):
        optimizer.zero_grad()
        mine, total = core.compute(trained, iteration, rank, size, notes)
        dist.all_reduce(total, group=group)
        if monitor is not None:
            monitor.send_heartbeat()
        optimizer.step()
        notes.step(iteration, float(total), size, rank, mine)
        keeper.save(model, optimizer, iteration + 1, rank)
    # torch 2.13: if DDP is the last to release its group, it holds the GIL and waits for gloo's thread, which may want
    # the GIL for the tensors of the last collective.
    del trained, model
    dist.destroy_process_group()


def main() -> None:
    monitor = None
    if "--heartbeats" in sys.argv:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        monitor = RankMonitorClient()
    train(sharded.Files() if core.SHARD > 1 else core.Files(), monitor)


if __name__ == "__main__":
    main()
