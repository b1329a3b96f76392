"""Replaces names of Megatron-LM after a check: an unknown release is refused."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.seams import table


class CannotHeal(RuntimeError):
    """This Megatron-LM, or one of its options, cannot be healed; one line with advice."""


def check() -> None:
    """Import `megatron.training`. Raises :class:`CannotHeal` if it is missing or unknown."""
    try:
        importlib.import_module("megatron.training")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.training"):
            raise CannotHeal(
                f"Megatron-LM needs {error.name}, which is not installed: pip install {error.name}"
            ) from None
        raise CannotHeal(
            "no megatron.training beside the script or in PYTHONPATH: name the script in a checkout of Megatron-LM"
        ) from None
    importlib.import_module("megatron.core")
    release = table.installed_release("megatron-core")
    instead = "check one of those out, or run the job with --unicron-mode=restart"
    if not table.known("megatron-core", release) and os.environ.get(table.TRUST) != "1":
        tested = ", ".join(f"core_v{each}" for each in table.KNOWN_RELEASES["megatron-core"])
        raise CannotHeal(
            f"knows Megatron-LM {tested}, and this is core_v{release}: {instead}; {table.TRUST}=1 tries it"
        )
    if (found := table.difference(table.MEGATRON_LM, release)) is not None:
        raise CannotHeal(f"this is not Megatron-LM core_v{release}, in which {found}: {instead}")


def replace(module: str, name: str, by: Callable[[Any], Any]) -> None:
    """Replace a name of the table by `by(original)`."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, by(getattr(owner, last)))


def reads_arguments() -> str:
    """Return the module whose functions read the arguments: from 0.18 on the script calls them itself."""
    return table.INITIALIZE if hasattr(importlib.import_module(table.INITIALIZE), "parse_args") else table.ARGUMENTS


def growing_batches() -> type[Any] | None:
    """Return Megatron's calculator for `--rampup-batch-size`; None from 0.18 on, which ignores the option."""
    calculator: type[Any] | None = getattr(importlib.import_module(table.CALCULATORS), table.RAMP, None)
    return calculator


def known_timers(timers: Any) -> Mapping[str, Any]:
    """Return name -> timer of all timers that a rank has started."""
    started: Mapping[str, Any] = timers._timers
    return started


def end_was_signalled() -> bool:
    """Whether the signal of `--exit-signal-handler` has come."""
    from megatron.training import get_signal_handler

    return bool(get_signal_handler()._signal_received)


def follow_straggler_detector() -> None:
    """Give Megatron-LM's detector of slow ranks the present world; collective. All ranks measure, or none: a new one
    may not know that it was turned off."""
    detector = importlib.import_module(table.TRAINING).stimer
    detector.rank, detector.world = dist.get_rank(), dist.get_world_size()
    off = torch.tensor([float(detector._off)], device=torch.cuda.current_device())
    dist.all_reduce(off, op=dist.ReduceOp.MAX)
    if off.item() and not detector._off:
        detector._off, detector.start, detector.stop = True, detector.null_method, detector.null_method
