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

import unicron
from tests.support import tiny_gpt

PLAIN = 1_000_000  # iteration numbers of the plain loop, for its data


class PlainLoop:
    """An iteration as Megatron's own training loop does it, without session, ledger, snapshots and commit."""

    def __init__(self, chunks, optimizer):
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, tiny_gpt.schedule(optimizer)
        self.groups = chunks[0].bucket_groups

    def run(self, number: int) -> float:
        """Seconds of one iteration."""
        hooked = [group.__dict__.pop("start_grad_sync") for group in self.groups]
        began = time.perf_counter()
        share = range(dist.get_rank(), tiny_gpt.MICRO_BATCHES, dist.get_world_size())
        tiny_gpt.plain_iteration(self.chunks, self.optimizer, self.scheduler, PLAIN + number, share)
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
    chunks, optimizer = tiny_gpt.build()
    session = tiny_gpt.new_session(chunks, optimizer, tiny_gpt.ITERATIONS)
    plain, times = PlainLoop(chunks, optimizer), []
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
