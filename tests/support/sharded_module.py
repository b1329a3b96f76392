"""A small module that `fully_shard` has sharded, for tests: in a world without peers, one rank after the other, or with
them. Its layers can be cut by tensor parallelism, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unicron_transition.seams import process_groups
from unicron_transition.snapshot.migrate import TrainingState

WORDS, WIDTH = 16, 8
TENSOR_PARALLEL = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # parameter of a block -> the axis that is cut


class Block(torch.nn.Module):
    """A layer with a bias, and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        return found + self.down(torch.tanh(self.up(self.norm(self.frozen(found)))))


class Model(torch.nn.Module):
    """Some blocks between an embedding and an output layer, and a buffer."""

    def __init__(self, tied: bool = False, blocks: int = 2):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.out = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.full((3,), 2.0))
        if tied:
            self.out.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.words(tokens)
        for block in self.blocks:
            found = block(found)
        return self.out(found) * self.scale[0]


def shard(model: Model, shards: int, tensor: int = 1, peers: bool = False) -> Model:
    """Shard it over the world, tensor ranks fastest."""
    mesh = init_device_mesh("cpu", (shards, tensor), mesh_dim_names=("shard", "tensor"))
    if tensor > 1:
        for block in model.blocks:
            _cut(block, mesh["tensor"], peers)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def _cut(block: Block, mesh: DeviceMesh, peers: bool) -> None:
    """Cut a block's layers. Without peers torch's own way would spread what is not there."""
    if peers:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return
    for name, axis in TENSOR_PARALLEL.items():
        layer, _, key = name.partition(".")
        module = getattr(block, layer)
        whole = getattr(module, key).detach()
        cut = distribute_tensor(whole, mesh, [Shard(axis)], src_data_rank=None)
        setattr(module, key, torch.nn.Parameter(cut))
    for name, parameter in list(block.norm.named_parameters()):
        cut = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        setattr(block.norm, name, torch.nn.Parameter(cut))


@contextlib.contextmanager
def without_peers(rank: int, size: int) -> Iterator[None]:
    """Be this rank of a world without others."""
    _clear_sharding_prop_cache()  # has the mesh of the rank before, which torch takes for the same
    process_groups.init_without_peers(rank, size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    """One with two groups of parameters, as most scripts have."""
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices, vectors = ([each for each in trained if (each.dim() > 1) is many] for many in (True, False))
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)


def training(model: Model, seed: int = 1) -> TrainingState:
    """A training of it."""
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = TrainingState([SimpleNamespace(module=model)], optimizer, scheduler, seed=seed)
    state.loss = 1.0
    return state


def step_alone(state: TrainingState) -> None:
    """Step the optimizer with gradients that no peer is needed for: elements of the parameters."""
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
    state.optimizer.step()
    state.scheduler.step()


def step(state: TrainingState, tokens: torch.Tensor) -> None:
    """Train it once."""
    model = state.model[0].module
    state.optimizer.zero_grad()
    model(tokens).square().mean().backward()
    state.optimizer.step()
    state.scheduler.step()
