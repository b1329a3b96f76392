"""torch's `fully_shard` (FSDP2): the groups over which it gathers parameters, how it adds gradients, and its reset
after a collective that failed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unicron_transition.seams import dtensors, table
from unicron_transition.seams.dtensors import sharding_modules
from unicron_transition.seams.table import UnsupportedLayout


def check_torch() -> None:
    """Compare the private names of `fully_shard` with the table. Raises :class:`UnsupportedLayout`."""
    table.check("torch", table.TORCH_SHARDED)


def gradient(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a gradient for the parameter that has `part`, the very same object, as this rank's part."""
    if not dtensors.is_distributed(parameter):
        return part
    whole: torch.Tensor = type(parameter.data)(part, parameter._spec, requires_grad=False)
    return whole


def communication_groups(module: torch.nn.Module) -> list[Any]:
    """Return each set of parameters that is gathered together (`FSDPParamGroup`), once."""
    found = (group for each in sharding_modules(module) for group in _groups(each._get_fsdp_state()))
    return list({id(group): group for group in found}.values())


def _groups(state: Any) -> list[Any]:
    """Return the groups of one call of `fully_shard`: at most one in torch 2.11."""
    several = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if several is None else several) if group is not None]


def group_holders(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the objects of `fully_shard` that hold process groups."""
    for group in communication_groups(module):
        yield from (group.mesh_info, group._all_gather_comm, group._reduce_scatter_comm)
        yield from _infos(group)
        if group.post_forward_mesh_info is not None:
            yield group.post_forward_mesh_info


def sum_gradients(sharded: Iterable[Any]) -> None:
    """Make the next backward pass reduce each gradient, and add the ranks' instead of taking the mean, since they have
    their weights already. sharded: the modules; a script may have told them something else for its own loop."""
    for each in sharded:
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply and add at once
        each.set_requires_gradient_sync(True, recurse=False)
        each.set_is_last_backward(True)  # otherwise a GPU does not wait for the reduces


def gather_anew(sharded: Iterable[Any]) -> None:
    """Make each parameter its shard again, so that the next forward pass gathers what a step has made of it."""
    for each in sharded:
        each.reshard()


def reset(module: torch.nn.Module) -> None:
    """Take the module out of a forward or backward pass whose collectives failed: each parameter is its shard again,
    and nothing waits to be reduced. What has been reduced stays in the gradients."""
    groups = communication_groups(module)
    reduced = [(each.sharded_param, each.sharded_param.grad) for group in groups for each in group.fsdp_params]
    for group in groups:
        group._all_gather_result = None  # torch would wait for it, and it failed
        for each in group.fsdp_params:
            if (whole := getattr(each, "_unsharded_param", None)) is not None:
                whole.grad = None  # before 2.15 torch's own reset keeps it, and adds it to the next gradient
            if "unsharded_accumulated_grad" in vars(each):  # before 2.15
                each.unsharded_accumulated_grad = None
    for each in sharding_modules(module):
        state = each._get_fsdp_state()
        if state._is_root and hasattr(each, "reset_iter_state"):
            each.reset_iter_state()
        elif state._is_root:
            _reset_root(state)
    for group in groups:  # in forward passes before the first complete one no root was found
        group._to_sharded()
    for parameter, gradient in reduced:  # since 2.15 torch's own reset drops it
        parameter.grad = gradient


def _reset_root(state: Any) -> None:
    """Do the same for the root in torch 2.11, which has no function for it."""
    idle = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_common"].TrainingState.IDLE
    context, now = state._comm_ctx, state._device_handle.current_stream()
    for stream in (context.all_gather_stream, context.reduce_scatter_stream, context.all_reduce_stream):
        now.wait_stream(stream)  # they may still use the memory that is freed here
    context.all_gather_state = context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = idle
        for group in _groups(each):
            group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


# ---------------------------------------------------------------- what a session cannot heal
def settings(module: torch.nn.Module) -> Iterator[str]:
    """Yield the settings of a module with which its gradients would be wrong, or which use groups of their own."""
    for each in sharding_modules(module):
        state = each._get_fsdp_state()
        if getattr(state._state_ctx, "manual_backward_finalization", False):  # since 2.15
            yield "set_manual_backward_finalization(True)"
        for group in _groups(state):
            if getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None:  # since 2.13
                yield "set_separate_reduce_scatter_group(True)"
            if group._all_reduce_hook is not None:
                yield "set_all_reduce_hook()"
            own = {type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__}
            if own - {"DefaultAllGather", "DefaultReduceScatter"}:
                yield f"collectives of its own ({', '.join(sorted(own))})"


def replicates(group: Any) -> bool:
    """Whether it adds gradients over replicas by itself."""
    return any(getattr(each, "replicate_mesh_dim", None) is not None for each in (group.mesh_info, *_infos(group)))


def offloads(group: Any) -> bool:
    """Whether it keeps its shards in the memory of the host."""
    return any(each.offload_to_cpu for each in group.fsdp_params)


def in_two_groups(module: torch.nn.Module) -> str:
    """Return the name of a parameter that was shared by modules and is sharded twice; "" if there is none."""
    seen: dict[int, int] = {}
    for number, group in enumerate(communication_groups(module)):
        for each in group.fsdp_params:
            its = getattr(each, "_orig_param_uid", None)
            if its is not None and seen.setdefault(its, number) != number:
                return str(each._module_info.param_name)
    return ""


def note_originals() -> None:
    """Let torch 2.11 note which parameter it has sharded, as later releases do. Otherwise parameters that two groups
    share come apart without a word. To be called before a module is sharded."""
    if table.numbers(torch.__version__) >= (2, 13):
        return
    sharding = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    if hasattr(sharding.FSDPParam.__init__, "unicron_original"):
        return
    made, numbers = sharding.FSDPParam.__init__, count()

    def noting(self: Any, param: Any, *given: Any, **named: Any) -> None:
        self._orig_param_uid = vars(param).setdefault("unicron_number", next(numbers))
        made(self, param, *given, **named)

    noting.unicron_original = made  # type: ignore[attr-defined]
    sharding.FSDPParam.__init__ = noting


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
