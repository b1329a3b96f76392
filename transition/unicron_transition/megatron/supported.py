"""Refuses models and layouts that cannot be healed when the session is made, in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unicron_transition.generations.layout import Layout
from unicron_transition.seams import elastic_buckets
from unicron_transition.seams.table import refuse


def check(model: Sequence[Any], optimizer: Any, layout: Layout) -> None:
    """Raise :class:`table.UnsupportedLayout` for the first thing that this release cannot heal."""
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0])
    if any(chunk.ddp_config.use_distributed_optimizer for chunk in model):
        elastic_buckets.check(model, optimizer)
    refuse((*_sizes(layout), *_model(model, config), *_reduces(model), *_optimizer(optimizer)))


def _sizes(layout: Layout) -> Iterator[str]:
    from megatron.core import parallel_state

    actual = Layout(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if actual != layout:
        yield f"a layout that it is not told of: give init_process_group layout=unicron.{actual}"
    if layout.context > 1:
        yield "context parallelism, which Megatron's own attention has not: leave --context-parallel-size out"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        yield (
            "expert parallelism, whose groups are of several replicas of the dense layers: leave "
            "--expert-model-parallel-size out"
        )
    if parallel_state.get_expert_tensor_parallel_world_size() != layout.tensor:
        yield "expert tensor parallelism of another size than --tensor-model-parallel-size: leave it out"


def _model(model: Sequence[Any], config: Any) -> Iterator[str]:
    if getattr(config, "num_moe_experts", None):
        yield from _experts(config)
    if getattr(config, "mtp_num_layers", None) and config.pipeline_model_parallel_size > 1 and _ties(model):
        yield (
            "multi-token prediction over pipeline stages with tied embeddings, of which Megatron makes no checkpoint: "
            "give the output layer weights of its own"
        )
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        yield "fp8 and fp4, whose scaling factors are a state of their own: use bf16"
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        yield "CUDA graphs, which hold the groups that they were captured with"
    if getattr(config, "tp_comm_overlap", False):
        yield "tp_comm_overlap, which holds groups of its own: unset it"


def _ties(model: Sequence[Any]) -> bool:
    modules = (module for chunk in model for module in chunk.modules())
    return any(getattr(module, "share_embeddings_and_output_weights", False) for module in modules)


def _experts(config: Any) -> Iterator[str]:
    if config.tensor_model_parallel_size > 1:
        yield "mixtures of experts with tensor parallelism, which was never seen to work: use pipeline stages"
    balance = config.moe_router_load_balancing_type
    if "global_aux_loss" in ([balance] if isinstance(balance, str) else balance):
        yield "global_aux_loss, which ties each forward pass to those of all replicas: use aux_loss or seq_aux_loss"
    if getattr(config, "moe_enable_routing_replay", False):
        yield "moe_enable_routing_replay, whose routes belong to ranks and not to micro-batches: unset it"


def _reduces(model: Sequence[Any]) -> Iterator[str]:
    for chunk in model:
        settings = chunk.ddp_config
        if settings.average_in_collective:
            yield "gradients averaged in the collective, since it weighs micro-batches itself: unset it"
        if getattr(settings, "reduce_scatter_with_fp32_accumulation", False):
            yield "reduce_scatter_with_fp32_accumulation, whose reduce cannot be waited for: unset it"
        if getattr(settings, "use_megatron_fsdp", False) or getattr(settings, "use_custom_fsdp", False):
            yield "FSDP: use the distributed optimizer"


def _optimizer(optimizer: Any) -> Iterator[str]:
    config = getattr(optimizer, "config", None)
    if getattr(config, "optimizer_cpu_offload", False):
        yield "an optimizer on the CPU: unset optimizer_cpu_offload"
