"""What Unicron costs while nothing fails: the training script of ``benchmarks.recovery``, run by four ranks.

Three kinds of iterations take turns in the same processes, on the same groups, model and data: whatever else the
machine does strikes all alike: a session that reports to its agent; the same session with its reports withheld, which
has all of the recovery (ledger, snapshots, commit) and none of the detection; and a plain Megatron loop.
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

import unicron
from tests.support import tiny_gpt

PLAIN = 1_000_000  # iteration numbers of the plain loop, for its data


class PlainLoop:
    """An iteration as Megatron's own training loop does it, without session, ledger, snapshots and commit."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.groups = model, optimizer, model.bucket_groups

    def run(self, number: int) -> float:
        """Seconds of one iteration."""
        hooked = [group.__dict__.pop("start_grad_sync") for group in self.groups]
        began = time.perf_counter()
        size, rank = dist.get_world_size(), dist.get_rank()
        share = range(rank, tiny_gpt.MICRO_BATCHES, size)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        data = (tiny_gpt.fetch(PLAIN + number, index) for index in share)
        get_forward_backward_func()(
            forward_step_func=tiny_gpt.forward_step,
            data_iterator=data,
            model=[self.model],
            num_microbatches=len(share),
            seq_length=tiny_gpt.SEQUENCE,
            micro_batch_size=tiny_gpt.SIZE,
        )
        self.optimizer.step()
        seconds = time.perf_counter() - began
        for group, hook in zip(self.groups, hooked, strict=True):
            group.start_grad_sync = hook
        return seconds


class Withheld:
    """Stands in for a session's channel: what is sent goes nowhere."""

    def send(self, kind: str, **fields: object) -> None:
        """Nothing."""


def main() -> None:
    """Take turns, and let one rank save its times: seconds of (reporting, silent, plain) iterations that followed each
    other."""
    unicron.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model, optimizer = tiny_gpt.build()
    assert model.config.finalize_model_grads_func is finalize_model_grads
    session = unicron.Session(
        model=[model],
        optimizer=optimizer,
        scheduler=None,
        micro_batches=tiny_gpt.MICRO_BATCHES,
        forward_step=tiny_gpt.forward_step,
        fetch=tiny_gpt.fetch,
        seq_length=tiny_gpt.SEQUENCE,
        micro_batch_size=tiny_gpt.SIZE,
        train_iterations=tiny_gpt.ITERATIONS,
    )
    plain, times = PlainLoop(model, optimizer), []
    channel, silent = session._telling._channel, Withheld()
    for result in session:
        dist.barrier()
        turn = result.iteration % 2  # this iteration was a silent one
        if turn == 0:
            times.append([result.seconds])
            session._telling._channel = silent
        else:
            times[-1] += [result.seconds, plain.run(result.iteration)]
            session._telling._channel = channel
        dist.barrier()
    session._telling._channel = channel
    if tiny_gpt.SLOT == 0:
        (tiny_gpt.OUT / "overhead.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
