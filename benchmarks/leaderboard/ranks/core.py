"""The training that all systems run: model, data, an iteration of plain data parallelism, and its notes.

A micro-batch depends only on (iteration, index), and each has the same weight for any number of ranks. So the losses of
all runs are comparable. Variables of the environment:

LEADERBOARD_OUT: folder of the notes
LEADERBOARD_NODE: number of the node; else SLURMD_NODENAME counts
LEADERBOARD_CHECKPOINT: file of the checkpoint
LEADERBOARD_MICRO_BATCHES: of an iteration, over all ranks
LEADERBOARD_DEVICE_SECONDS: sleep of a micro-batch, as if it had a device of its own: the ranks share cores
LEADERBOARD_COLLECTIVE_SECONDS: time-out of a collective
LEADERBOARD_ITERATIONS: length of the training
LEADERBOARD_WIDTH: of the model
LEADERBOARD_SHARD: ranks that share the parameters of a replica, by `fully_shard`; 1 for plain data parallelism
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

MICRO_BATCHES = int(os.environ.get("LEADERBOARD_MICRO_BATCHES", "16"))
SAMPLES, LENGTH, VOCABULARY, LAYERS = 4, 32, 64, 2
WIDTH = int(os.environ.get("LEADERBOARD_WIDTH", "96"))
SEED, RATE = 1234, 1e-3
START_TIMEOUT = datetime.timedelta(seconds=60)  # for all ranks of a world to connect

OUT = Path(os.environ.get("LEADERBOARD_OUT", "."))
CHECKPOINT = Path(os.environ.get("LEADERBOARD_CHECKPOINT", "checkpoint.pt"))
DEVICE_SECONDS = float(os.environ.get("LEADERBOARD_DEVICE_SECONDS", "0.025"))
COLLECTIVE_SECONDS = float(os.environ.get("LEADERBOARD_COLLECTIVE_SECONDS", "3"))
ITERATIONS = int(os.environ.get("LEADERBOARD_ITERATIONS", "1000000"))
SHARD = int(os.environ.get("LEADERBOARD_SHARD", "1"))
TIMEOUT = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
_asked: list[int] = []  # signals that were not answered yet


class Layer(nn.Module):
    """Causal attention and a feed-forward network, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.first(states)).view(*states.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.out(seen.transpose(1, 2).reshape(states.shape))
        return states + self.narrow(functional.gelu(self.wide(self.second(states))))


class Model(nn.Module):
    """Tokens to logits; about 240,000 parameters by default."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(tokens) + self.places.weight))


def build() -> tuple[Model, torch.optim.Optimizer]:
    """Build the same model and optimizer on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def micro_batch(iteration: int, index: int) -> torch.Tensor:
    """Tokens, shape (SAMPLES, LENGTH + 1): counting in steps of 1 to 3, with one token in ten drawn at random."""
    draw = torch.Generator().manual_seed(iteration * MICRO_BATCHES + index)
    starts = torch.randint(VOCABULARY, (SAMPLES, 1), generator=draw)
    steps = torch.randint(1, 4, (SAMPLES, 1), generator=draw)
    tokens = (starts + steps * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.randint(VOCABULARY, tokens.shape, generator=draw)
    return torch.where(torch.rand(tokens.shape, generator=draw) < 0.1, noise, tokens)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a micro-batch. Raises RuntimeError if the benchmark has asked for it."""
    if _asked:
        _asked.clear()
        raise RuntimeError("the benchmark asked for an exception")
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    time.sleep(DEVICE_SECONDS)
    return loss


class Notes:
    """Notes for the benchmark in a file of this process: JSON lines with the time, each written at once.

    {"what": "start", node, pid, rank}
    {"what": "micro", iteration, index} when a micro-batch was computed
    {"what": "step", iteration, loss, world, rank, micro} when the optimizer has stepped; micro is this rank's part
    """

    def __init__(self, rank: int) -> None:
        node = os.environ.get("SLURMD_NODENAME", "").removeprefix("n")
        self.node = int(os.environ.get("LEADERBOARD_NODE") or int(node) - 1)
        path = OUT / f"notes.{self.node}.{os.getpid()}.{time.time_ns()}"
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        signal.signal(signal.SIGUSR2, lambda number, _: _asked.append(number))
        self.note("start", node=self.node, pid=os.getpid(), rank=rank)

    def note(self, what: str, **more: Any) -> None:
        os.write(self._file, (json.dumps({"what": what, "time": time.time(), **more}) + "\n").encode())

    def micro(self, iteration: int, index: int) -> None:
        self.note("micro", iteration=iteration, index=index)

    def step(self, iteration: int, loss: float, world: int, rank: int, micro: list[int]) -> None:
        shown = loss if math.isfinite(loss) else str(loss)  # JSON has no such numbers
        self.note("step", iteration=iteration, loss=shown, world=world, rank=rank, micro=micro)


def compute(model: nn.Module, iteration: int, rank: int, size: int, notes: Notes) -> tuple[list[int], torch.Tensor]:
    """Compute this rank's share of an iteration: micro-batch i belongs to rank i mod size.

    Return (micro-batches, sum of their losses / MICRO_BATCHES). The gradients are scaled for a reduce that divides by
    `size`, as DistributedDataParallel and `fully_shard` do in the last backward pass.
    """
    mine = list(range(rank, MICRO_BATCHES, size))
    total = torch.zeros(1)
    for index in mine:
        with reducing(model, last=index == mine[-1]):
            loss = loss_of(model, micro_batch(iteration, index)) / MICRO_BATCHES
            notes.micro(iteration, index)
            total += loss.detach()
            (loss * size).backward()
    return mine, total


def reducing(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context for a micro-batch, in which gradients are reduced over the replicas only in the `last` one."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
    elif isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


# ------------------------------------------------------------ the state
def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of the training."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def take(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take over a state."""
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


class Files:
    """A checkpoint in a file that all nodes see: rank 0 writes it in each iteration, all read it."""

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Take over the checkpoint. Return the next iteration."""
        if not CHECKPOINT.is_file():
            return 0
        saved = torch.load(CHECKPOINT, weights_only=True)
        take(saved, model, optimizer)
        return int(saved["iteration"])

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, following: int, rank: int) -> None:
        if rank == 0:
            new = CHECKPOINT.with_suffix(f".{os.getpid()}")
            torch.save(state(model, optimizer) | {"iteration": following}, new)
            new.replace(CHECKPOINT)
