"""Train a plain module in both sets of ranks of ``benchmarks.cost``: under an agent a Session, else the loop that
torch's documents have, with DistributedDataParallel. The model and its data are the leaderboard's.

Environment: COST_* as for ``ranks``, LEADERBOARD_DEVICE_SECONDS as for ``benchmarks.leaderboard.ranks.core``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import unicron
from benchmarks.cost import gates
from benchmarks.leaderboard.ranks import core


def healed() -> Iterator[object]:
    """Iterations under a session, with its defaults: the state is copied to memory at each."""
    unicron.init_process_group("gloo")
    model, optimizer = core.build()
    yield from unicron.Session(
        model=model,
        optimizer=optimizer,
        micro_batches=core.MICRO_BATCHES,
        forward_step=lambda tokens, model: core.loss_of(model, tokens),
        fetch=core.micro_batch,
        train_iterations=gates.ITERATIONS,
    )


def plain() -> Iterator[object]:
    """Iterations of a loop that keeps nothing and knows nothing of this project."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = core.build()
    ddp = DistributedDataParallel(model)
    mine = range(rank, core.MICRO_BATCHES, size)
    for iteration in range(gates.ITERATIONS):
        optimizer.zero_grad()
        total = torch.zeros(1)
        for index in mine:
            ddp.require_backward_grad_sync = index == mine[-1]
            loss = core.loss_of(ddp, core.micro_batch(iteration, index)) / core.MICRO_BATCHES
            total += loss.detach()
            (loss * size).backward()
        dist.all_reduce(total)  # the job's loss, which a session says, too
        optimizer.step()
        yield float(total)


if __name__ == "__main__":
    gates.train(healed() if gates.KIND == "healed" else plain())
