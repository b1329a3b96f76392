"""Private and cached parts of Megatron-core: its process groups and their holders, gradient buffers, random numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.seams import table

# Attributes of instances. A new session compares them with the first object of each kind.
BUCKET_GROUP = (
    "buckets params ddp_config is_first_batch is_last_microbatch per_param_grad_ready_counts grad_reduce_handle "
    "param_gather_handle param_gather_dispatched cached_grad_buffer_shard_list cached_param_buffer_shard_list"
)
SHARDED_BUCKET_GROUP = (
    "intra_distributed_optimizer_instance_group intra_distributed_optimizer_instance_size "
    "intra_distributed_optimizer_instance_rank"
)
BUFFER = (
    "buckets bucket_indices numel grad_data param_data param_dtype grad_dtype param_index_map data_parallel_group "
    "data_parallel_world_size scale_gradients ddp_config"
)
BUCKET = "bucket_id offset numel_unpadded grad_data param_data gradient_scaling_factor"
SHARDED_OPTIMIZER = (
    "buffers config data_parallel_group grad_scaler optimizer per_bucket_numel per_model_bucket_groups gbuf_ranges "
    "model_param_gbuf_map model_param_group_index_map opt_group_ranges model_float16_groups model_fp32_groups "
    "shard_float16_groups shard_fp32_groups shard_fp32_from_float16_groups is_stub_optimizer"
)


def check(model: Sequence[Any], optimizers: Iterable[Any]) -> None:
    """Compare the imported parts of Megatron-core, and these distributed optimizers, with the table."""
    table.check("megatron-core", table.MEGATRON_CORE)
    sharded = list(optimizers)
    found_groups = [group for chunk in model for group in bucket_groups(chunk)][:1]
    found_buffers = [buffer for chunk in model for buffer in buffers(chunk)][:1]
    for objects, attributes in (
        (found_groups, f"{BUCKET_GROUP} {SHARDED_BUCKET_GROUP if sharded else ''}"),
        (found_buffers, BUFFER),
        ([bucket for buffer in found_buffers for bucket in buffer.buckets][:1], BUCKET),
        (sharded[:1], SHARDED_OPTIMIZER),
    ):
        for each in objects:
            if missing := [name for name in attributes.split() if not hasattr(each, name)]:
                table.refuse_release("megatron-core", f"{type(each).__name__} has no {', '.join(missing)}")


# ---------------------------------------------------------------- the model's parts
def reduce_again(group: Any) -> None:
    """Forget that the bucket group has reduced in this iteration, which it remembers from 0.18 on."""
    if hasattr(group, "grad_reduce_finished"):
        group.grad_reduce_finished = False


def buffers(chunk: Any) -> list[Any]:
    """Return the gradient buffers of one DDP model chunk."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def bucket_groups(chunk: Any) -> list[Any]:
    """Return the bucket groups (units of the gradient reduce) of one DDP model chunk."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def rng_tracker() -> Any:
    """Return Megatron's tracker of random states; None if the script does not use it."""
    return getattr(sys.modules.get("megatron.core.tensor_parallel.random"), "_CUDA_RNG_STATE_TRACKER", None)


# ---------------------------------------------------------------- process groups
def module(name: str) -> Any:
    """Return a module of Megatron-core; an empty one if the script does not use it."""
    return sys.modules.get(f"megatron.core.{name}") or SimpleNamespace()


def parallel_groups() -> dict[str, dist.ProcessGroup]:
    """Return name -> process group of `parallel_state`."""
    state = vars(module("parallel_state")).items()
    return {name: value for name, value in state if name.startswith("_") and isinstance(value, dist.ProcessGroup)}


def rank_lists() -> dict[str, list[int]]:
    """Return name -> list of ranks of `parallel_state`."""
    state = vars(module("parallel_state")).items()
    return {name: list(value) for name, value in state if name.endswith(("_RANKS", "_RANKS_WITH_CP")) and value}


def set_parallel_state(values: Mapping[str, Any]) -> None:
    """Replace groups and lists of ranks in `parallel_state`."""
    state = module("parallel_state")
    for name, value in values.items():
        setattr(state, name, value)


def group_holders(model: Sequence[Any], optimizer: Any) -> list[Any]:
    """Return every Megatron object that may cache a process group."""
    holders: list[Any] = []
    for chunk in model:
        modules = list(chunk.module.modules())
        dispatchers = [each.token_dispatcher for each in modules if hasattr(each, "token_dispatcher")]
        holders += [chunk, *modules, *dispatchers, *buffers(chunk), *bucket_groups(chunk)]
    return [*holders, optimizer, *getattr(optimizer, "chained_optimizers", [])]


def held_groups(holders: Iterable[Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield (owner, container, key, group) for each attribute of the holders that is a process group or a list of
    them."""
    collection = getattr(module("process_groups_config"), "ProcessGroupCollection", ())
    seen: set[int] = set()
    waiting = list(holders)[::-1]
    while waiting:
        owner = waiting.pop()
        attributes = getattr(owner, "__dict__", None)
        if attributes is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in list(attributes.items()):
            if isinstance(value, dist.ProcessGroup):
                yield owner, attributes, name, value
            elif isinstance(value, collection):
                waiting.append(value)
            elif isinstance(value, list) and value and all(isinstance(item, dist.ProcessGroup) for item in value):
                yield from ((owner, value, index, item) for index, item in enumerate(value))


def asking_once(holders: Iterable[Any]) -> list[Any]:
    """Return the optimizers of 0.19, which ask all ranks something in their first step and remember the answer."""
    return [each for each in holders if hasattr(each, "has_grad_norm_group")]


def ask_anew(optimizers: Iterable[Any]) -> None:
    """Make them ask again: a rank that has joined since asks, and would wait for the others."""
    for each in optimizers:
        each._has_grad_norm_group_cache = None


def send_back_over(way: Any) -> None:
    """Make the pipeline use this group for its second direction. With two stages Megatron uses the world for it
    (`p2p_communication._p2p_ops`), whose connections the loss of any member breaks."""
    from megatron.core.pipeline_parallel import p2p_communication

    class OtherWorld:
        """`torch.distributed` with another world."""

        group = SimpleNamespace(WORLD=way)

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

    original = getattr(p2p_communication._p2p_ops, "unicron_original", p2p_communication._p2p_ops)
    scope = {**vars(p2p_communication), "torch": SimpleNamespace(distributed=OtherWorld(), Tensor=torch.Tensor)}
    patched = FunctionType(original.__code__, scope, original.__name__, original.__defaults__, original.__closure__)
    patched.__kwdefaults__ = original.__kwdefaults__
    patched.unicron_original = original  # type: ignore[attr-defined]
    p2p_communication._p2p_ops = patched
