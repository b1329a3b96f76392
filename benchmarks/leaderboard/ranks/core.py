"""The training that all systems run: model, data, one iteration of plain data parallelism, and the notes of it.

A micro-batch is a function of (iteration, index) alone, and each weighs the same, whoever computes it and however many
ranks there are. So the losses of any run can be laid over those of any other.

Environment: LEADERBOARD_OUT folder of the notes; LEADERBOARD_NODE number of the node, or SLURMD_NODENAME;
LEADERBOARD_CHECKPOINT file; LEADERBOARD_MICRO_BATCHES of an iteration; LEADERBOARD_DEVICE_SECONDS that a micro-batch
takes on a device of its own, slept, since the ranks of this benchmark share cores; LEADERBOARD_COLLECTIVE_SECONDS for a
collective; LEADERBOARD_ITERATIONS after which it ends.
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
from torch.nn import functional

MICRO_BATCHES = int(os.environ.get("LEADERBOARD_MICRO_BATCHES", "16"))  # of an iteration, over all ranks
SAMPLES, LENGTH, VOCABULARY, WIDTH, LAYERS = 4, 32, 64, 96, 2
SEED = 1234
CHECKPOINT_EVERY = 1  # iterations: docs/leaderboard.md has the measurement
START_SECONDS = 60.0  # for all ranks of a world to come

OUT = Path(os.environ.get("LEADERBOARD_OUT", "."))
CHECKPOINT = Path(os.environ.get("LEADERBOARD_CHECKPOINT", "checkpoint.pt"))
DEVICE_SECONDS = float(os.environ.get("LEADERBOARD_DEVICE_SECONDS", "0.025"))
COLLECTIVE_SECONDS = float(os.environ.get("LEADERBOARD_COLLECTIVE_SECONDS", "3"))
ITERATIONS = int(os.environ.get("LEADERBOARD_ITERATIONS", "1000000"))
TIMEOUT = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
START_TIMEOUT = datetime.timedelta(seconds=START_SECONDS)
_asked: list[int] = []  # signals that have come and were not answered


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
    """Tokens to logits; about 240,000 parameters."""

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
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def micro_batch(iteration: int, index: int) -> torch.Tensor:
    """Tokens, shape (SAMPLES, LENGTH + 1): counting in steps of 1 to 3, with one token in ten drawn at random."""
    draw = torch.Generator().manual_seed(iteration * MICRO_BATCHES + index)
    starts = torch.randint(VOCABULARY, (SAMPLES, 1), generator=draw)
    steps = torch.randint(1, 4, (SAMPLES, 1), generator=draw)
    tokens = (starts + steps * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.randint(VOCABULARY, tokens.shape, generator=draw)
    return torch.where(torch.rand(tokens.shape, generator=draw) < 0.1, noise, tokens)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of a micro-batch. Raises RuntimeError where the benchmark has asked for it."""
    if _asked:
        _asked.clear()
        raise RuntimeError("the benchmark asked for an exception")
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    time.sleep(DEVICE_SECONDS)
    return loss


class Notes:
    """Notes for the benchmark: a JSON object a line, each written at once, in a file of this process's own.

    {"what": "start", node, pid, rank}; {"what": "micro", iteration, index} when a micro-batch was computed; {"what":
    "step", iteration, loss, world, micro} when the optimizer has stepped: micro is what this rank had in it. All have
    the time, in seconds since the epoch.
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
        said = loss if math.isfinite(loss) else str(loss)  # JSON has no word for it
        self.note("step", iteration=iteration, loss=said, world=world, rank=rank, micro=micro)


def compute(model: nn.Module, iteration: int, rank: int, size: int, notes: Notes) -> tuple[list[int], torch.Tensor]:
    """This rank's share of an iteration: (micro-batches, sum of their losses / MICRO_BATCHES). Micro-batch i is rank i
    mod size's.

    Its gradients are scaled for a reduce that divides by `size`; DistributedDataParallel does that in the last backward
    pass.
    """
    mine = list(range(rank, MICRO_BATCHES, size))
    total = torch.zeros(1)
    alone = model.no_sync if isinstance(model, nn.parallel.DistributedDataParallel) else contextlib.nullcontext
    for index in mine:
        with contextlib.nullcontext() if index == mine[-1] else alone():
            loss = loss_of(model, micro_batch(iteration, index)) / MICRO_BATCHES
            notes.micro(iteration, index)
            total += loss.detach()
            (loss * size).backward()
    return mine, total


# ------------------------------------------------------------ what is kept
def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that the training needs to go on."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def take(saved: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Go on from such a state."""
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


class Files:
    """Checkpoints in a file that all nodes see: rank 0 writes every CHECKPOINT_EVERY iterations, all read."""

    def __init__(self, path: Path = CHECKPOINT) -> None:
        self._path = path

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """The iteration that comes next."""
        if not self._path.is_file():
            return 0
        saved = torch.load(self._path, weights_only=True)
        take(saved, model, optimizer)
        return int(saved["iteration"])

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, following: int, rank: int) -> None:
        if rank == 0 and following % CHECKPOINT_EVERY == 0:
            new = self._path.with_suffix(f".{os.getpid()}")
            torch.save(state(model, optimizer) | {"iteration": following}, new)
            new.replace(self._path)
