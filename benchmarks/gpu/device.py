"""The card of a rank, what it notes as JSON lines in TINY_OUT/notes.SLOT, and the card's own faults: for the kinds
"assert", "illegal" and "oom" of TINY_FAULT, real errors of CUDA.

Environment:

GPU_BACKEND: "nccl" or "gloo"
GPU_APART=1: each rank tells NCCL that it is on a host of its own, as NCCL before 2.30 needs on a shared card
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

SLOT = os.environ.get("UNICRON_SLOT") or os.environ.get("COST_RANK", "0")
if os.environ.get("GPU_APART") == "1":
    os.environ["NCCL_HOSTID"] = f"slot{SLOT}"

import torch  # noqa: E402

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_CARD else torch.device("cpu")
BACKEND = os.environ.get("GPU_BACKEND", "gloo") if ON_CARD else "gloo"
if ON_CARD:
    torch.cuda.set_device(DEVICE)

from benchmarks.gpu import cuda_errors  # noqa: E402
from tests.support import fault_points  # noqa: E402
from unicron_transition.seams import nccl, process_groups  # noqa: E402
from unicron_transition.session import session  # noqa: E402
from unicron_transition.snapshot import image_format, keeper  # noqa: E402


def note(what: str, **figures: Any) -> None:
    """Note an event."""
    with (fault_points.OUT / f"notes.{SLOT}").open("a") as file:
        file.write(json.dumps({"what": what, "at": time.time(), **figures}) + "\n")


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


def note_all() -> None:
    """Note what this process does, and have the faults of a card."""
    note_aborts()
    note_copies()
    strike_cards()
