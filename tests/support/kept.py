"""A small training whose state is kept in memory, and what is read from there, for pure tests."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import torch

from unicron_transition.snapshot.checkpoint import Checkpoints, Writer
from unicron_transition.snapshot.contents import Gatherer
from unicron_transition.snapshot.image_format import inventory
from unicron_transition.snapshot.keeper import Keeper
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.whole_state import Beginnings

WRITER = Writer(layout="TP1", loss=1.0)


def training(seed: int = 0) -> TrainingState:
    """A plain model with buffers, after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TrainingState([SimpleNamespace(module=model)], optimizer, scheduler, seed=seed)
    step(state)
    return state


def step(state: TrainingState) -> None:
    model = state.model[0].module
    state.optimizer.zero_grad()
    model(torch.rand(5, 3)).square().sum().backward()
    state.optimizer.step()
    state.loss = 1.0


def everything(state: TrainingState) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.tensors()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


def kept(folder: Path, state: TrainingState, *iterations: int, slot: int = 0) -> Keeper:
    keeper = Keeper(folder, slot, 1)
    copy(keeper, Gatherer(state), *iterations)
    keeper.close()
    return keeper


def copy(keeper: Keeper, gatherer: Gatherer, *iterations: int) -> None:
    """Copy the state of each iteration, one after the other."""
    for iteration in iterations:
        keeper.copy(gatherer, iteration, 1, WRITER)
        keeper.wait_whole()


def iterations(folder: Path) -> list[int]:
    return sorted(found.key.iteration for found in inventory(folder))


def beginnings(folder: Path | None, checkpoints: Checkpoints | None = None) -> Beginnings:
    return Beginnings(folder, checkpoints, 0, WRITER)


def no_room(*_: object) -> NoReturn:
    """Raise the error of a full memory."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
