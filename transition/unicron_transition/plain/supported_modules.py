"""Refuses plain modules and optimizers that a session cannot heal when it is made, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau

from unicron_transition.seams import modules, table
from unicron_transition.seams.table import refuse
from unicron_transition.snapshot.migrate import as_plain, can_be_told, plain


def check(module: torch.nn.Module, optimizer: Any, schedule: Any) -> None:
    """Raise :class:`table.UnsupportedLayout` for the first thing that this release cannot heal. schedule: an object
    with the schedule's `state_dict`, or None."""
    table.check("torch", table.TORCH_MODELS)
    refuse(_wrappers(module))
    refuse(_statistics(module))
    refuse(_parameters(module))
    refuse(_optimizer(module, optimizer))
    refuse(_settings(optimizer, schedule))


def _wrappers(module: torch.nn.Module) -> Iterator[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for each in module.modules():
        if isinstance(each, torch.nn.parallel.DistributedDataParallel):
            yield "a model in DistributedDataParallel, since it reduces by itself: give the module without it"
        if isinstance(each, FullyShardedDataParallel):
            yield "FSDP1 (FullyShardedDataParallel): write fully_shard(module, mesh=unicron.shard_mesh()) instead"


def _statistics(module: torch.nn.Module) -> Iterator[str]:
    for name, each in module.named_modules():
        if modules.keeps_running_statistics(each):
            yield (
                f"the running statistics of {name or 'the model'} ({type(each).__name__}), which depend on who "
                "computes what: use GroupNorm or LayerNorm, or set track_running_stats=False, or put it into eval()"
            )
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            yield f"{name}, which is no tensor, in the state of the model: make it a buffer"


def _parameters(module: torch.nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            yield f"{name}, which has no shape yet: let a batch through the model before"
        if parameter.is_complex():
            yield f"{name}, which is complex: use torch.view_as_complex on a real parameter"
        if modules.steps_in_backward(parameter):
            yield "optimizers that step in the backward pass: step after it"


def _optimizer(module: torch.nn.Module, optimizer: Any) -> Iterator[str]:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        yield f"{name}, which is no torch.optim.Optimizer: give one optimizer, with several parameter groups if need be"
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        yield "LBFGS, which computes the gradient several times in a step: use another optimizer"
    if type(optimizer).__module__.startswith("torch.distributed"):
        yield f"{name}, which has another part of its state in each rank: give the optimizer without it"
    mine = {id(parameter) for parameter in module.parameters()}
    if any(id(parameter) not in mine for group in optimizer.param_groups for parameter in group["params"]):
        yield "parameters of the optimizer that the model has not: put all of them into one module"


def _settings(optimizer: Any, schedule: Any) -> Iterator[str]:
    if isinstance(getattr(schedule, "scheduler", None), ReduceLROnPlateau):
        yield "ReduceLROnPlateau, which may turn on the last bit of a loss: use a schedule of the iteration"
    if not can_be_told(plain(optimizer.param_groups)):
        yield f"settings of {type(optimizer).__name__} that are no plain values: leave functions and objects out"
    if schedule is not None and not can_be_told(as_plain(schedule.state_dict())):
        yield f"{type(schedule.scheduler).__name__}, whose state is no plain values: use LambdaLR or another of torch's"
