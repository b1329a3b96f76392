"""Train tiny_gpt on the first card of the machine.

Environment, beside tiny_gpt's and that of ``device``:

GPU_PLAIN=1: no fault points
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNICRON_PRELOAD = ("sbatch_templates.gpt_imports",)
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from megatron.core.distributed import param_and_grad_buffer  # noqa: E402

import unicron  # noqa: E402
from benchmarks.gpu.device import BACKEND, DEVICE, ON_CARD, note, note_all  # noqa: E402
from tests.support import fault_points, tiny_gpt  # noqa: E402


def use_card() -> None:
    """Move tiny_gpt's model and micro-batches from the CPU to the card."""
    build_part, fetch = tiny_gpt.part, tiny_gpt.fetch
    tiny_gpt.part = lambda config, stage: build_part(config, stage).to(DEVICE)
    tiny_gpt.fetch = lambda iteration, index: fetch(iteration, index).to(DEVICE)
    tiny_gpt.POSITIONS, tiny_gpt.MASK = tiny_gpt.POSITIONS.to(DEVICE), tiny_gpt.MASK.to(DEVICE)
    save = fault_points.save
    tiny_gpt.save = lambda saved, path: save({name: tensor.cpu() for name, tensor in saved.items()}, path)
    if BACKEND == "gloo" and ON_CARD:
        param_and_grad_buffer._coalescing_manager = OneByOne


class OneByOne:
    """Reduces Megatron's buckets one by one: gloo has no coalesced all-reduce of CUDA tensors."""

    def __init__(self, group: Any, async_ops: bool = False):
        self.works: list[Any] = []

    def __enter__(self) -> OneByOne:
        self._all_reduce = torch.distributed.all_reduce

        def all_reduce(*arguments: Any, **keywords: Any) -> Any:
            work = self._all_reduce(*arguments, **keywords)
            self.works += [work] if work is not None else []
            return work

        torch.distributed.all_reduce = all_reduce
        return self

    def __exit__(self, *_: object) -> None:
        torch.distributed.all_reduce = self._all_reduce

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def memory_note(made: unicron.Session) -> Callable[[], dict[str, Any]]:
    """Return a function for each iteration that notes the rank's memory."""
    parameters = sum(each.numel() for chunk in made._model for each in chunk.module.parameters())

    def note_memory() -> dict[str, Any]:
        if made.iteration in (0, 3):
            figures = {"parameters": parameters, "report": made.memory}
            if ON_CARD:
                allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
                figures |= {"allocated": allocated[0], "most": allocated[1]}
            note("memory", **figures)
        return {"seconds": made._at.seconds}

    return note_memory


def make() -> unicron.Session:
    """Return the session of tiny_gpt's model on this device."""
    tiny_gpt.initialize(BACKEND)
    chunks, optimizer = tiny_gpt.build()
    if os.environ.get("GPU_PLAIN") != "1":
        tiny_gpt.install_points(chunks, optimizer)
    return tiny_gpt.new_session(chunks, optimizer, fault_points.ITERATIONS)


use_card()
if __name__ == "__main__":
    began = time.time()
    note_all()
    made = make()
    note("made", seconds=time.time() - began)
    fault_points.train(made, memory_note(made))
