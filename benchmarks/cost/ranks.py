"""What both sets of ranks of ``benchmarks.cost`` run: under an agent's stand-in a Session, else plain Megatron-core.

Environment: tiny_gpt's for the model; COST_FOLDER the folder with the gates, COST_RANK for a plain
rank, COST_BLOCKS, COST_EACH
iterations of a block, COST_WARM_UP. After the warm-up a rank waits at its gate, a FIFO, before each block, and says
afterwards how long the block took: seconds, and of those the processor's, this rank's share in them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

import transition
from tests.support import tiny_gpt

FOLDER, RANK = Path(os.environ["COST_FOLDER"]), int(os.environ.get("UNICRON_SLOT") or os.environ["COST_RANK"])
BLOCKS, EACH, WARM_UP = (int(os.environ[f"COST_{name}"]) for name in ("BLOCKS", "EACH", "WARM_UP"))
SIZES = (tiny_gpt.TENSOR, tiny_gpt.PIPELINE)


def healed() -> Iterator[object]:
    """Iterations under a session."""
    transition.init_process_group("gloo", transition.Layout(tensor=SIZES[0], pipeline=SIZES[1]))
    parallel_state.initialize_model_parallel(*SIZES)
    chunks, optimizer = tiny_gpt.build()
    yield from transition.Session(
        model=chunks,
        seed=1234,
        optimizer=optimizer,
        scheduler=tiny_gpt.schedule(optimizer),
        micro_batches=tiny_gpt.MICRO_BATCHES,
        forward_step=tiny_gpt.forward_step,
        fetch=tiny_gpt.fetch,
        seq_length=tiny_gpt.SEQUENCE,
        micro_batch_size=tiny_gpt.SIZE,
        train_iterations=WARM_UP + BLOCKS * EACH,
    )


def each_group_once() -> None:
    """Megatron makes many groups of the same ranks, and each gloo group has a thread that wakes a hundred times a
    second: 3 % of the processor's time here. A session has each group once, and that shall not count in its favour."""
    original, made = dist.new_group, {}

    def new_group(ranks=None, *arguments, **keywords):
        key = tuple(ranks or ()), keywords.get("backend")
        if key not in made:
            made[key] = original(ranks, *arguments, **keywords)
        return made[key]

    dist.new_group = new_group


def plain() -> Iterator[object]:
    """Iterations as Megatron's own training loop does them: nothing of this project is in them."""
    dist.init_process_group("gloo")
    each_group_once()
    parallel_state.initialize_model_parallel(*SIZES)
    chunks, optimizer = tiny_gpt.build()
    scheduler = tiny_gpt.schedule(optimizer)
    group = parallel_state.get_data_parallel_group()
    mine = range(parallel_state.get_data_parallel_rank(), tiny_gpt.MICRO_BATCHES, dist.get_world_size(group))
    for number in range(WARM_UP + BLOCKS * EACH):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=tiny_gpt.forward_step,
            data_iterator=(tiny_gpt.fetch(number, index) for index in mine),
            model=chunks,
            num_microbatches=len(mine),
            seq_length=tiny_gpt.SEQUENCE,
            micro_batch_size=tiny_gpt.SIZE,
        )
        optimizer.step()
        scheduler.step(increment=tiny_gpt.MICRO_BATCHES * tiny_gpt.SIZE)
        if losses:  # the last stage's; Megatron's own training logs their mean over the replicas
            loss = torch.stack([one["lm loss"] for one in losses]).mean()
            dist.all_reduce(loss, group=group)
        yield number


def main() -> None:
    kind = "healed" if "UNICRON_AGENT" in os.environ else "plain"
    began = (0.0, 0.0)
    with (FOLDER / f"{kind}.{RANK}").open("rb", buffering=0) as gate, (FOLDER / "done").open("wb", buffering=0) as done:
        for count, _ in enumerate(healed() if kind == "healed" else plain(), 1):
            if count < WARM_UP or (count - WARM_UP) % EACH:
                continue
            dist.barrier()
            now = time.perf_counter(), time.process_time()
            took = [now[0] - began[0], now[1] - began[1]] if count > WARM_UP else [0.0, 0.0]
            done.write(json.dumps([kind, RANK, *took]).encode() + b"\n")
            if count < WARM_UP + BLOCKS * EACH:
                gate.read(1)
                dist.barrier()
                began = time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main()
