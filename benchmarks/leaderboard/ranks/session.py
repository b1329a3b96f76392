"""Train by `unicron.Session`: Unicron's session mode."""

from __future__ import annotations

import torch
import torch.distributed as dist

import unicron
from benchmarks.leaderboard.ranks import core, sharded


def main() -> None:
    unicron.init_process_group("gloo", layout=unicron.Layout(shard=core.SHARD))
    model, optimizer = core.build() if core.SHARD == 1 else sharded.build(unicron.shard_mesh())
    done: dict[int, list[int]] = {}  # iteration -> micro-batches that this process has computed

    def fetch(iteration: int, index: int) -> tuple[int, int, torch.Tensor]:
        return iteration, index, core.micro_batch(iteration, index)

    def forward_step(fetched: tuple[int, int, torch.Tensor], model: torch.nn.Module) -> torch.Tensor:
        iteration, index, tokens = fetched
        loss = core.loss_of(model, tokens)
        notes.micro(iteration, index)
        done.setdefault(iteration, []).append(index)
        return loss

    session = unicron.Session(
        model=model,
        optimizer=optimizer,
        micro_batches=core.MICRO_BATCHES,
        forward_step=forward_step,
        fetch=fetch,
        seq_length=core.LENGTH,
        micro_batch_size=core.SAMPLES,
        train_iterations=core.ITERATIONS,
        checkpoints=unicron.Checkpoints(core.CHECKPOINT.parent / "session", interval=100),
    )
    notes = core.Notes(session.slot)
    for result in session:
        mine = done.pop(result.iteration, [])
        notes.step(result.iteration, result.loss, result.world_size, dist.get_rank(), mine)


if __name__ == "__main__":
    main()
