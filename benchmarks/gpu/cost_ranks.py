"""Ranks of ``benchmarks.gpu.cost``: one of a session, or one of Megatron's own loop, block by block in turns."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from benchmarks.cost import gates
from benchmarks.gpu import ranks
from tests.support import tiny_gpt

if __name__ == "__main__":
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def plain() -> Iterator[object]:
        """Iterations as Megatron's own training loop does them: nothing of this project is in them."""
        dist.init_process_group(ranks.BACKEND)
        parallel_state.initialize_model_parallel()
        chunks, optimizer = tiny_gpt.build()
        scheduler = tiny_gpt.schedule(optimizer)
        for number in range(gates.ITERATIONS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=tiny_gpt.forward_step,
                data_iterator=(tiny_gpt.fetch(number, index) for index in range(tiny_gpt.MICRO_BATCHES)),
                model=chunks,
                num_microbatches=tiny_gpt.MICRO_BATCHES,
                seq_length=tiny_gpt.SEQUENCE,
                micro_batch_size=tiny_gpt.SIZE,
            )
            optimizer.step()
            scheduler.step(increment=tiny_gpt.MICRO_BATCHES * tiny_gpt.SIZE)
            float(sum(one["lm loss"] for one in losses))  # as it is logged
            yield number

    gates.train(ranks.make() if gates.KIND == "healed" else plain())
