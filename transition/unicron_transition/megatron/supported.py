"""Refuses models and layouts that cannot be healed when the session is made, in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from unicron_transition.generations.layout import Layout
from unicron_transition.megatron import limits
from unicron_transition.seams import elastic_buckets
from unicron_transition.seams.table import refuse


def check(model: Sequence[Any], optimizer: Any, layout: Layout) -> None:
    """Raise :class:`table.UnsupportedLayout` for the first thing that this release cannot heal."""
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0])
    if any(chunk.ddp_config.use_distributed_optimizer for chunk in model):
        elastic_buckets.check(model, optimizer)
    refuse((*_sizes(layout), *_model(model, config, optimizer)))


def _sizes(layout: Layout) -> Iterator[str]:
    from megatron.core import parallel_state

    actual = Layout(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        expert=limits.lanes_of(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        ),
    )
    if actual != layout:
        yield f"a layout that it is not told of: give init_process_group layout=unicron.{actual}"
    if layout.context > 1:
        yield "context parallelism, which Megatron's own attention has not: leave --context-parallel-size out"


def _model(model: Sequence[Any], config: Any, optimizer: Any) -> Iterator[str]:
    for chunk in model:
        settings = (config, chunk.ddp_config, getattr(optimizer, "config", None))
        yield from limits.limits_of(partial(_value, settings), str)
    yield from limits.over_stages(
        getattr(config, "mtp_num_layers", None), config.pipeline_model_parallel_size, _ties(model)
    )


def _value(settings: Sequence[Any], name: str) -> Any:
    return next((getattr(each, name) for each in settings if hasattr(each, name)), None)


def _ties(model: Sequence[Any]) -> bool:
    modules = (module for chunk in model for module in chunk.modules())
    return any(getattr(module, "share_embeddings_and_output_weights", False) for module in modules)
