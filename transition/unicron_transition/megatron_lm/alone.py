"""What Megatron-LM does between two iterations waits for no other rank: outside of the session nothing would heal it.

The learning rate and the norm are the same in all ranks. Times in the log are those of the rank that writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unicron_transition.seams.megatron_lm import known_timers, replace
from unicron_transition.seams.table import TIMERS, TRAINING


def install() -> None:
    """No barrier, no gathering of times."""
    replace(TIMERS, "Timer.start", _start)
    replace(TIMERS, "Timer.stop", _stop)
    replace(TIMERS, "Timers._get_elapsed_time_all_ranks", lambda _: _own_times)
    replace(TRAINING, "print_datetime", _print_datetime)
    replace(TRAINING, "training_log", _training_log)
    replace(TRAINING, "reduce_max_stat_across_model_parallel_group", lambda _: lambda stat, group=None: stat)


def _start(original: Callable[..., None]) -> Callable[..., None]:
    def start(self: Any, barrier: bool = False) -> None:
        self._started = False  # a schedule that a loss has ended has left it running
        original(self)

    return start


def _stop(original: Callable[..., None]) -> Callable[..., None]:
    def stop(self: Any, barrier: bool = False) -> None:
        if self._started:
            original(self)

    return stop


def _own_times(timers: Any, names: list[str], reset: bool, barrier: bool) -> torch.Tensor | None:
    if not names:
        return None
    known = known_timers(timers)
    times = [known[name].elapsed(reset=reset) if name in known else 0.0 for name in names]
    return torch.tensor([times], dtype=torch.float, device="cpu")


def _print_datetime(original: Callable[..., None]) -> Callable[..., None]:
    def print_datetime(string: str, override_timestamp: float | None = None) -> None:
        barrier, torch.distributed.barrier = torch.distributed.barrier, lambda *_, **__: None
        try:
            original(string, override_timestamp)
        finally:
            torch.distributed.barrier = barrier

    return print_datetime


def _training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """The loop logs its first iteration at once, and once more in the mean of the next line. Where a rank joins is no
    such place."""

    def training_log(losses: Any, totals: Any, rate: Any, iteration: int, *rest: Any, **keywords: Any) -> Any:
        keywords["is_first_iteration"] = bool(keywords.get("is_first_iteration")) and iteration == 1
        return original(losses, totals, rate, iteration, *rest, **keywords)

    return training_log
