"""A small model that `fully_shard` has sharded, under a Session, with faults at exact points: what the tests of sharded
modules run as a training script.

Environment, beside that of `fault_points`: TINY_SHARD ranks that share the parameters; TINY_TENSOR tensor ranks;
TINY_CONTEXT ranks that share each sequence, whose parameters are sharded over them, too;
TINY_TOKENS=1 for a loss per token; TINY_DROPOUT; TINY_CLIP the largest norm; TINY_BUCKET bytes of a bucket of
gradients; TINY_KIND words: "mixed" precision, "checkpoint" activations, "compile" blocks, "frozen" first block, "keep"
gathered parameters until the backward pass, "grouped" blocks, "adafactor" and "fused" optimizers;
TINY_ALONE=1: a loop of torch alone, of one process with whole parameters; TINY_CHECKPOINTS, TINY_CHECKPOINT_EVERY.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.fault_points import (
    CHECKPOINTS,
    EVERY,
    ITERATIONS,
    MICRO_BATCHES,
    OUT,
    SAVE,
    SLOT,
    around,
    around_generations,
    around_reduces,
    fetching,
    now,
    point,
    save,
    train,
)
from unicron_transition.generations.layout import parse_layout

SHARD, TENSOR = int(os.environ.get("TINY_SHARD", "2")), int(os.environ.get("TINY_TENSOR", "1"))
if "UNICRON_LAYOUT" in os.environ:  # the job has stated several
    TOLD = parse_layout(os.environ["UNICRON_LAYOUT"]).layout
    SHARD, TENSOR = TOLD.shard, TOLD.tensor
CONTEXT = int(os.environ.get("TINY_CONTEXT", "1"))
TOKENS = os.environ.get("TINY_TOKENS") == "1"
DROPOUT = float(os.environ.get("TINY_DROPOUT", "0"))
CLIP = float(os.environ["TINY_CLIP"]) if "TINY_CLIP" in os.environ else None
ALONE = os.environ.get("TINY_ALONE")
KIND = os.environ.get("TINY_KIND", "").split()
SEQUENCE, VOCABULARY, SIZE, WIDTH = 16, 64, 2, 32

point("import")
import torch  # noqa: E402

torch.set_num_threads(1)
from torch.distributed import _functional_collectives as funcol  # noqa: E402
from torch.distributed import fsdp  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import unicron  # noqa: E402
from unicron_transition.plain import flat_gradients  # noqa: E402
from unicron_transition.seams import dtensors  # noqa: E402


class Block(torch.nn.Module):
    """A layer with the two matrices that tensor parallelism cuts."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = torch.nn.Dropout(DROPOUT)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        wide = self.wide(self.norm(states))
        if wide.requires_grad:
            wide.register_hook(lambda _: point("backward"))
        return states + self.dropout(self.narrow(torch.tanh(wide)))


class Model(torch.nn.Module):
    """Tokens to logits, with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(SEQUENCE, SEQUENCE).tril())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embedding(tokens)
        weights = (self.mask / self.mask.sum(dim=1, keepdim=True)).to(states.dtype)
        if CONTEXT > 1 and ALONE is None:
            weights = own_part(weights, 0)
            states = funcol.all_gather_tensor_autograd(states, 1, (unicron.context_mesh(), 0))
        states = weights @ states
        for block in self.blocks:
            states = checkpoint(block, states, use_reentrant=False) if "checkpoint" in KIND else block(states)
        return self.head(states)


def build():
    """The model, whole; its optimizer and schedule are made once it is sharded."""
    torch.manual_seed(1234)
    model = Model()
    if "frozen" in KIND:
        model.blocks[0].requires_grad_(False)
    return model


def shard(model: Model) -> None:
    """As the guide says."""
    if TENSOR > 1:
        for block in model.blocks:
            plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            parallelize_module(block, unicron.tensor_mesh(), plan)
    more = {"reshard_after_forward": "keep" not in KIND}
    if "mixed" in KIND:
        more["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "compile" in KIND:
        for block in model.blocks:
            block.compile(backend="eager")
    for block in [list(model.blocks)] if "grouped" in KIND else model.blocks:
        fsdp.fully_shard(block, mesh=unicron.shard_mesh(), **more)
    fsdp.fully_shard(model, mesh=unicron.shard_mesh(), **more)


def part(name: str, whole: torch.Tensor, place: int) -> torch.Tensor:
    """What the rank at this place has of a whole tensor."""
    tensor, lane = place % TENSOR, place // TENSOR
    if TENSOR > 1 and "wide" in name:
        whole = whole.chunk(TENSOR)[tensor]
    elif TENSOR > 1 and "narrow" in name:
        whole = whole.chunk(TENSOR, dim=1)[tensor]
    return whole.chunk(SHARD * CONTEXT)[lane]


def optimizers(model: torch.nn.Module):
    trained = [each for each in model.parameters() if each.requires_grad]
    kind = torch.optim.Adafactor if "adafactor" in KIND else torch.optim.AdamW
    optimizer = kind(trained, lr=5e-3, **({"fused": True} if "fused" in KIND else {}))
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5)


def fetch(iteration: int, index: int) -> torch.Tensor:
    """Tokens of one micro-batch, shape (SIZE, SEQUENCE + 1)."""
    fetching(iteration, index)
    return data(iteration, index)


def data(iteration: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000003 * iteration + index)
    return torch.randint(0, VOCABULARY, (SIZE, SEQUENCE + 1), generator=generator)


def forward_step(tokens: torch.Tensor, model: torch.nn.Module):
    """The mean loss, or the sum over as many tokens as the micro-batch's first one says."""
    count = 1 + tokens[0, 0] % (SEQUENCE - 1)
    counts = torch.arange(SEQUENCE).expand(SIZE, -1) < count
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if CONTEXT > 1 and ALONE is None:
        inputs, targets, counts = (own_part(each, 1) for each in (inputs, targets, counts))
    logits = model(inputs).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses[counts.flatten()].sum(), counts.sum()) if TOKENS else losses.mean()


def own_part(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """What this rank has of a sequence."""
    return whole.chunk(CONTEXT, dim=dim)[unicron.context_mesh().get_local_rank()]


def saving(model: torch.nn.Module, optimizer: torch.optim.Optimizer, whole: bool = False) -> None:
    """What each step gets and makes is saved, by place if the parameters are whole; it is a point, too."""

    def before(*_) -> None:
        point("step")
        gradient.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
        gradient.append({name: dtensors.local(each).clone() for name, each in gradient.pop().items()})

    def after(*_) -> None:
        tensors = {"gradient": gradient.pop(), "parameters": dict(model.named_parameters())}
        if now["iteration"] < SAVE:
            for slot in range(SHARD * CONTEXT * TENSOR) if whole else (SLOT,):
                place = slot if whole else None
                saved = {key: flat(named, place) for key, named in tensors.items()}
                save(saved, OUT / f"step.{now['iteration']}.{slot}")

    def flat(named: dict, place: int | None) -> torch.Tensor:
        own = {name: dtensors.local(tensor).detach() for name, tensor in sorted(named.items())}
        parts = [tensor if place is None else part(name, tensor, place) for name, tensor in own.items()]
        return torch.cat([tensor.reshape(-1).clone() for tensor in parts])

    gradient: list = []
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def alone(model: torch.nn.Module) -> None:
    """What a session's training is to be equal to: a loop as anybody writes it."""
    optimizer, schedule = optimizers(model)
    saving(model, optimizer, whole=True)
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


def around_collectives() -> None:
    """A point before each collective of `fully_shard` in the replica: "gather" and "scatter"."""
    import torch.distributed as dist

    new = hasattr(dist, "all_gather_single")  # since torch 2.13
    around(dist, "all_gather_single" if new else "all_gather_into_tensor", "gather")
    around(dist, "reduce_scatter_single" if new else "reduce_scatter_tensor", "scatter")


def main() -> None:
    """Train, and save each iteration's gradient, parameters and loss."""
    if ALONE is not None:
        return alone(build())
    unicron.init_process_group("gloo", layout=unicron.Layout(shard=SHARD, tensor=TENSOR, context=CONTEXT))
    if "TINY_BUCKET" in os.environ:
        flat_gradients.BUCKET_BYTES = int(os.environ["TINY_BUCKET"])
    model = build()
    shard(model)
    optimizer, schedule = optimizers(model)
    saving(model, optimizer)
    around_collectives()
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
        ),
        data=data,
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
