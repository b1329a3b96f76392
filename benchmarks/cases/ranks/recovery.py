"""Train for `benchmarks.cases.recovery`: a session that reports, the same one without reports, and plain Megatron.

The three kinds of iterations alternate in the same processes, on the same groups, model and data.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

import unicron
from tests.support import tiny_gpt

PLAIN = 1_000_000  # iteration numbers of the plain loop, for its data


class SilentChannel:
    """A session's channel on which nothing is sent."""

    def send(self, kind: str, **fields: object) -> None:
        """Send nothing."""


def plain_seconds(chunks: Any, optimizer: Any, scheduler: Any, number: int) -> float:
    """Return the seconds of an iteration of Megatron's own loop: no session, ledger, snapshots and commit."""
    groups = chunks[0].bucket_groups
    hooked = [group.__dict__.pop("start_grad_sync") for group in groups]
    began = time.perf_counter()
    share = range(dist.get_rank(), tiny_gpt.MICRO_BATCHES, dist.get_world_size())
    tiny_gpt.plain_iteration(chunks, optimizer, scheduler, PLAIN + number, share)
    seconds = time.perf_counter() - began
    for group, hook in zip(groups, hooked, strict=True):
        group.start_grad_sync = hook
    return seconds


def main() -> None:
    """Take turns; one rank saves the seconds of (reporting, silent, plain) iterations that followed each other."""
    unicron.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    chunks, optimizer = tiny_gpt.build()
    session = tiny_gpt.new_session(chunks, optimizer, tiny_gpt.ITERATIONS)
    scheduler, times = tiny_gpt.schedule(optimizer), []
    channel, silent = session._reporter._channel, SilentChannel()
    for result in session:
        dist.barrier()
        if result.iteration % 2 == 0:  # this iteration reported, the next one is silent
            times.append([result.seconds])
            session._reporter._channel = silent
        else:
            times[-1] += [result.seconds, plain_seconds(chunks, optimizer, scheduler, result.iteration)]
            session._reporter._channel = channel
        dist.barrier()
    session._reporter._channel = channel
    if tiny_gpt.SLOT == 0:
        (tiny_gpt.OUT / "overhead.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
