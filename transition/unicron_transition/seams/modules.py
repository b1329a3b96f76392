"""Private names of torch's tensors and modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

backward_pass = torch._C._current_graph_task_id  # () -> the number of the running backward pass; -1 outside of one


def version(tensor: torch.Tensor) -> int:
    """Return a number that rises with each write to the tensor in place."""
    return int(tensor._version)


def copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each of `values` into its place, all in one call."""
    if into:
        torch._foreach_copy_(into, values)


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for the buffers of the model's state; the others are caches."""
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}" if path else key, buffer


def keeps_running_statistics(module: torch.nn.Module) -> bool:
    """Whether a forward pass changes the statistics with which the module normalizes."""
    return isinstance(module, _NormBase) and module.track_running_stats and module.training


def steps_in_backward(parameter: torch.nn.Parameter) -> bool:
    """Whether an optimizer steps as soon as this parameter has its gradient."""
    return hasattr(parameter, "_in_backward_optimizers")


def original_module(model: Any) -> Any:
    """Return the module inside `torch.compile`; the model itself if it was not compiled."""
    return getattr(model, "_orig_mod", model)
