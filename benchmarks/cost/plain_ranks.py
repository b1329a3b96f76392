"""Train the leaderboard's model, whole or sharded: under an agent in a session, else in the loop of torch's documents.

Environment: COST_* as in ``gates``, LEADERBOARD_* as in ``benchmarks.leaderboard.ranks.core``.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unicron
from benchmarks.cost import gates
from benchmarks.leaderboard.ranks import core, sharded

PATIENCE = datetime.timedelta(hours=1)  # each set waits while the others train


def healed() -> Iterator[object]:
    """Train under a session with its defaults: it copies the state to memory in each iteration."""
    if core.SHARD > 1:  # builds before have no such layout
        unicron.init_process_group("gloo", layout=unicron.Layout(shard=core.SHARD))
        model, optimizer = sharded.build(unicron.shard_mesh())
    else:
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
    """Train with DistributedDataParallel or `fully_shard`, without Unicron and without checkpoints."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    trained: nn.Module
    if core.SHARD > 1:
        trained, optimizer = sharded.build(sharded.hybrid_mesh(rank, size, PATIENCE))
    else:
        model, optimizer = core.build()
        trained = DistributedDataParallel(model)
    mine = range(rank, core.MICRO_BATCHES, size)
    for iteration in range(gates.ITERATIONS):
        optimizer.zero_grad()
        total = torch.zeros(1)
        for index in mine:
            with core.reducing(trained, last=index == mine[-1]):
                loss = core.loss_of(trained, core.micro_batch(iteration, index)) / core.MICRO_BATCHES
                total += loss.detach()
                (loss * size).backward()
        dist.all_reduce(total)  # the job's loss, which a session reports, too
        optimizer.step()
        yield float(total)


if __name__ == "__main__":
    gates.train(healed() if gates.KIND == "healed" else plain())
