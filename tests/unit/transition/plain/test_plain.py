"""A plain module under a session, in one process: its refusals, and its whole state by every way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.texts import raises_text
from unicron_transition.generations.layout import Layout
from unicron_transition.generations.meshes import Meshes
from unicron_transition.plain.module import Plain
from unicron_transition.seams.table import UnsupportedLayout
from unicron_transition.session import model_kinds
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.migrate import TrainingState


def plain(model: nn.Module, optimizer: Any = None, scheduler: Any = None, **more: Any) -> Plain:
    return Plain(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), scheduler, **more)


class Remembering(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


class Sharded(torch.optim.SGD):
    """Stands for the optimizers of torch.distributed."""

    __module__ = "torch.distributed.optim"


def with_function(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["decay"] = lambda step: step
    return optimizer


def plateau(model: nn.Module) -> Plain:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plain(model, optimizer, lr_scheduler.ReduceLROnPlateau(optimizer))


REFUSED: dict[str, Callable[[], Plain]] = {
    "batch norm": lambda: plain(nn.Sequential(nn.BatchNorm2d(3))),
    "instance norm": lambda: plain(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
    "lazy": lambda: plain(nn.LazyLinear(3)),
    "complex": lambda: plain(nn.Linear(3, 3, dtype=torch.complex64)),
    "extra state": lambda: plain(Remembering(3, 3)),
    "LBFGS": lambda: plain(one := nn.Linear(3, 3), torch.optim.LBFGS(one.parameters())),
    "sharded": lambda: plain(one := nn.Linear(3, 3), Sharded(one.parameters())),
    "no optimizer": lambda: plain(one := nn.Linear(3, 3), [torch.optim.SGD(one.parameters())]),
    "others": lambda: plain(nn.Linear(3, 3), torch.optim.SGD(nn.Linear(3, 3).parameters())),
    "function": lambda: plain(one := nn.Linear(3, 3), with_function(one)),
    "plateau": lambda: plateau(nn.Linear(3, 3)),
    "DDP": lambda: plain(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(3, 3)))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_healed_is_refused_in_one_line(world, name, snapshot):
    with raises_text(UnsupportedLayout, snapshot) as raised:
        REFUSED[name]().check(Layout(), Meshes(Layout(), "cpu"))
    assert "\n" not in str(raised.value)


def test_what_looks_alike_and_can_be_healed_is_not_refused():
    frozen = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False))
    frozen[0].weight.requires_grad_(False)
    with pytest.raises(UnsupportedLayout):
        plain(frozen.train()).check(Layout(), Meshes(Layout(), "cpu"))
    frozen[1].eval()
    plain(frozen).check(Layout(), Meshes(Layout(), "cpu"))
    plain(torch.compile(nn.Linear(3, 3), backend="eager")).check(Layout(), Meshes(Layout(), "cpu"))


def test_a_plain_module_has_no_pipeline():
    with pytest.raises(UnsupportedLayout, match=r"is for Megatron's models"):
        plain(nn.Linear(3, 3)).check(Layout(pipeline=2), Meshes(Layout(), "cpu"))


def test_neither_a_module_nor_chunks_is_one_line(snapshot):
    for model in ([nn.Linear(3, 3)], nn.ModuleList([nn.Linear(3, 3)]).requires_grad_(False)._modules.values()):
        with raises_text(ValueError, snapshot):
            model_kinds.kind_of(model, None, None, clip_grad=None, scaler=None)


def test_parameters_that_are_trained_only_later_are_refused_then():
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    optimizer = plain(model).optimizer
    optimizer.zero_grad()
    model.bias.requires_grad_(True)
    with pytest.raises(UnsupportedLayout, match="requires_grad"):
        optimizer.zero_grad()


# ------------------------------------------------------------ its state
class Model(nn.Module):
    """Has a tied parameter, one without dimensions, a buffer of booleans, and a cache."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(values))) * self.mask * self.scale


OPTIMIZERS = {
    name: (lambda parameters, name=name: getattr(torch.optim, name)(parameters, lr=0.01))
    for name in "Adadelta Adagrad Adam Adamax ASGD NAdam RAdam RMSprop Rprop Adafactor".split()
}
OPTIMIZERS["momentum"] = lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
OPTIMIZERS["fused"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)
OPTIMIZERS["tensor"] = lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False)
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [2]
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def training(seed: int, optimizer: str, schedule: str) -> Plain:
    torch.manual_seed(seed)
    model = Model()
    its = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    return Plain(model, its, SCHEDULES[schedule](its), clip_grad=1.0, scaler=scaler)


def train(trained: Plain, steps: int) -> None:
    torch.manual_seed(7)
    for _ in range(steps):
        loss = trained._model(torch.rand(5, 4)).square().sum()
        trained.optimizer.optimizer.zero_grad()
        trained._scaler.scale(loss).backward()
        assert trained.optimizer.step()[0]
        trained.scheduler.step(1)


def everything(trained: Plain) -> list[Any]:
    rates = [float(group["lr"]) for group in trained.optimizer.param_groups]
    return [*trained.state(0).tensors(), rates, trained.scheduler.state_dict()]


def moved(source: TrainingState, target: TrainingState) -> None:
    """Move the state like :func:`unicron_transition.snapshot.migrate.transfer`."""
    target.adopt(source.header(3))
    for mine, its in zip(target.tensors(), source.tensors(), strict=True):
        assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
        mine.copy_(its)
    assert torch.equal(source.settings(), target.settings())


WAYS = [(name, "LambdaLR") for name in OPTIMIZERS] + [("Adam", name) for name in SCHEDULES]


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize(("optimizer", "schedule"), WAYS)
def test_a_newcomer_with_the_state_of_a_peer_or_a_checkpoint_trains_like_the_others(
    tmp_path: Path, optimizer, schedule, by_file
):
    one, other = training(1, optimizer, schedule), training(2, optimizer, schedule)
    train(one, 3)
    if by_file:
        Checkpoints(tmp_path).save_last(one.state(0), 3)
        assert Checkpoints(tmp_path).load(other.state(0)) == 3
    else:
        other._model.cache = torch.rand(8)  # of another size: a cache is no state
        moved(one.state(0), other.state(0))
    train(one, 3)
    train(other, 3)
    for mine, its in zip(everything(one), everything(other), strict=True):
        assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its


def test_an_overflow_is_no_step_and_a_smaller_scale():
    trained = training(1, "momentum", "LambdaLR")
    before = everything(trained)[0].clone()
    loss = trained._model(torch.rand(5, 4)).sum() * float("inf")
    trained._scaler.scale(loss).backward()
    assert trained.optimizer.step()[0] is False
    assert torch.equal(everything(trained)[0], before) and trained._scaler.get_scale() == 2.0
