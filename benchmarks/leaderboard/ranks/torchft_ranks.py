"""Train with torchft, as its `train_ddp.py` does: one replica group a node.

The manager's step is the iteration, so a step that was not committed is repeated with the same data. Micro-batches are
dealt over the participants, so none is left out while a replica is away; this needs the quorum before the forward pass
(`use_async_quorum=False`). Gradients are reduced flat by `Manager.allreduce` after the backward pass: the hook of
torchft 0.2.0's `DistributedDataParallel` asserts that there is a future, and after a failed wait of gloo there is none,
so the death of one replica ended all.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.leaderboard.ranks import core

QUORUM_SECONDS, OPERATION_SECONDS = 60.0, 10.0
CHECKPOINT_EVERY = 100  # iterations; only the loss of all replicas needs a checkpoint


def reduce(manager: Manager, model: torch.nn.Module, total: torch.Tensor) -> torch.Tensor:
    """Average all gradients over the replicas, in place, and return the average of `total`."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), total])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat[:-1].split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    return flat[-1:]


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    model, optimizer = core.build()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=core.TIMEOUT),
        load_state_dict=lambda saved: core.take(saved, model, optimizer),
        state_dict=lambda: core.state(model, optimizer),
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"node{os.environ['LEADERBOARD_NODE']}",
        timeout=timedelta(seconds=OPERATION_SECONDS),
        quorum_timeout=timedelta(seconds=QUORUM_SECONDS),
    )
    notes = core.Notes(int(os.environ["LEADERBOARD_NODE"]))
    if core.CHECKPOINT.is_file():
        saved = torch.load(core.CHECKPOINT, weights_only=True)
        core.take(saved, model, optimizer)
        manager.load_state_dict(saved["torchft"])
    stepper = Optimizer(manager, optimizer)
    while manager.current_step() < core.ITERATIONS:
        stepper.zero_grad()  # waits for the quorum, and gets the state if this replica is behind
        rank, size, iteration = manager.participating_rank(), manager.num_participants(), manager.current_step()
        assert rank is not None, "with a synchronous quorum each of its members participates"
        mine, total = core.compute(model, iteration, rank, size, notes)
        total = reduce(manager, model, total * size)  # the manager averages
        stepper.step()
        if manager.current_step() > iteration:
            notes.step(iteration, float(total), size, rank, mine)
            if rank == 0 and manager.current_step() % CHECKPOINT_EVERY == 0:
                new = core.CHECKPOINT.with_suffix(f".{os.getpid()}")
                torch.save(core.state(model, optimizer) | {"torchft": manager.state_dict()}, new)
                new.replace(core.CHECKPOINT)


if __name__ == "__main__":
    main()
