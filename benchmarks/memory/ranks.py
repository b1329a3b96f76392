"""What the ranks of ``benchmarks.memory`` run: a session that keeps its state in memory in every other block of
iterations. Environment: tiny_gpt's; MEMORY_OUT a file for the first rank's times, MEMORY_BLOCKS, MEMORY_EACH."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from megatron.core import parallel_state

import transition
from tests.support import tiny_gpt

BLOCKS, EACH = int(os.environ["MEMORY_BLOCKS"]), int(os.environ["MEMORY_EACH"])
WARM_UP, NEVER = 3, 1 << 30


def main() -> None:
    transition.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    chunks, optimizer = tiny_gpt.build()
    session = transition.Session(
        model=chunks,
        seed=1234,
        optimizer=optimizer,
        scheduler=tiny_gpt.schedule(optimizer),
        micro_batches=tiny_gpt.MICRO_BATCHES,
        forward_step=tiny_gpt.forward_step,
        fetch=tiny_gpt.fetch,
        seq_length=tiny_gpt.SEQUENCE,
        micro_batch_size=tiny_gpt.SIZE,
        train_iterations=WARM_UP + BLOCKS * EACH + 1,
    )
    keeper = session._remembered._keeper  # type: ignore[union-attr]
    assert keeper is not None
    told, began = [], (0.0, 0.0)
    for count, _ in enumerate(session):
        now, done = (time.perf_counter(), time.process_time()), count - WARM_UP  # done: iterations that were measured
        if done > 0 and done % EACH == 0:
            told.append([keeper.every == 1, (now[0] - began[0]) / EACH, (now[1] - began[1]) / EACH])
        if done >= 0 and done % EACH == 0:
            block = done // EACH
            keeper.every = 1 if (block + block // 2) % 2 else NEVER  # a b b a
            began = time.perf_counter(), time.process_time()
    if os.environ["UNICRON_SLOT"] == "0":
        Path(os.environ["MEMORY_OUT"]).write_text(json.dumps({"blocks": told, "size": keeper.size}))


if __name__ == "__main__":
    main()
