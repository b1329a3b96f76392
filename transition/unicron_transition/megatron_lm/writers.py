"""Megatron-LM's own TensorBoard and Weights & Biases, written by the last rank of the present world as in Megatron-LM.

Another process may be the last rank after each iteration, and opens its writer when it first is. A file of TensorBoard
begins with the step from which earlier files do not count, and each line of the log is on disk before the next
iteration. All writers of Weights & Biases resume one run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unicron_transition.seams.megatron_lm import replace
from unicron_transition.seams.table import GLOBALS, TRAINING

JOBS = ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID")


class Writers:
    """The writers of one rank."""

    def __init__(self, step: Callable[[], int | None], save: Callable[[], Path | None]):
        self._step = step  # returns the iteration of the next line; None if there is none yet
        self._save = save  # returns the folder of checkpoints
        self._openers: dict[str, Callable[[], None]] = {}  # by kind
        self._writers: dict[str, Any] = {}  # by kind
        self._was_last = False

    def install(self) -> None:
        """Replace the functions that open the writers, and those by which the loop gets them."""
        for kind in ("tensorboard", "wandb"):
            replace(GLOBALS, f"_set_{kind}_writer", partial(self._setting, kind))
            replace(TRAINING, f"get_{kind}_writer", partial(self._getting, kind))
        replace(TRAINING, "training_log", self._flushing)
        replace(TRAINING, "evaluate_and_print_results", self._flushing)

    def _setting(self, kind: str, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def set_writer(args: Any) -> None:
            self._openers[kind] = lambda: self._open(original, args)

        return set_writer

    def _open(self, original: Callable[[Any], None], args: Any) -> None:
        """Open it like Megatron-LM's last rank. The run of Weights & Biases has the job's number in its id."""
        before, save = getattr(args, "wandb_save_dir", None), self._save()
        job = next((os.environ[name] for name in JOBS if os.environ.get(name)), None)
        if job is not None:
            os.environ.setdefault("WANDB_RUN_ID", f"unicron-{job}")
            os.environ.setdefault("WANDB_RESUME", "allow")
        if not before and save is not None:
            args.wandb_save_dir = str(save / "wandb")
        try:
            original(args)
        finally:
            args.wandb_save_dir = before

    def _getting(self, kind: str, original: Callable[[], Any]) -> Callable[[], Any]:
        def get_writer() -> Any:
            if not self._is_last():
                return None
            if kind in self._openers:
                self._openers.pop(kind)()
                if (opened := original()) is not None:
                    self._writers[kind] = opened
                    self._begin_file()
            return self._writers.get(kind)

        return get_writer

    def _is_last(self) -> bool:
        step = self._step()
        last = step is not None and dist.get_rank() == dist.get_world_size() - 1
        if last and not self._was_last:
            self._begin_file()
        self._was_last = last
        return last

    def _begin_file(self) -> None:
        """Begin a file that replaces TensorBoard's data from this step on, by other ranks or from before a way back."""
        writer, step = self._writers.get("tensorboard"), self._step()
        if writer is not None and step is not None:
            writer.close()
            writer.purge_step = step

    def note_return(self) -> None:
        """Note that the loop begins again: steps may be repeated."""
        self._was_last = False

    def _flushing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log_and_flush(*arguments: Any, **keywords: Any) -> Any:
            outcome = original(*arguments, **keywords)
            if self._was_last and (writer := self._writers.get("tensorboard")) is not None:
                writer.flush()
            return outcome

        return log_and_flush
