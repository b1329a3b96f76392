"""Train the leaderboard's model: under an agent in a session, else in the loop of torch's documents.

Environment: COST_* as in ``gates``, LEADERBOARD_DEVICE_SECONDS as in ``benchmarks.leaderboard.ranks.core``.
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
    """Train under a session with its defaults: it copies the state to memory in each iteration."""
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
    """Train with DistributedDataParallel, without Unicron and without checkpoints."""
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
        dist.all_reduce(total)  # the job's loss, which a session reports, too
        optimizer.step()
        yield float(total)


if __name__ == "__main__":
    gates.train(healed() if gates.KIND == "healed" else plain())
