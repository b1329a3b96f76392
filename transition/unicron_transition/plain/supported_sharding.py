"""Refuses modules that are sharded in a way that a session cannot heal, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from unicron_transition.generations.layout import Layout
from unicron_transition.generations.meshes import Meshes
from unicron_transition.seams import dtensors, fully_shard
from unicron_transition.seams.table import UnsupportedLayout, refuse

HOW = "fully_shard(module, mesh=unicron.shard_mesh())"
TENSOR = " and parallelize_module(module, unicron.tensor_mesh(), plan)"


def check_sharding(module: torch.nn.Module, layout: Layout, meshes: Meshes, scaler: Any) -> None:
    """Raise :class:`UnsupportedLayout` for the first thing that this release cannot heal."""
    if layout.pipeline * layout.expert > 1:
        raise UnsupportedLayout(
            f"{layout.text} is for Megatron's models: a module has Layout(shard=, tensor=, context=)"
        )
    sharded = bool(dtensors.sharding_modules(module))
    if sharded:
        refuse(_groups(module))
    refuse(_parameters(module, layout, meshes, sharded))
    if sharded:
        refuse(_cuts(module))
        refuse(_settings(module, scaler))


def _parameters(module: torch.nn.Module, layout: Layout, meshes: Meshes, sharded: bool) -> Iterator[str]:
    """Find parameters whose gradients nobody would add over the ranks of a replica, or somebody over other ranks."""
    for name, parameter in module.named_parameters():
        distributed = dtensors.is_distributed(parameter)
        if distributed and not sharded:
            yield f"{name}, which is distributed without fully_shard: shard the module with {HOW} as well"
        if distributed and not meshes.hold(parameter):
            yield f"{name}, which is on a mesh of other ranks than a replica's: write {HOW}{TENSOR}"
        if not distributed and layout.size > 1 and parameter.requires_grad:
            yield (
                f"{name}, which is whole in each of the {layout.size} ranks of {layout.text}: shard the rest of the "
                f"model, too, with {HOW} and no ignored_params"
            )


def _cuts(module: torch.nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        if not dtensors.is_distributed(parameter):
            continue
        try:
            dtensors.blocks(parameter)
        except dtensors.Uneven as error:
            yield (
                f"{name} of shape {list(parameter.shape)}, whose shards are uneven ({error}): choose another dimension "
                "with shard_placement_fn, or another number of ranks in Layout(shard=)"
            )


def _groups(module: torch.nn.Module) -> Iterator[str]:
    for group in fully_shard.communication_groups(module):
        if fully_shard.replicates(group):
            yield f"a mesh with a dimension for replicas, over which the session adds: write {HOW}"
        if group.post_forward_mesh_info not in (None, group.mesh_info):
            yield "reshard_after_forward as a number of ranks: write True or False"
        if group._all_reduce_hook is not None:
            yield "a hook after the reduce (set_all_reduce_hook): leave it out"
        if fully_shard.offloads(group):
            yield "fully_shard with a CPUOffloadPolicy: leave it out"
    if name := fully_shard.in_two_groups(module):
        yield f"{name}, which is in two groups of fully_shard: give both modules to one call, fully_shard([one, other])"


def _settings(module: torch.nn.Module, scaler: Any) -> Iterator[str]:
    if scaler is not None:
        yield "a gradient scaler with a sharded module: train in bf16"
