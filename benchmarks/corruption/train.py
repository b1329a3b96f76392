"""Train a small module in episodes that are all alike, for the campaign of silent faults.

At the end of an episode the model and the optimizer are as at its beginning, and the data begins again. So each
iteration has a loss that it must have, whatever struck in an earlier episode. When the job goes back, whoever was
defective computes rightly from then on, as if another node stood in for it.

Environment: CORRUPTION_OUT (a folder), CORRUPTION_EPISODE (iterations), CORRUPTION_MICRO_BATCHES, UNICRON_SLOT. Each
rank notes in lines.SLOT every step, and each silent fault that strikes it with the iteration.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unicron
from unicron_detector.chaos.inject import injector
from unicron_transition.iteration import flips

OUT, EPISODE = Path(os.environ["CORRUPTION_OUT"]), int(os.environ["CORRUPTION_EPISODE"])
MICRO_BATCHES, SLOT = int(os.environ["CORRUPTION_MICRO_BATCHES"]), os.environ["UNICRON_SLOT"]
WORDS, LENGTH, WIDTH, CHECKPOINT_EVERY = 32, 8, 16, 100
FOREVER = 10_000_000
LOST = "all-lost"  # in OUT: all ranks are to be killed when a copy in memory is hit

at = -1  # the iteration that fetch was asked for last


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        normal = self.norm(values)
        values = values + self.attention(normal, normal, normal, need_weights=False)[0]
        return values + self.narrow(nn.functional.gelu(self.wide(values)))


def fetch(iteration: int, index: int) -> torch.Tensor:
    """Return a micro-batch of sequences that count on."""
    global at
    if iteration < at:
        injector._flips.clear()
    at = iteration
    draw = torch.Generator().manual_seed(1000 * (iteration % EPISODE) + index)
    first = torch.randint(WORDS, (4, 1), generator=draw)
    step = torch.randint(1, 4, (4, 1), generator=draw)
    return (first + step * torch.arange(LENGTH)) % WORDS


def forward_step(tokens: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Return the loss of the next token."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def begin_episodes_alike(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the model and the optimizer their first values again with the last step of each episode."""
    first = [each.detach().clone() for each in model.parameters()]

    def after_step(*_: Any) -> None:
        if (at + 1) % EPISODE == 0:
            with torch.no_grad():
                for each, value in zip(model.parameters(), first, strict=True):
                    each.copy_(value)
                for state in optimizer.state.values():
                    for value in state.values():
                        value.zero_()

    optimizer.register_step_post_hook(after_step)


def note(**line: Any) -> None:
    """Write a line of this rank."""
    with (OUT / f"lines.{SLOT}").open("a") as file:
        file.write(json.dumps({"at": time.time(), **line}) + "\n")


def note_strikes() -> None:
    """Note each silent fault when it strikes first, and let all ranks end if the campaign wants that."""
    told = vars(flips)["inform"]

    def tell(text: str) -> None:
        note(strike=text, during=at)
        told(text)
        if (OUT / LOST).exists() and ".image" in text:
            (OUT / LOST).unlink()
            for path in sorted(OUT.glob("pid.*"), key=lambda each: each.name == f"pid.{SLOT}"):
                os.kill(int(path.read_text()), signal.SIGKILL)

    vars(flips)["inform"] = tell


def main() -> None:
    """Train until the campaign ends the job."""
    unicron.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    begin_episodes_alike(model, optimizer)
    (OUT / f"pid.{SLOT}").write_text(str(os.getpid()))
    note_strikes()
    session = unicron.Session(
        model=model,
        optimizer=optimizer,
        micro_batches=MICRO_BATCHES,
        forward_step=forward_step,
        fetch=fetch,
        train_iterations=FOREVER,
        checkpoints=unicron.Checkpoints(str(OUT / "checkpoints"), interval=CHECKPOINT_EVERY, keep=3),
    )
    note(began=os.getpid())
    for step in session:
        norm = float(sum(each.detach().double().square().sum() for each in model.parameters()))
        note(iteration=step.iteration, loss=step.loss, norm=norm, generation=step.generation)


if __name__ == "__main__":
    main()
