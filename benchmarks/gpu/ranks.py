"""tiny_gpt on a card: what the ranks of ``benchmarks.gpu`` run, all of them on the first card of the machine.

Environment, beside tiny_gpt's: GPU_BACKEND "nccl" or "gloo"; GPU_APART=1: each rank tells NCCL that it is a host of its
own, which an NCCL before 2.30 needs where ranks share a card; GPU_PLAIN=1: no fault points. TINY_FAULT has more kinds:
"assert", "illegal" and "oom", which are real errors of CUDA. In TINY_OUT/notes.SLOT is what a rank notes, a JSON line
each.
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
    """One line of what happened here."""
    with (fault_points.OUT / f"notes.{SLOT}").open("a") as file:
        file.write(json.dumps({"what": what, "at": time.time(), **figures}) + "\n")


def use_card() -> None:
    """tiny_gpt builds its model and its micro-batches on the CPU."""
    build_part, fetch = tiny_gpt.part, tiny_gpt.fetch
    tiny_gpt.part = lambda config, stage: build_part(config, stage).to(DEVICE)
    tiny_gpt.fetch = lambda iteration, index: fetch(iteration, index).to(DEVICE)
    tiny_gpt.POSITIONS, tiny_gpt.MASK = tiny_gpt.POSITIONS.to(DEVICE), tiny_gpt.MASK.to(DEVICE)
    save = fault_points.save
    tiny_gpt.save = lambda saved, path: save({name: tensor.cpu() for name, tensor in saved.items()}, path)
    if BACKEND == "gloo" and ON_CARD:
        param_and_grad_buffer._coalescing_manager = OneByOne


class OneByOne:
    """gloo has no coalesced all-reduce of CUDA tensors, so Megatron's buckets are reduced one by one."""

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
    """Note how long aborts and the end of groups take, and the exception that the main thread got of it."""
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
    """Note the seconds of a copy of the state to the node's memory, of its checksum, and that the training waits."""

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
    timed(keeper._Card, "copy", "card.copy")
    timed(keeper._Card, "_pin", "card.pin")
    timed(image_format.Image, "mark_whole", "sums")


def memory_note(made: unicron.Session) -> Callable[[], dict[str, Any]]:
    """To be called in each iteration: what the rank's memory is by then."""
    parameters = sum(each.numel() for chunk in made._model for each in chunk.module.parameters())

    def told() -> dict[str, Any]:
        if made.iteration in (0, 3):
            figures = {"parameters": parameters, "said": made.memory}
            if ON_CARD:
                allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
                figures |= {"allocated": allocated[0], "most": allocated[1]}
            note("memory", **figures)
        return {"seconds": made._at.seconds}

    return told


def strike_cards() -> None:
    """More kinds of faults."""
    strike = fault_points.strike

    def strike_more(fault: dict[str, Any]) -> None:
        if fault["kind"] not in cuda_errors.KINDS:
            return strike(fault)
        path = fault_points.OUT / f"fault.{SLOT}.{fault_points.INCARNATION}.{fault_points.now['iteration']}"
        path.write_text(repr(time.time()))
        cuda_errors.KINDS[fault["kind"]]()

    fault_points.strike = strike_more


def make() -> unicron.Session:
    """The session of tiny_gpt's model on this device."""
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
