"""Train for `benchmarks.cases.memory`: in every other block of iterations the session copies its state to memory.

Environment: tiny_gpt's; MEMORY_OUT, a file for the first rank's times; MEMORY_BLOCKS; MEMORY_EACH, iterations a block.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

import unicron
from tests.support import tiny_gpt
from unicron_transition.snapshot import contents

BLOCKS, EACH = int(os.environ["MEMORY_BLOCKS"]), int(os.environ["MEMORY_EACH"])
WARM_UP = 3


def main() -> None:
    """Train all blocks; the first rank writes [copies, seconds, CPU seconds] of an iteration of each."""
    unicron.init_process_group("gloo", unicron.Layout(tensor=tiny_gpt.TENSOR))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tiny_gpt.TENSOR)
    chunks, optimizer = tiny_gpt.build()
    session = tiny_gpt.new_session(chunks, optimizer, WARM_UP + BLOCKS * EACH + 1)
    keeper = session._local._keeper
    assert keeper is not None
    copy, keeps, times, began = keeper.copy, False, [], (0.0, 0.0)
    cuts: set[int] = set()

    def copy_if_due(gatherer: contents.Gatherer, iteration: int, *more: Any) -> None:
        if keeps:
            cuts.update({keeper.cuts.wanted.good} - {-1})
            copy(gatherer, iteration, *more)

    keeper.copy = copy_if_due
    for count, _ in enumerate(session):
        now, done = (time.perf_counter(), time.process_time()), count - WARM_UP  # done: iterations that were measured
        if done > 0 and done % EACH == 0:
            times.append([keeps, (now[0] - began[0]) / EACH, (now[1] - began[1]) / EACH])
        if done >= 0 and done % EACH == 0:
            block = done // EACH
            keeps = bool((block + block // 2) % 2)  # a b b a
            began = time.perf_counter(), time.process_time()
    if os.environ["UNICRON_SLOT"] == "0":
        size = session._local._gatherer.contents().size
        Path(os.environ["MEMORY_OUT"]).write_text(json.dumps({"blocks": times, "size": size, "copied": len(cuts)}))


if __name__ == "__main__":
    main()
