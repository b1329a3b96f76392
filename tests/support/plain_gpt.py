"""The model of train_gpt.py in a loop of Megatron's own, without a Session: what an undisturbed run must give.

Started like a rank of torchrun, with train_gpt's options. Prints {"losses": [...], "norms": [...]} as JSON in rank 0.
PLAIN_ORDER=reversed computes micro-batches the other way round. With --save it goes on from a checkpoint and writes one
at the end, which is after PLAIN_LAST iterations where that is set. To --save-gradients each iteration is a generation.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

TEMPLATES = Path(__file__).resolve().parents[2] / "sbatch_templates"
sys.path[:0] = [str(TEMPLATES), str(TEMPLATES.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Train all iterations."""
    import gpt_model
    import gpt_options
    import torch.distributed as dist
    import train_gpt
    from megatron.core import parallel_state

    from unicron_transition.snapshot import checkpoint, migrate

    options = gpt_options.parse(sys.argv[1:])
    device, backend = train_gpt.prepare(options)
    dist.init_process_group(backend)
    parallel_state.initialize_model_parallel(
        options.tensor_model_parallel_size, options.pipeline_model_parallel_size, gpt_options.virtual_stages(options)
    )
    chunks = gpt_model.build_model(options, device)
    optimizer, scheduler = gpt_model.build_optimizer(options, chunks)
    loop = Loop(options, device, chunks, optimizer, scheduler)
    state = migrate.TrainingState(chunks, optimizer, scheduler)
    checkpoints = checkpoint.Checkpoints(options.save) if options.save else None
    first = (checkpoints.load(state) if checkpoints else None) or 0
    last = int(os.environ.get("PLAIN_LAST", options.train_iterations))
    folder = options.save_gradients
    saver = train_gpt.GradientSaver(chunks, optimizer, folder, dist.get_rank()) if folder else None
    steps = []
    for number in range(first, last):
        steps.append(loop.iteration(number))
        if saver:
            saver.after_step(SimpleNamespace(iteration=number, generation=number))
    writer = loop.writer(steps[-1][0])
    if checkpoints and (options.use_distributed_optimizer or loop.replica == 0):
        checkpoints.save_last(state, last, writer)
    if dist.get_rank() == 0:
        print(json.dumps({"losses": [loss for loss, _ in steps], "norms": [norm for _, norm in steps]}), flush=True)
    dist.destroy_process_group()


class Loop:
    """Megatron's iteration; micro-batch i belongs to replica i mod n."""

    def __init__(self, options, device, chunks, optimizer, scheduler):
        import gpt_model
        import train_gpt
        from megatron.core import parallel_state as mpu

        self.options, self.chunks, self.optimizer, self.scheduler = options, chunks, optimizer, scheduler
        self.fetch = train_gpt.make_fetch(train_gpt.build_dataset(options), options)
        self.forward_step = gpt_model.make_forward_step(options, device)
        self.pipeline = mpu.get_pipeline_model_parallel_rank()
        self.tensor = mpu.get_tensor_model_parallel_rank()
        self.replica, self.count = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.mine = list(range(self.replica, options.micro_batches, self.count))
        if os.environ.get("PLAIN_ORDER") == "reversed":
            self.mine.reverse()

    def writer(self, loss: float):
        """Of this rank's part of a checkpoint."""
        from unicron_transition.generations.layout import Layout
        from unicron_transition.snapshot.checkpoint import Writer

        options = self.options
        layout = Layout(options.tensor_model_parallel_size, 1, options.pipeline_model_parallel_size)
        place = layout.place(self.tensor, 0, self.pipeline)
        shard = (self.replica, self.count) if options.use_distributed_optimizer else (0, 1)
        return Writer(place, layout.size, *shard, layout.text, loss)

    def iteration(self, number: int) -> tuple[float, float | None]:
        """(loss over all micro-batches, gradient norm or, after an overflow, None)."""
        import torch
        import torch.distributed as dist

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.compute(number)
        options = self.options
        total = torch.tensor([float(sum(loss["lm loss"] for loss in losses))], dtype=torch.float64)
        dist.all_reduce(total)
        divisor = options.micro_batches * options.tensor_model_parallel_size
        if options.calculate_per_token_loss:
            divisor *= options.micro_batch_size * options.seq_length
        succeeded, norm, _ = self.optimizer.step()
        if succeeded:
            self.scheduler.step(increment=options.micro_batches * options.micro_batch_size)
        return float(total) / divisor, None if norm is None else float(norm)

    def compute(self, number: int) -> list[dict]:
        """Forward, backward, reduce, by Megatron's schedule."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from unicron_transition.iteration import randomness

        taken = dict.fromkeys(range(len(self.chunks)), 0)

        def forward_step(data, chunk, *rest):
            position = next(index for index, known in enumerate(self.chunks) if known is chunk)
            micro_batch = self.mine[taken[position]]
            taken[position] += 1
            randomness.seed(
                self.options.seed, number, micro_batch, tensor=self.tensor, pipeline=self.pipeline, chunk=position
            )
            return self.forward_step(data, chunk, *rest)

        data = [(self.fetch(number, index) for index in self.mine) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=self.chunks,
            num_microbatches=len(self.mine),
            seq_length=self.options.seq_length,
            micro_batch_size=self.options.micro_batch_size,
        )


if __name__ == "__main__":
    main()
