"""The base of all loggers: the first rank of the present world writes, in whichever process it is.

Every rank calls the logger after every iteration, and keeps the last few. So a new first rank writes what the previous
one may not have got to disk, and nothing is written twice.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from importlib import import_module
from typing import Any, Self

import torch.distributed as dist

from unicron_transition.iteration.ledger import StepResult
from unicron_transition.iteration.rank_log import warn

KEPT_ITERATIONS = 64  # iterations that each rank can still write


class Logger(ABC):
    """A logger of committed iterations. Call it with the result of each, in all ranks: `log(result, perplexity=...)`.

    The step is `result.iteration`. An error in the logger is one line in the job's log and does not stop the training;
    the next call tries again, with what was left out.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[int, dict[str, float]]] = deque(maxlen=KEPT_ITERATIONS)
        self._open = False
        self._last = -1  # the step written last
        self._before = -1  # the step of the last call
        self._warned = False

    def __call__(self, result: StepResult, **scalars: float) -> None:
        """Log an iteration: its loss, norm, learning rate, seconds and world size, and these scalars."""
        step = result.iteration
        values = {"loss": result.loss, "learning-rate": result.learning_rate, "seconds": result.seconds}
        if result.grad_norm is not None:
            values["grad-norm"] = result.grad_norm
        values |= {"ranks": float(result.world_size), **{name: float(value) for name, value in scalars.items()}}
        while self._kept and self._kept[-1][0] >= step:  # the job went back to an earlier state
            self._kept.pop()
        self._kept.append((step, values))
        try:
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._log(step)
            else:
                self._stop_writing()
        except Exception as error:  # of whatever service
            self._open = False
            if not self._warned:
                self._warned = True
                warn(f"{type(self).__name__} logs nothing of iteration {step}, the training goes on: {error}")
        self._before = step

    def _log(self, step: int) -> None:
        if not self._open or step <= self._before:
            self._stop_writing()
            first = self._kept[0][0]
            self._last = self._open_run(first)
            self._open = True
        for at, scalars in self._kept:
            if at > self._last:
                self._write(at, scalars)
                self._last = at
        self._flush()
        self._warned = False

    def close(self) -> None:
        """Stop writing, until this rank is called as the first one again."""
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._open:
            self._open = False
            self._close_run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _open_run(self, first: int) -> int:
        """Begin to write, at `first` at the earliest. Returns the last step that must not be written again."""

    @abstractmethod
    def _write(self, step: int, scalars: dict[str, float]) -> None:
        """Write the scalars of one step."""

    def _flush(self) -> None:  # noqa: B027
        """Write out everything, so that it outlives this process."""

    @abstractmethod
    def _close_run(self) -> None:
        """Close what is open: another rank writes from now on."""


def job_name() -> str:
    """Return a name that all processes of this job share, even after a requeue, and no other job has."""
    if number := os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID"):
        return f"unicron-{number}"
    raise ValueError("outside of Slurm a logger needs the name of its run: give it the argument `run`")


def import_optional(module: str, package: str) -> Any:
    """Import the module of an optional package. Raises ValueError, one line, if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise ValueError(f"this logger needs {package}: pip install {package}") from None
