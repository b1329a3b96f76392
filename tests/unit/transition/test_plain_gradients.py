"""Gradients of a plain module in flat buckets, in a world of one rank: the same as those of a loop of torch alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from transition.accumulation import PeerLost, Sum, Work
from transition.groups import UnsupportedLayout
from transition.layout import Layout
from transition.ledger import Ledger
from transition.pending import Pending
from transition.plain import Plain
from transition.plain_gradients import buckets
from transition.snapshots import Where

TOTAL = 4
PROOF = torch.tensor([[1, 0, 1, 2], [3, 0, 0, 0], [1 / 3, -1e300, 0, 2.5], [7, 1e9 + 1, 0, 0]], dtype=torch.float64)
pytestmark = pytest.mark.usefixtures("world")


class Model(nn.Module):
    """`rare` has a gradient in micro-batch 2 only, `never` in none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.rare, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(1))
        self.cache = None

    def forward(self, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        index, values = batch
        values = self.layer(values)
        return (self.rare(values) if index == 2 else values).square()


def fetch(iteration: int, index: int) -> tuple[int, torch.Tensor]:
    return index, torch.rand(5, 3, generator=torch.Generator().manual_seed(10 * iteration + index))


def mean(batch, model) -> torch.Tensor:
    return model(batch).mean()


def per_token(batch, model) -> tuple[torch.Tensor, int]:
    """Of micro-batch i the first i + 1 rows count."""
    return model(batch)[: batch[0] + 1].sum(), batch[0] + 1


def gradients(model: nn.Module, forward_step=mean, lost=lambda: False, where: Where = Where.CARD):
    work = Work(
        fetch=fetch,
        total=TOTAL,
        lost=lost,
        over=lost,
        layout=Layout(),
        place=0,
        seed=0,
        sharded=False,
        healed=True,
        where=where,
        begin_sum=lambda tensor: Sum(tensor, None, lambda: None),
        pending=Pending(),
        sequence=0,
        size=0,
    )
    made = Plain(model, torch.optim.SGD(model.parameters(), lr=0.1), None).gradients(forward_step, work)
    made.begin(ordered=True)
    return made


def by_hand(forward_step=mean, indices=range(TOTAL)) -> list[torch.Tensor | None]:
    """What torch alone makes of it."""
    model = Model()
    for index in indices:
        told = forward_step(fetch(0, index), model)
        (told[0] / 10 if isinstance(told, tuple) else told / TOTAL).backward()
    return [parameter.grad for parameter in model.parameters()]


def same(model: nn.Module, wanted: list[torch.Tensor | None]) -> bool:
    found = [parameter.grad for parameter in model.parameters()]
    return all(
        mine is its is None
        or (mine is not None and its is not None and torch.allclose(mine, its, rtol=1e-6, atol=1e-9))
        for mine, its in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("forward_step", [mean, per_token])
def test_they_are_those_of_a_loop_of_torch_alone(forward_step):
    model = Model()
    mine, ledger = gradients(model, forward_step), Ledger(0, TOTAL, list(range(TOTAL)))
    mine.compute(ledger)
    mine.reduce(ledger, PROOF)
    tokens = float(sum(ledger.tokens[index] or 0 for index in ledger.done))
    assert mine.proven(tokens) == (10.0 if forward_step is per_token else TOTAL)
    assert same(model, by_hand(forward_step)) and model.never.weight.grad is None
    assert mine.seconds["forward"] > 0 and mine.seconds["backward"] > 0


def test_a_reduce_that_is_undone_goes_on_with_what_was_there():
    """Clipping and all that comes after it included; a parameter without a gradient may get one yet."""
    model = Model()
    mine, ledger = gradients(model), Ledger(0, TOTAL, [0, 1])
    mine.compute(ledger)
    mine.reduce(ledger, PROOF)
    mine.proven(0.0)
    assert model.rare.weight.grad is None
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    assert mine.restore()
    ledger.reassign([0, 1, 2, 3])
    mine.compute(ledger)
    mine.reduce(ledger, PROOF)
    mine.proven(0.0)
    assert same(model, by_hand())


def test_without_copies_the_micro_batches_are_computed_again():
    model = Model()
    mine, ledger = gradients(model, where=Where.NONE), Ledger(0, TOTAL, [0, 1])
    mine.compute(ledger)
    mine.reduce(ledger, PROOF)
    assert not mine.undoable and not mine.restore() and mine.snapshot_bytes == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_a_loss_stops_it_between_two_micro_batches():
    model, ledger = Model(), Ledger(0, TOTAL, [0, 1, 2])
    mine = gradients(model, lost=lambda: len(ledger.done) == 2)
    with pytest.raises(PeerLost):
        mine.compute(ledger)
    assert ledger.done == [0, 1] and mine.intact
    assert same_sum(model, by_hand(indices=[0, 1]))


def same_sum(model: nn.Module, wanted: list[torch.Tensor | None]) -> bool:
    """Before the reduce: nobody knows yet who has a gradient."""
    zeros = [torch.zeros_like(parameter) for parameter in model.parameters()]
    return same(model, [zero if its is None else its for zero, its in zip(zeros, wanted, strict=True)])


def counting(batch, model):
    model.seen += 1
    return mean(batch, model)


def zeroing(batch, model):
    model.zero_grad()
    return mean(batch, model)


def mixed(batch, model):
    return mean(batch, model) if batch[0] else per_token(batch, model)


@pytest.mark.parametrize(
    ("forward_step", "error", "says"),
    [
        (counting, UnsupportedLayout, "can't heal seen: a buffer that a forward pass changes"),
        (zeroing, UnsupportedLayout, r"gradient of layer\.weight was replaced"),
        (lambda batch, model: model(batch), TypeError, r"returned a tensor of shape \[5, 3\]"),
        (lambda batch, model: None, TypeError, "returned NoneType"),
        (mixed, TypeError, "the same of them for every micro-batch"),
    ],
)
def test_what_would_be_trained_wrongly_is_one_line(forward_step, error, says):
    with pytest.raises(error, match=says) as raised:
        gradients(Model(), forward_step).compute(Ledger(0, TOTAL, [0, 1]))
    assert "\n" not in str(raised.value)


def test_buckets_are_of_one_kind_and_not_too_large():
    shapes = {"a": (10,), "b": (10,), "c": (30,), "d": (5,)}
    wide = [nn.Parameter(torch.rand(shape)) for shape in shapes.values()]
    half = [nn.Parameter(torch.rand(4, dtype=torch.bfloat16))]
    made = buckets([*wide[:2], *half, *wide[2:]], size=80)
    assert [[each.numel() for each in bucket.parameters] for bucket in made] == [[4], [5], [30], [10, 10]]
    assert [bucket.flat.dtype for bucket in made] == [torch.bfloat16, *[torch.float32] * 3]
