"""A small model whose ranks share each sequence, under a Session, with faults at exact points.

Environment, beside that of `fault_points`: TINY_CONTEXT ranks that share a sequence, 1 for a loop of one rank;
TINY_SHARD.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.fault_points import (
    ITERATIONS,
    MICRO_BATCHES,
    around_generations,
    around_reduces,
    fetching,
    point,
    train,
)

CONTEXT, SHARD = int(os.environ["TINY_CONTEXT"]), int(os.environ.get("TINY_SHARD", "1"))
SEQUENCE, VOCABULARY, SIZE, WIDTH, HEADS = 32, 64, 2, 32, 4

point("import")
import torch  # noqa: E402

torch.set_num_threads(1)
from torch.distributed._functional_collectives import all_gather_tensor_autograd  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn import functional  # noqa: E402

import unicron  # noqa: E402


def own_part() -> slice:
    """The positions of the sequence that this rank computes."""
    length = SEQUENCE // CONTEXT
    first = unicron.context_mesh().get_local_rank() * length if CONTEXT > 1 else 0
    return slice(first, first + length)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's queries: keys and values of the whole sequence are gathered, and in the backward
    pass their gradients are added."""
    if CONTEXT > 1:
        mesh = unicron.context_mesh()
        keys, values = (all_gather_tensor_autograd(each.contiguous(), 2, mesh) for each in (keys, values))
    own = own_part()
    mask = torch.arange(own.start, own.stop)[:, None] >= torch.arange(SEQUENCE)
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


class Block(torch.nn.Module):
    """Attention with a way around it."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        parts = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.inward(states).chunk(3, -1)]
        parts[0].register_hook(lambda _: point("backward"))
        return states + self.outward(attend(*parts).transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    """Tokens to logits."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        own = own_part()
        states = self.embedding(tokens) + self.positions(torch.arange(own.start, own.stop))
        for block in self.blocks:
            states = block(states)
        return self.head(states)


def data(iteration: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000003 * iteration + index)
    return torch.randint(0, VOCABULARY, (SIZE, SEQUENCE + 1), generator=generator)


def fetch(iteration: int, index: int) -> torch.Tensor:
    """A micro-batch's whole sequences: the ranks that share them fetch the same one."""
    fetching(iteration, index)
    return data(iteration, index)


def forward_step(tokens: torch.Tensor, model: torch.nn.Module):
    """(sum of the losses, tokens) of this rank's part."""
    own = own_part()
    logits, wanted = model(tokens[:, :-1][:, own]), tokens[:, 1:][:, own]
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"), wanted.numel()


def main() -> None:
    """Train."""
    unicron.init_process_group("gloo", layout=unicron.Layout(shard=SHARD, context=CONTEXT))
    torch.manual_seed(1234)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=unicron.shard_mesh())
    fully_shard(model, mesh=unicron.shard_mesh())
    around_reduces()
    around_generations()
    train(
        unicron.Session(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=5e-3),
            micro_batches=MICRO_BATCHES,
            forward_step=forward_step,
            fetch=fetch,
            train_iterations=ITERATIONS,
            seed=1234,
            clip_grad=1.0,
        ),
        data=data,
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    main()
