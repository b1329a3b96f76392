"""Train under lm-resiliency with GEMINI, as its resiliency_cycle example does with native PyTorch.

SCOUT is off: its replay calls torch.cuda. A group is passed, because by default one of NCCL is made. torchrun ends all
processes and with them GEMINI's memory, so what is read again is what it has written to disk.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig
from lm_resiliency.integrations.pytorch import enable_resiliency
from lm_resiliency.integrations.torchrun import get_torchrun_worker_context
from torch.nn.parallel import DistributedDataParallel

from benchmarks.leaderboard.ranks import core
from benchmarks.leaderboard.ranks.lm_link import Link


def main() -> None:
    context = get_torchrun_worker_context()
    assert context is not None
    dist.init_process_group("gloo", timeout=core.START_TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    notes = core.Notes(rank)
    model, optimizer = core.build()
    group = dist.new_group(timeout=core.TIMEOUT)
    ddp = DistributedDataParallel(model, process_group=group)
    handle = enable_resiliency(
        ddp,
        optimizer,
        interval=1,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(
            replication_jump=size // 2,
            disk_flush_interval=1,
            disk_folder=str(core.CHECKPOINT.parent / "gemini"),
            pin_memory=False,
        ),
        group=dist.new_group(backend="gloo"),
        device=torch.device("cpu"),
        recovery_mode=context.recovery_mode,
        _recovery_step=context.checkpoint_step,
        _expected_topology_id=context.topology_digest,
    )
    if handle.step_count != (context.checkpoint_step or 0):
        raise RuntimeError(f"step {context.checkpoint_step} was not found, but {handle.step_count}")
    topology = handle.ckpt_manager.topology_id
    link = Link(rank=rank, node=context.node_id, generation=context.generation, topology=topology)
    try:
        for iteration in range(handle.step_count, core.ITERATIONS):
            optimizer.zero_grad()
            mine, total = core.compute(ddp, iteration, rank, size, notes)
            dist.all_reduce(total, group=group)
            optimizer.step()
            notes.step(iteration, float(total), size, rank, mine)
    except RuntimeError as error:
        link.say(timed_out="Timed out" in str(error))
        raise


if __name__ == "__main__":
    main()
