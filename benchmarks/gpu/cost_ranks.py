"""Ranks of ``benchmarks.gpu.cost``: one of a session, or one of Megatron's own loop, block by block in turns."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from benchmarks.cost import gates
from benchmarks.gpu import ranks
from tests.support import tiny_gpt

if __name__ == "__main__":
    from megatron.core import parallel_state

    def plain() -> Iterator[object]:
        """Iterations as Megatron's own training loop does them: nothing of this project is in them."""
        dist.init_process_group(ranks.BACKEND)
        parallel_state.initialize_model_parallel()
        chunks, optimizer = tiny_gpt.build()
        scheduler = tiny_gpt.schedule(optimizer)
        for number in range(gates.ITERATIONS):
            losses = tiny_gpt.plain_iteration(chunks, optimizer, scheduler, number, range(tiny_gpt.MICRO_BATCHES))
            float(sum(one["lm loss"] for one in losses))  # as it is logged
            yield number

    gates.train(ranks.make() if gates.KIND == "healed" else plain())
