"""The two kinds of models that a session trains, with the same methods: Megatron's DDP chunks, or a torch module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unicron_transition.generations.layout import Layout
from unicron_transition.generations.meshes import Meshes
from unicron_transition.iteration.accumulation import Work
from unicron_transition.iteration.exchange import Exchange
from unicron_transition.iteration.rank_process import Process
from unicron_transition.megatron import supported
from unicron_transition.megatron.gradients import Gradients
from unicron_transition.plain.module import Plain
from unicron_transition.seams import elastic_buckets, megatron_core
from unicron_transition.snapshot.migrate import TrainingState


class Megatron:
    """Megatron's DDP chunks, optimizer and OptimizerParamScheduler, as a session trains them."""

    varies = True  # the number of micro-batches may differ between iterations
    keeps_groups = True  # in `parallel_state`

    def __init__(self, model: Sequence[Any], optimizer: Any, scheduler: Any):
        self.chunks: Sequence[Any] = list(model)
        self.optimizer, self.scheduler = optimizer, scheduler

    def check(self, layout: Layout, meshes: Meshes) -> None:
        """Raise :class:`table.UnsupportedLayout` for the first thing that this release cannot heal."""
        megatron_core.check(self.chunks, elastic_buckets.distributed_optimizers(self.optimizer))
        supported.check(self.chunks, self.optimizer, layout)

    def holders(self) -> list[Any]:
        """Return every object that may have a process group."""
        return megatron_core.group_holders(self.chunks, self.optimizer)

    def state(self, seed: int) -> TrainingState:
        """Return the state that a newcomer needs."""
        return TrainingState(self.chunks, self.optimizer, self.scheduler, seed)

    def gradients(self, forward_step: Any, work: Work) -> Gradients:
        """Return the gradients of this rank."""
        return Gradients(self.chunks, forward_step, work)

    def adopt_exchange(self, exchange: Exchange, state: TrainingState, process: Process) -> None:
        """Do nothing: even without an agent, all ranks have built the same model from one seed."""


ModelKind = Megatron | Plain


def kind_of(model: Any, optimizer: Any, scheduler: Any, *, clip_grad: float | None, scaler: Any) -> ModelKind:
    """Return the kind of the model that the script passed. Raises ValueError, one line, for anything else."""
    if isinstance(model, torch.nn.Module) and not hasattr(model, "ddp_config"):
        return Plain(model, optimizer, scheduler, clip_grad, scaler)
    if isinstance(model, torch.nn.Module) or not all(hasattr(chunk, "ddp_config") for chunk in model):
        raise ValueError("model is one torch.nn.Module, or the list of Megatron's DDP chunks")
    if clip_grad is not None or scaler is not None:
        raise ValueError("clip_grad and scaler are for a plain module: Megatron's optimizer has its own settings")
    return Megatron(model, optimizer, scheduler)
