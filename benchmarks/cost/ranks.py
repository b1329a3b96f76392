"""Train tiny_gpt: under a stand-in of an agent in a session, else with plain Megatron-core.

Environment: tiny_gpt's, and that of ``gates``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import unicron
from benchmarks.cost import gates
from tests.support import tiny_gpt

SIZES = (tiny_gpt.TENSOR, tiny_gpt.PIPELINE)


def healed() -> Iterator[object]:
    """Train under a session."""
    unicron.init_process_group("gloo", unicron.Layout(tensor=SIZES[0], pipeline=SIZES[1]))
    parallel_state.initialize_model_parallel(*SIZES)
    chunks, optimizer = tiny_gpt.build()
    yield from tiny_gpt.new_session(chunks, optimizer, gates.ITERATIONS)


def each_group_once() -> None:
    """Let Megatron make each group only once, as a session does.

    Each gloo group has a thread that wakes a hundred times a second, which takes 3 % of the CPU time here.
    """
    original, made = dist.new_group, {}

    def new_group(ranks=None, *arguments, **keywords):
        key = tuple(ranks or ()), keywords.get("backend")
        if key not in made:
            made[key] = original(ranks, *arguments, **keywords)
        return made[key]

    dist.new_group = new_group


def plain(backend: str = "gloo") -> Iterator[object]:
    """Train as Megatron's own loop does, without Unicron."""
    dist.init_process_group(backend)
    each_group_once()
    parallel_state.initialize_model_parallel(*SIZES)
    chunks, optimizer = tiny_gpt.build()
    scheduler = tiny_gpt.schedule(optimizer)
    group = parallel_state.get_data_parallel_group()
    mine = range(parallel_state.get_data_parallel_rank(), tiny_gpt.MICRO_BATCHES, dist.get_world_size(group))
    for number in range(gates.ITERATIONS):
        losses = tiny_gpt.plain_iteration(chunks, optimizer, scheduler, number, mine)
        if losses:  # the last stage's; Megatron's own training logs their mean over the replicas
            loss = torch.stack([one["lm loss"] for one in losses]).mean()
            dist.all_reduce(loss, group=group)
            float(loss)  # as it is logged
        yield number


if __name__ == "__main__":
    gates.train(healed() if gates.KIND == "healed" else plain())
