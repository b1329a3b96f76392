"""Train a small module that is chosen by the environment, with nothing wrong.

Environment: HEALTHY_MODEL, HEALTHY_OPTIMIZER, HEALTHY_DROPOUT, HEALTHY_MICRO_BATCHES, HEALTHY_TOKENS=1 for a loss per
token, HEALTHY_ITERATIONS.
"""

from __future__ import annotations

import os

import torch
from torch import nn

import unicron

WIDTH, LENGTH, KINDS = 16, 8, 24
DROPOUT = float(os.environ["HEALTHY_DROPOUT"])


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.lstm(values)[0]


class Convolution(nn.Module):
    """A convolution along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolution(values.transpose(1, 2))).transpose(1, 2)


def attention() -> nn.Module:
    """Return a layer of a transformer."""
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, DROPOUT, batch_first=True)


def perceptron() -> nn.Module:
    """Return linear layers."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


MODELS = {"attention": attention, "convolution": Convolution, "perceptron": perceptron, "recurrent": Recurrent}
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=2e-3, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
}


def fetch(iteration: int, index: int) -> torch.Tensor:
    """Return sequences of numbers that count on."""
    draw = torch.Generator().manual_seed(1000 * iteration + index)
    first = torch.randint(KINDS, (4, 1), generator=draw)
    return (first + torch.randint(1, 4, (4, 1), generator=draw) * torch.arange(LENGTH)) % KINDS


def forward_step(tokens: torch.Tensor, model: nn.Module) -> object:
    """Return the mean loss of the next number, or the sum over those that count and their number."""
    logits, wanted = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    if os.environ["HEALTHY_TOKENS"] != "1":
        return nn.functional.cross_entropy(logits, wanted)
    counts = wanted % 3 != 0
    losses = nn.functional.cross_entropy(logits, wanted, reduction="none")
    return losses[counts].sum(), int(counts.sum())


def main() -> None:
    """Train to the end."""
    unicron.init_process_group("gloo")
    torch.manual_seed(1)
    middle = MODELS[os.environ["HEALTHY_MODEL"]]()
    model = nn.Sequential(nn.Embedding(KINDS, WIDTH), middle, nn.Dropout(DROPOUT), nn.Linear(WIDTH, KINDS))
    for _ in unicron.Session(
        model=model,
        optimizer=OPTIMIZERS[os.environ["HEALTHY_OPTIMIZER"]](model.parameters()),
        micro_batches=int(os.environ["HEALTHY_MICRO_BATCHES"]),
        forward_step=forward_step,
        fetch=fetch,
        train_iterations=int(os.environ["HEALTHY_ITERATIONS"]),
        seed=7,
    ):
        pass


if __name__ == "__main__":
    main()
