"""A small model of torch alone under a Session, with faults at exact points, in a process in which Megatron cannot be
imported: what the tests of plain modules run as a training script.

It has what users' models have: tied, frozen and unused parameters, some that few micro-batches use, dropout, buffers of
booleans and a cache that grows in the forward pass, two parameter groups.

Environment, beside that of `fault_points`: TINY_OPTIMIZER one of `OPTIMIZERS`; TINY_TOKENS=1 for a loss per token;
TINY_DROPOUT; TINY_CLIP the largest norm; TINY_BUCKET bytes of a bucket of gradients; TINY_SCALER=1 for a GradScaler;
TINY_ALONE=1: a loop of torch alone, without a session; TINY_SILENT, TINY_SAVE, TINY_CHECKPOINTS,
TINY_CHECKPOINT_EVERY as for `tiny_gpt`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:  # of the process that was forked
    del sys.modules[name]
sys.modules["megatron"] = None  # type: ignore[assignment]  # whoever imports it fails

from tests.support.fault_points import (  # noqa: E402
    CHECKPOINTS,
    EVERY,
    ITERATIONS,
    MICRO_BATCHES,
    OUT,
    SAVE,
    SLOT,
    around_generations,
    around_reduces,
    fetching,
    now,
    point,
    save,
    silent_reduces,
    train,
)

TOKENS = os.environ.get("TINY_TOKENS") == "1"
DROPOUT = float(os.environ.get("TINY_DROPOUT", "0"))
CLIP = float(os.environ["TINY_CLIP"]) if "TINY_CLIP" in os.environ else None
SEQUENCE, VOCABULARY, SIZE, WIDTH = 16, 64, 2, 32

point("import")
import torch  # noqa: E402

torch.set_num_threads(1)
from torch.nn import functional  # noqa: E402

import unicron  # noqa: E402
from unicron_transition.plain import flat_gradients  # noqa: E402

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=5e-3),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=5e-3, fused=True),
    "tensor-lr": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(5e-3), foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=5e-3),
}


class Model(torch.nn.Module):
    """Tokens to logits."""

    def __init__(self):
        super().__init__()
        # first, so that their bucket is the last: what comes before it is reduced beside the backward pass
        self.sometimes, self.never = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.position = torch.nn.Embedding(SEQUENCE, WIDTH).requires_grad_(False)
        self.norm, self.layer = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.temperature = torch.nn.Parameter(torch.tensor(1.0))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(SEQUENCE, SEQUENCE).tril() > 0)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.dropout = torch.nn.Dropout(DROPOUT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if len(self.cache) < tokens.shape[1]:
            self.cache = torch.arange(tokens.shape[1])
        states = self.norm(self.embedding(tokens) + self.position(self.cache))
        weights = self.mask / self.mask.sum(dim=1, keepdim=True)
        states = states + self.dropout(torch.tanh(self.layer(weights @ states)))
        if tokens[0, 0] % 2:
            states = states + self.sometimes(states)
        return self.head(states) * self.temperature


def build():
    """The model, its optimizer and its schedule."""
    torch.manual_seed(1234)
    model = Model()
    names = dict(model.named_parameters())
    flat = [parameter for parameter in names.values() if parameter.dim() < 2]
    wide = [parameter for parameter in names.values() if parameter.dim() > 1]
    groups = [{"params": wide, "weight_decay": 0.01}, {"params": flat, "weight_decay": 0.0}]
    optimizer = OPTIMIZERS[os.environ.get("TINY_OPTIMIZER", "adamw")](groups)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5)


def fetch(iteration: int, index: int) -> torch.Tensor:
    """Tokens of one micro-batch, shape (SIZE, SEQUENCE + 1)."""
    fetching(iteration, index)
    return data(iteration, index)


def data(iteration: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000003 * iteration + index)
    return torch.randint(0, VOCABULARY, (SIZE, SEQUENCE + 1), generator=generator)


def forward_step(tokens: torch.Tensor, model: torch.nn.Module):
    """The mean loss, or the sum over as many tokens as the micro-batch's first one says."""
    logits = model(tokens[:, :-1])
    if logits.requires_grad:
        logits.register_hook(lambda _: point("backward"))
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    if not TOKENS:
        return losses.mean()
    count = 1 + tokens[0, 0] % (SEQUENCE - 1)
    return losses.view(SIZE, SEQUENCE)[:, :count].sum(), SIZE * count


def saving(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What each step gets and makes is saved; it is a point, too."""

    def before(*_) -> None:
        point("step")
        gradient.append(flat(each.grad for each in model.parameters() if each.grad is not None))

    def after(*_) -> None:
        saved = {"gradient": gradient.pop(), "parameters": flat(model.parameters())}
        if now["iteration"] < SAVE:
            save(saved, OUT / f"step.{now['iteration']}.{SLOT}")

    def flat(tensors) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1).clone() for tensor in tensors])

    gradient: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def alone(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule) -> None:
    """What a session's training is to be equal to: a loop as anybody writes it."""
    for iteration in range(ITERATIONS):
        told = [forward_step(fetch(iteration, index), model) for index in range(MICRO_BATCHES)]
        losses, tokens = zip(*told, strict=True) if TOKENS else (told, [1] * MICRO_BATCHES)
        loss = sum(losses) / sum(tokens)
        optimizer.zero_grad()
        loss.backward()
        if CLIP is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        with (OUT / f"losses.{SLOT}").open("a") as file:
            file.write(json.dumps({"iteration": iteration, "loss": float(loss)}) + "\n")


def main() -> None:
    """Train, and save each iteration's gradient, parameters and loss."""
    if os.environ.get("TINY_ALONE") == "1":
        parts = build()
        saving(*parts[:2])
        return alone(*parts)
    unicron.init_process_group("gloo")
    if os.environ.get("TINY_SILENT") == "1":
        silent_reduces()
    if "TINY_BUCKET" in os.environ:
        flat_gradients.BUCKET_BYTES = int(os.environ["TINY_BUCKET"])
    model, optimizer, schedule = build()
    saving(model, optimizer)
    around_reduces()
    around_generations()
    train(
        unicron.Session(
            model=model,
            optimizer=optimizer,
            scheduler=schedule,
            micro_batches=MICRO_BATCHES,
            forward_step=forward_step,
            fetch=fetch,
            train_iterations=ITERATIONS,
            checkpoints=unicron.Checkpoints(CHECKPOINTS, interval=EVERY) if CHECKPOINTS else None,
            seed=1234,
            clip_grad=CLIP,
            scaler=torch.amp.GradScaler("cpu", growth_interval=2) if os.environ.get("TINY_SCALER") == "1" else None,
        ),
        data=data,
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
