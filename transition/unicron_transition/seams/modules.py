"""Private names of torch's tensors and modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import eq, is_
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


class ModuleTree:
    """The tensors of a module and of the modules in it. They are looked up again only after one was replaced, because
    torch's own walks take about as long as the rest of a session's work in an iteration."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._tables: list[dict[str, Any]] = []  # modules, parameters and buffers of each module
        self._held: list[object] = []  # their values, kept so that no new object has the identity of an old one
        self._caches: list[set[str]] = []  # the names of the buffers that are caches, of each module ...
        self._cached: list[set[str]] = []  # ... as they were
        self._parameters: list[torch.nn.Parameter] = []
        self._buffers: list[torch.Tensor] = []
        self._persistent: list[tuple[str, torch.Tensor]] = []

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in torch's order."""
        self._find_tensors()
        return self._parameters

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All buffers, in torch's order."""
        self._find_tensors()
        return self._buffers

    @property
    def persistent_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """(name, buffer) for the buffers of the model's state; the others are caches."""
        self._find_tensors()
        return self._persistent

    def _find_tensors(self) -> None:
        held = _values(self._tables)  # all of this is done by iterators in C: it takes 10 us for 20 modules
        same = len(held) == len(self._held) and all(map(is_, held, self._held))
        if self._tables and same and all(map(eq, self._caches, self._cached)):
            return
        nodes = list(self._module.modules())
        self._tables = [table for node in nodes for table in (node._modules, node._parameters, node._buffers)]
        self._held = _values(self._tables)
        self._caches = [node._non_persistent_buffers_set for node in nodes]
        self._cached = list(map(set, self._caches))
        self._parameters, self._buffers = list(self._module.parameters()), list(self._module.buffers())
        self._persistent = [
            (f"{path}.{key}" if path else key, buffer)
            for path, module in self._module.named_modules()
            for key, buffer in module.named_buffers(recurse=False)
            if key not in module._non_persistent_buffers_set
        ]


def _values(tables: Sequence[dict[str, Any]]) -> list[object]:
    return list(chain.from_iterable(map(dict.values, tables)))


def keeps_running_statistics(module: torch.nn.Module) -> bool:
    """Whether a forward pass changes the statistics with which the module normalizes."""
    return isinstance(module, _NormBase) and module.track_running_stats and module.training


def steps_in_backward(parameter: torch.nn.Parameter) -> bool:
    """Whether an optimizer steps as soon as this parameter has its gradient."""
    return hasattr(parameter, "_in_backward_optimizers")


def does_more_in_a_step(optimizer: Any) -> bool:
    """Whether something is to be done before each step of this optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks)


def original_module(model: Any) -> Any:
    """Return the module inside `torch.compile`; the model itself if it was not compiled."""
    return getattr(model, "_orig_mod", model)
