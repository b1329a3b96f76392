"""Train with torchft, as its `train_ddp.py` does: one replica group a node.

The manager's step is the iteration, so a step that was not committed is repeated with the same data. Micro-batches are
dealt over the participants, so none is left out while a replica is away; this needs the quorum before the forward pass
(`use_async_quorum=False`). Gradients are reduced flat by `Manager.allreduce` after the backward pass: the hook of
torchft 0.2.0's `DistributedDataParallel` asserts that there is a future, and after a failed wait of gloo there is none,
so the death of one replica ended all.

With LEADERBOARD_SHARD `fully_shard` shards each replica group by itself, as torchft's fsdp_test.py does. That sets an
all-reduce over the replicas by `set_all_reduce_hook`, which torch calls in every backward pass; here the shards are
reduced once, after the last one.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.leaderboard.ranks import core, sharded

QUORUM_SECONDS, OPERATION_SECONDS = 60.0, 10.0
CHECKPOINT_EVERY = 100  # iterations; only the loss of all replicas needs a checkpoint


def reduce(manager: Manager, model: torch.nn.Module, total: torch.Tensor) -> torch.Tensor:
    """Average all gradients over the replicas, in place, and return the average of `total`."""
    gradients = [sharded.local(parameter.grad) for parameter in model.parameters()]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), total])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat[:-1].split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    return flat[-1:]


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    if core.SHARD > 1:
        dist.init_process_group("gloo", timeout=core.START_TIMEOUT)
        mine = list(range(core.SHARD))
        group = dist.new_group(mine, timeout=core.TIMEOUT)
        mesh = DeviceMesh.from_group(group, "cpu", mine, mesh_dim_names=("shard",))
        model, optimizer = sharded.build(mesh)
    else:
        model, optimizer = core.build()
    shards = sharded if core.SHARD > 1 else core
    shard, replica = int(os.environ["RANK"]), int(os.environ["REPLICA_GROUP_ID"])
    checkpoint = core.CHECKPOINT if core.SHARD == 1 else core.CHECKPOINT.with_suffix(f".{shard}")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=core.TIMEOUT),
        load_state_dict=lambda saved: shards.take(saved, model, optimizer),
        state_dict=lambda: shards.state(model, optimizer),
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"replica{replica}",
        timeout=timedelta(seconds=OPERATION_SECONDS),
        quorum_timeout=timedelta(seconds=QUORUM_SECONDS),
    )
    notes = core.Notes(int(os.environ["LEADERBOARD_NODE"]))
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        shards.take(saved, model, optimizer)
        manager.load_state_dict(saved["torchft"])
    stepper = Optimizer(manager, optimizer)
    while manager.current_step() < core.ITERATIONS:
        stepper.zero_grad()  # waits for the quorum, and gets the state if this replica is behind
        number, iteration = manager.participating_rank(), manager.current_step()
        assert number is not None, "with a synchronous quorum each of its members participates"
        rank, size = number * core.SHARD + shard, manager.num_participants() * core.SHARD
        mine, total = core.compute(model, iteration, rank, size, notes)
        total = reduce(manager, model, total * manager.num_participants())  # the manager averages
        if core.SHARD > 1:
            dist.all_reduce(total, group=group)
        stepper.step()
        if manager.current_step() > iteration:
            notes.step(iteration, float(total), size, rank, mine)
            if number == 0 and manager.current_step() % CHECKPOINT_EVERY == 0:
                new = checkpoint.with_suffix(f".{os.getpid()}")
                torch.save(shards.state(model, optimizer) | {"torchft": manager.state_dict()}, new)
                new.replace(checkpoint)


if __name__ == "__main__":
    main()
