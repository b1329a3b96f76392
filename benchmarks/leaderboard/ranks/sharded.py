"""The training's model sharded by `fully_shard`: LEADERBOARD_SHARD ranks hold a replica of it (HSDP).

A state has this rank's shards alone, so each rank writes and sends its own, as torch's tutorial of FSDP2 does with
`torch.save` of local tensors.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from benchmarks.leaderboard.ranks import core


def shard(model: core.Model, mesh: DeviceMesh) -> core.Model:
    """Shard each layer, and what is left of the model."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build(mesh: DeviceMesh) -> tuple[core.Model, torch.optim.Optimizer]:
    """Build the same model on every rank, and the optimizer of this rank's shards."""
    model = shard(core.build()[0], mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=core.RATE)


def hybrid_mesh(rank: int, size: int, timeout: datetime.timedelta) -> DeviceMesh:
    """Return the mesh (replicate, shard) of a world, in which a collective may not last longer than `timeout`."""
    grid = torch.arange(size).view(-1, core.SHARD)
    mine = []
    for lines in (grid.t(), grid):
        made = [(line, dist.new_group(line, timeout=timeout)) for line in lines.tolist()]
        mine += [group for line, group in made if rank in line]
    return DeviceMesh.from_group(mine, "cpu", grid, mesh_dim_names=("replicate", "shard"))


# ------------------------------------------------------------ the state
def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this rank's shards of the state."""
    return tree_map_only(torch.Tensor, lambda tensor: local(tensor.detach()), core.state(model, optimizer))


def take(saved: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take over this rank's shards of a state."""
    for name, parameter in model.state_dict().items():
        local(parameter).copy_(saved["model"][name])
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    moments = {
        number: {
            name: _like(parameters[number], value) if value.dim() else value  # the step is a scalar
            for name, value in each.items()
        }
        for number, each in saved["optimizer"]["state"].items()
    }
    optimizer.load_state_dict(saved["optimizer"] | {"state": moments})


def _like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class Files:
    """A file of each shard, that all nodes see: the ranks of the first replica write them in each iteration, all read.

    The two newest are kept, since a rank may die before it has written its own: nobody steps twice meanwhile, because
    a step takes the shards of all.
    """

    def _path(self, shard: int, following: int) -> Path:
        return core.CHECKPOINT.with_suffix(f".{shard}.{following % 2}")

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Take over the newest checkpoint of all shards. Return the next iteration."""
        kept = []
        for slot in range(2):
            paths = [self._path(shard, slot) for shard in range(core.SHARD)]
            if all(path.is_file() for path in paths):
                all_shards = [torch.load(path, weights_only=True) for path in paths]
                if len({int(each["iteration"]) for each in all_shards}) == 1:
                    kept.append(all_shards[dist.get_rank() % core.SHARD])
        if not kept:
            return 0
        newest = max(kept, key=lambda each: each["iteration"])
        take(newest, model, optimizer)
        return int(newest["iteration"])

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, following: int, rank: int) -> None:
        if rank < core.SHARD:
            path = self._path(rank, following)
            new = path.with_suffix(f".{os.getpid()}")
            torch.save(state(model, optimizer) | {"iteration": following}, new)
            new.replace(path)
