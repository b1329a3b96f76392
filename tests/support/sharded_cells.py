"""Trainings of a sharded module in each cell of (shards, tensor ranks), their checkpoints, and what torch says a rank
has of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.support.sharded_module import Model, shard, step_alone, training, without_peers
from unicron_transition.generations.layout import Layout
from unicron_transition.seams import dtensors
from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.migrate import TrainingState

Cell = tuple[int, int]  # shards, tensor ranks
ITERATION = 7


def each_rank(cell: Cell, seed: int, steps: int = 0, tied: bool = False) -> Iterator[tuple[TrainingState, Writer]]:
    """The training of each rank of a replica, in a world of that replica alone, and its part of a checkpoint."""
    size = cell[0] * cell[1]
    for rank in range(size):
        with without_peers(rank, size):
            yield made(cell, seed, steps, tied), Writer(rank, size, layout=Layout(cell[1], shard=cell[0]).text)


def made(cell: Cell, seed: int, steps: int = 0, tied: bool = False) -> TrainingState:
    torch.manual_seed(seed)
    model = Model(tied)
    if cell != (1, 1):
        shard(model, *cell)
    state = training(model, seed=seed)
    for _ in range(steps):
        step_alone(state)
    return state


def save(folder: Path, cell: Cell, tied: bool = False) -> Path:
    for state, writer in each_rank(cell, 1, 2, tied):
        checkpoints = Checkpoints(folder)
        checkpoints.save(state, ITERATION, writer)
        checkpoints.wait_written()
    return folder


def whole(state: TrainingState) -> dict[str, torch.Tensor]:
    """All tensors of an unsharded training, by name."""
    model = state.model[0].module
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found |= {f"{name} {key}": value for key, value in state.optimizer.state.get(parameter, {}).items()}
    return found


def check_part(tensor: torch.Tensor, wanted: torch.Tensor) -> None:
    """A tensor is this rank's part of another, by torch's own account."""
    if isinstance(tensor, DTensor):
        extent, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        wanted = wanted[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
    assert torch.allclose(dtensors.local(tensor).detach(), wanted.detach(), rtol=1e-6, atol=1e-8)
