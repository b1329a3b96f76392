"""Train tiny_gpt on the first card of the machine; a rank's notes are JSON lines in TINY_OUT/notes.SLOT.

Environment, beside tiny_gpt's, whose TINY_FAULT has the kinds "assert", "illegal" and "oom", real errors of CUDA:

GPU_BACKEND: "nccl" or "gloo"
GPU_APART=1: each rank tells NCCL that it is on a host of its own, as NCCL before 2.30 needs on a shared card
GPU_PLAIN=1: no fault points
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNICRON_PRELOAD = ("sbatch_templates.gpt_imports",)
sys.path.append(str(Path(__file__).resolve().parents[2]))

SLOT = os.environ.get("UNICRON_SLOT", "0")
if os.environ.get("GPU_APART") == "1":
    os.environ["NCCL_HOSTID"] = f"slot{SLOT}"

import torch  # noqa: E402

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_CARD else torch.device("cpu")
BACKEND = os.environ.get("GPU_BACKEND", "gloo") if ON_CARD else "gloo"
if ON_CARD:
    torch.cuda.set_device(DEVICE)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import param_and_grad_buffer  # noqa: E402

import unicron  # noqa: E402
from benchmarks.gpu import cuda_errors  # noqa: E402
from tests.support import fault_points, tiny_gpt  # noqa: E402
from unicron_transition.seams import nccl, process_groups  # noqa: E402
from unicron_transition.session import session  # noqa: E402
from unicron_transition.snapshot import image_format, keeper  # noqa: E402


def note(what: str, **figures: Any) -> None:
    """Note an event."""
    with (fault_points.OUT / f"notes.{SLOT}").open("a") as file:
        file.write(json.dumps({"what": what, "at": time.time(), **figures}) + "\n")


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


def note_aborts() -> None:
    """Note the seconds of aborts and of the end of groups, and the exception of the main thread."""
    run, recover, tear_down = nccl._Abort.run, session.Session._recover, process_groups.tear_down

    def running(self: Any) -> None:
        began = time.monotonic()
        run(self)
        if self.had:
            note("abort", seconds=time.monotonic() - began)

    def recovering(self: Any, error: Exception) -> bool:
        note("caught", error=f"{type(error).__name__}: {error}"[:300], phase=self._at.phase)
        return recover(self, error)

    def tearing_down() -> None:
        began = time.monotonic()
        tear_down()
        note("torn down", seconds=time.monotonic() - began)

    nccl._Abort.run = running
    session.Session._recover = recovering
    process_groups.tear_down = tearing_down


def note_copies() -> None:
    """Note the seconds of a copy of the state to memory, of its checksum, and of the training's wait for it."""

    def timed(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            began = time.monotonic()
            try:
                return original(*arguments, **keywords)
            finally:
                note(what, seconds=time.monotonic() - began)

        setattr(owner, name, wrapped)

    timed(keeper.Keeper, "copy", "keeper.copy")
    timed(keeper.Keeper, "_copy", "keeper._copy")
    timed(keeper.Keeper, "wait_copied", "keeper.wait_copied")
    timed(keeper.Keeper, "wait_whole", "keeper.wait_whole")
    timed(keeper._GpuCopier, "copy", "card.copy")
    timed(keeper._GpuCopier, "_pin", "card.pin")
    timed(image_format.Image, "mark_whole", "sums")


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


def strike_cards() -> None:
    """Add the kinds of faults of a card."""
    strike = fault_points.strike

    def strike_more(fault: dict[str, Any]) -> None:
        if fault["kind"] not in cuda_errors.KINDS:
            return strike(fault)
        path = fault_points.OUT / f"fault.{SLOT}.{fault_points.INCARNATION}.{fault_points.now['iteration']}"
        path.write_text(repr(time.time()))
        cuda_errors.KINDS[fault["kind"]]()

    fault_points.strike = strike_more


def make() -> unicron.Session:
    """Return the session of tiny_gpt's model on this device."""
    unicron.init_process_group(BACKEND, unicron.Layout(tensor=tiny_gpt.TENSOR, pipeline=tiny_gpt.PIPELINE))
    virtual = tiny_gpt.VIRTUAL if tiny_gpt.VIRTUAL > 1 else None
    parallel_state.initialize_model_parallel(tiny_gpt.TENSOR, tiny_gpt.PIPELINE, virtual)
    chunks, optimizer = tiny_gpt.build()
    if os.environ.get("GPU_PLAIN") != "1":
        tiny_gpt.install_points(chunks, optimizer)
    return tiny_gpt.new_session(chunks, optimizer, fault_points.ITERATIONS)


use_card()
if __name__ == "__main__":
    began = time.time()
    note_aborts()
    note_copies()
    strike_cards()
    made = make()
    note("made", seconds=time.time() - began)
    fault_points.train(made, memory_note(made))
