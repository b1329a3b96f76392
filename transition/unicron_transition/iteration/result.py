"""What the training script is told of an iteration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `loss` is the mean over all micro-batches of the iteration, the same number on every rank."""

    iteration: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    seconds: float
    generation: int
    world_size: int
