"""torch's `fully_shard` (FSDP2): the groups over which it gathers parameters, how it adds gradients, and its reset
after a collective that failed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unicron_transition.seams import dtensors
from unicron_transition.seams.dtensors import sharding_modules
from unicron_transition.seams.table import UnsupportedLayout


def gradient(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a gradient for the parameter that has `part`, the very same object, as this rank's part."""
    if not dtensors.is_distributed(parameter):
        return part
    whole: torch.Tensor = type(parameter.data)(part, parameter._spec, requires_grad=False)
    return whole


def communication_groups(module: torch.nn.Module) -> list[Any]:
    """Return each set of parameters that is gathered together (`FSDPParamGroup`), once."""
    found: dict[int, Any] = {}
    for each in sharding_modules(module):
        state = each._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if several is None else several:
            if group is not None:
                found[id(group)] = group
    return list(found.values())


def group_holders(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the objects of `fully_shard` that hold process groups."""
    for group in communication_groups(module):
        yield from (group.mesh_info, group._all_gather_comm, group._reduce_scatter_comm)
        yield from _infos(group)
        if group.post_forward_mesh_info is not None:
            yield group.post_forward_mesh_info


def sum_gradients(module: torch.nn.Module) -> None:
    """Make reduces add the ranks' gradients, which have their weights already, instead of taking the mean."""
    for each in sharding_modules(module):
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply and add at once
        each.set_requires_gradient_sync(True, recurse=False)
        each.set_reshard_after_backward(True, recurse=False)  # the optimizer steps the shards


def check_sums(groups: Iterable[Any]) -> None:
    """Raise :class:`UnsupportedLayout` if the script has changed one of these settings since. Gradients that are not
    reduced are in no sum, and parameters that stay gathered are those before the step."""
    for group in groups:
        if not group.reduce_grads:
            call = "set_requires_gradient_sync(False)"
        elif group.gradient_divide_factor != 1.0 or not group.force_sum_reduction_for_comms:
            call = "set_gradient_divide_factor or set_force_sum_reduction_for_comms"
        elif not group.reshard_after_backward:
            call = "set_reshard_after_backward(False)"
        else:
            continue
        raise UnsupportedLayout(
            f"unicron can't heal a module after {call}: leave the call out, since the session adds the gradients of "
            "the micro-batches itself"
        )


def reset(module: torch.nn.Module) -> None:
    """Take the module out of a forward or backward pass whose collectives failed: each parameter is its shard again,
    and nothing waits to be reduced."""
    groups = communication_groups(module)
    for group in groups:
        group._all_gather_result = None  # torch would wait for it, and it failed
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):  # torch's own reset leaves it, and would add it to the next gradient
                each._unsharded_param.grad = None
    for each in sharding_modules(module):
        state = each._get_fsdp_state()
        if state._is_root and hasattr(each, "reset_iter_state"):
            each.reset_iter_state()
        elif state._is_root:
            _reset_root(state)
    for group in groups:  # in forward passes before the first complete one no root was found
        group._to_sharded()


def _reset_root(state: Any) -> None:
    """Do the same for the root in torch 2.11, which has no function for it."""
    idle = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_common"].TrainingState.IDLE
    context = state._comm_ctx
    context.all_gather_state = context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = idle
        several = getattr(each, "_fsdp_param_groups", None)
        for group in [each._fsdp_param_group] if several is None else several:
            if group is not None:
                group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
                group._partial_reduce_output = None
                group._post_forward_indices.clear()
                group._training_state = idle
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def replicates(group: Any) -> bool:
    """Whether it adds gradients over replicas by itself."""
    return any(getattr(each, "replicate_mesh_dim", None) is not None for each in (group.mesh_info, *_infos(group)))


def offloads(group: Any) -> bool:
    """Whether it keeps its shards in the memory of the host."""
    return any(each.offload_to_cpu for each in group.fsdp_params)


def in_two_groups(module: torch.nn.Module) -> str:
    """Return the name of a parameter that was shared by modules and is sharded twice; "" if there is none. Torch 2.11
    keeps no note of that."""
    seen: dict[int, int] = {}
    for number, group in enumerate(communication_groups(module)):
        for each in group.fsdp_params:
            its = getattr(each, "_orig_param_uid", None)
            if its is not None and seen.setdefault(its, number) != number:
                return str(each._module_info.param_name)
    return ""


def _infos(group: Any) -> list[Any]:
    return [each.mesh_info for each in group.fsdp_params if hasattr(each, "mesh_info")]


class _Watch(TorchDispatchMode):
    """Refuses the collectives of distributed tensors."""

    def __init__(self, name: str):
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, sys.modules["torch.distributed.tensor"].DTensor) for each in types):
            return NotImplemented  # its own dispatch comes first, and calls what this rank has to do
        if func.namespace == "_c10d_functional":
            raise UnsupportedLayout(
                f"unicron can't heal {self._name} with sharded parameters: its step communicates ({func}), and the "
                "loss of a rank would leave it half done; use one whose step is for each element, such as AdamW"
            )
        return func(*args, **kwargs or {})


@contextmanager
def no_communication(name: str) -> Iterator[None]:
    """Raise :class:`UnsupportedLayout` if the optimizer of this name communicates in the body, before it does."""
    with _Watch(name):
        yield
