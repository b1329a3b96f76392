"""The settings of a model and its optimizer that cannot be healed: one table for sessions, which have Megatron's
configurations, and for Megatron-LM's programs, which have its arguments. Both call a setting by the same name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Limit(NamedTuple):
    """A setting that cannot be healed."""

    name: str
    words: str
    """They follow the setting's name, or all of the text if they do not begin with a mark."""
    refused: Callable[[Any], bool] = bool
    """refused(value) tells whether the value is one of those that cannot be healed."""


def _has(word: str) -> Callable[[Any], bool]:
    return lambda value: word in ([value] if isinstance(value, str) else value or [])


def _above_one(value: Any) -> bool:
    return (value or 1) > 1


LIMITS = (
    Limit(
        "moe_router_load_balancing_type",
        "global_aux_loss, which ties each forward pass to those of all replicas: use aux_loss or seq_aux_loss",
        _has("global_aux_loss"),
    ),
    Limit("moe_enable_routing_replay", ", whose routes belong to ranks and not to micro-batches: unset it"),
    Limit(
        "moe_token_dispatcher_type",
        "the flex token dispatcher, whose buffers keep the group of their beginning: use alltoall or allgather",
        _has("flex"),
    ),
    Limit("overlap_moe_expert_parallel_comm", ", whose schedule calls no forward step of a session: unset it"),
    Limit("dsa_indexer_loss_coeff", ", whose gradient Megatron adds with a weight of its own: unset it"),
    Limit("moe_use_upcycling", ", which builds a second model: begin from an upcycled checkpoint"),
    Limit("qk_clip", ", which changes parameters after the step by what each rank has seen: unset it"),
    Limit("fp8", "fp8 and fp4, whose scaling factors are a state of their own: use bf16"),
    Limit("fp4", "fp8 and fp4, whose scaling factors are a state of their own: use bf16"),
    Limit("enable_cuda_graph", "CUDA graphs, which hold the groups that they were captured with"),
    Limit(
        "cuda_graph_impl",
        "CUDA graphs, which hold the groups that they were captured with",
        lambda value: value not in (None, "none"),
    ),
    Limit("tp_comm_overlap", ", which holds groups of its own: unset it"),
    Limit(
        "average_in_collective", "gradients averaged in the collective, since it weighs micro-batches itself: unset it"
    ),
    Limit("reduce_scatter_with_fp32_accumulation", ", whose reduce cannot be waited for: unset it"),
    Limit("use_megatron_fsdp", "FSDP: use the distributed optimizer"),
    Limit("use_custom_fsdp", "FSDP: use the distributed optimizer"),
    Limit("use_torch_fsdp2", "FSDP: use the distributed optimizer"),
    Limit("optimizer_cpu_offload", "an optimizer on the CPU: unset optimizer_cpu_offload"),
    Limit("num_distributed_optimizer_instances", "several instances of the distributed optimizer", _above_one),
)


def limits_of(value: Callable[[str], Any], shown: Callable[[str], str]) -> Iterator[str]:
    """Yield what cannot be healed, in words that follow "can't heal". value(name) is that of a setting, shown(name) its
    name for the user."""
    for limit in LIMITS:
        if limit.refused(value(limit.name)):
            yield f"{shown(limit.name)}{limit.words}" if limit.words[0] in ",:" else limit.words


def lanes_of(tensor: int, expert: int, expert_tensor: int | None) -> int:
    """Return the data-parallel ranks of the smallest block of ranks that is closed under all of Megatron's groups: that
    many share their experts, whose groups are of consecutive ranks."""
    return math.lcm(expert * (expert_tensor or tensor), tensor) // tensor


def over_stages(mtp_layers: Any, stages: int, tied: bool) -> Iterator[str]:
    """Yield what cannot be healed of multi-token prediction over pipeline stages."""
    if mtp_layers and stages > 1 and tied:
        yield (
            "multi-token prediction over pipeline stages with tied embeddings, of which Megatron makes no checkpoint: "
            "give the output layer weights of its own"
        )
