"""Gradients of a plain module in flat buckets, in a world of one rank: the same as those of a loop of torch alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from unicron_detector.processes.rank_channel import micro_batch_of
from unicron_transition.generations.layout import Layout
from unicron_transition.iteration.accumulation import DeferredChanges, PeerLost, Sum, Work
from unicron_transition.iteration.gradient_copies import Where
from unicron_transition.iteration.ledger import Ledger, Proof
from unicron_transition.plain import flat_gradients
from unicron_transition.plain.flat_gradients import Bucket, buckets
from unicron_transition.plain.module import Plain
from unicron_transition.seams.dtensors import local
from unicron_transition.seams.table import UnsupportedLayout

TOTAL = 4
PROOF = Proof([1, 0, 1, 2], [3, 0, 0, 0], [1 / 3, -1e300, 0.0, 2.5], [7.0, 1e9 + 1, 0.0, 0.0])
pytestmark = pytest.mark.usefixtures("world")


class Model(nn.Module):
    """In this model `rare` has a gradient in micro-batch 2 only, `never` in none."""

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
    """Count the first i + 1 rows of micro-batch i."""
    return model(batch)[: batch[0] + 1].sum(), batch[0] + 1


def gradients(model: nn.Module, forward_step=mean, lost=lambda: False, where: Where = Where.CARD, **more):
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
        inside=list,
        begin_sum=lambda tensor: Sum(tensor, None, lambda: None),
        pending=DeferredChanges(),
        sequence=0,
        size=0,
    )
    work = dataclasses.replace(work, **more)
    made = Plain(model, torch.optim.SGD(model.parameters(), lr=0.1), None).gradients(forward_step, work)
    made.begin_iteration(ordered=True, total=TOTAL)
    return made


def finish(mine, ledger: Ledger) -> None:
    mine.compute(ledger)
    mine.reduce(ledger, PROOF)
    mine.proven(0.0)


def by_hand(forward_step=mean, indices=range(TOTAL)) -> list[torch.Tensor | None]:
    """The gradients of torch alone."""
    model = Model()
    for index in indices:
        loss = forward_step(fetch(0, index), model)
        (loss[0] / 10 if isinstance(loss, tuple) else loss / TOTAL).backward()
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
    """So is the clipping after it; a parameter without a gradient may still get one."""
    model = Model()
    mine, ledger = gradients(model), Ledger(0, TOTAL, [0, 1])
    finish(mine, ledger)
    assert model.rare.weight.grad is None
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    assert mine.restore()
    ledger.reassign([0, 1, 2, 3])
    finish(mine, ledger)
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
    """Compare before the reduce, when parameters without a gradient still have zeros."""
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
    ("forward_step", "error", "message"),
    [
        (counting, UnsupportedLayout, "can't heal seen: a buffer that a forward pass changes"),
        (zeroing, UnsupportedLayout, r"gradient of layer\.weight was replaced"),
        (lambda batch, model: model(batch), TypeError, r"returned a tensor of shape \[5, 3\]"),
        (lambda batch, model: None, TypeError, "returned NoneType"),
        (mixed, TypeError, "the same of them for every micro-batch"),
    ],
)
def test_what_would_be_trained_wrongly_is_one_line(forward_step, error, message):
    with pytest.raises(error, match=message) as raised:
        gradients(Model(), forward_step).compute(Ledger(0, TOTAL, [0, 1]))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.set_requires_gradient_sync(False),
        lambda model: model.set_reshard_after_backward(False),
        lambda model: model.set_gradient_divide_factor(2.0),
    ],
)
def test_settings_by_which_sharded_gradients_would_be_in_no_sum_do_nothing(call):
    """Whether a script changes them before the session or in a forward pass."""
    sums = []
    for calls in (False, True):
        torch.manual_seed(1)
        model = fully_shard(Model(), mesh=DeviceMesh("cpu", [0]))
        if calls:
            call(model)

        def calling(batch, whole, calls=calls):
            if calls:
                call(whole)
            return mean(batch, whole)

        gradients(model, calling).compute(Ledger(0, TOTAL, [0, 1]))
        sums.append([None if each.grad is None else local(each.grad).clone() for each in model.parameters()])
    for one, other in zip(*sums, strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_tensor_ranks_that_built_what_they_share_with_different_seeds_are_refused(seeds):
    """torch would send the values of the first one, which is not there when a rank builds its model."""
    told = []
    for place, seed in enumerate(seeds):
        model = Model()
        model.layer.weight.data.fill_(seed)
        mine = gradients(model, place=place, layout=Layout(tensor=2))
        mine.compute(ledger := Ledger(0, TOTAL, [1]))
        told.append(mine.parts(ledger))
    if seeds[0] == seeds[1]:
        return mine.take_parts(ledger, list(map(max, *told)))
    with pytest.raises(UnsupportedLayout, match=r"the same seed .* \(torch\.manual_seed\)"):
        mine.take_parts(ledger, list(map(max, *told)))


def test_lanes_that_reach_different_parameters_are_refused():
    """`fully_shard` would add gradients of different parameters."""
    told = []
    for lane in range(2):
        mine = gradients(Model(), place=lane, layout=Layout(shard=2))
        mine.compute(ledger := Ledger(0, TOTAL, [1, 2]))
        told.append(mine.parts(ledger))
    with pytest.raises(UnsupportedLayout, match="reach different parameters"):
        mine.take_parts(ledger, list(map(max, *told)))


def test_buckets_are_of_one_kind_and_not_too_large():
    shapes = {"a": (10,), "b": (10,), "c": (30,), "d": (5,)}
    wide = [nn.Parameter(torch.rand(shape)) for shape in shapes.values()]
    half = [nn.Parameter(torch.rand(4, dtype=torch.bfloat16))]
    made = buckets([*wide[:2], *half, *wide[2:]], size=80)
    assert [[each.numel() for each in bucket.parameters] for bucket in made] == [[4], [5], [30], [10, 10]]
    assert [bucket.flat.dtype for bucket in made] == [torch.bfloat16, *[torch.float32] * 3]


class Deep(nn.Module):
    """Three layers; the first one may be inside a checkpoint."""

    def __init__(self, reentrant: bool = False):
        super().__init__()
        torch.manual_seed(5)
        self.layers, self._reentrant = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), reentrant

    def forward(self, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        values = batch[1].requires_grad_()
        first, *others = self.layers
        values = checkpoint(first, values, use_reentrant=True) if self._reentrant else first(values)
        for layer in others:
            values = layer(values)
        return values.square()


def in_buckets(monkeypatch, model: nn.Module, begun: list[tuple[int, bool]]):
    """Return its gradients, one layer in each bucket. begun: the bucket of each reduce, and whether the pass still went
    on."""
    monkeypatch.setattr(flat_gradients, "BUCKET_BYTES", 48)
    mine = gradients(model)

    def begin_sum(tensor: torch.Tensor) -> Sum:
        number = next(number for number, each in enumerate(mine._buckets) if each.flat is tensor)
        begun.append((number, bool(mine._missing)))
        return Sum(tensor, None, lambda: None)

    mine._work = dataclasses.replace(mine._work, begin_sum=begin_sum)
    return mine


def one_iteration(mine) -> None:
    mine.begin_iteration(ordered=False, total=TOTAL)
    finish(mine, Ledger(0, TOTAL, list(range(TOTAL))))


def test_buckets_are_reduced_beside_the_last_backward_pass_in_their_order_from_the_second_iteration_on(monkeypatch):
    begun: list[tuple[int, bool]] = []
    model = Deep()
    mine = in_buckets(monkeypatch, model, begun)
    one_iteration(mine)
    assert begun == [(0, False), (1, False), (2, False)]
    begun.clear()
    one_iteration(mine)
    assert begun == [(0, True), (1, True), (2, False)]
    alone = Deep()
    for index in range(TOTAL):
        (mean(fetch(0, index), alone) / TOTAL).backward()
    assert same(model, [each.grad for each in alone.parameters()])


def test_where_no_reduce_can_begin_early_nothing_is_called_for_each_gradient(monkeypatch):
    """Defect: a call for each took 7 % of a small model's backward passes."""
    model = Deep()
    one = gradients(model)
    assert len(one._buckets) == 1 and not any(each._post_accumulate_grad_hooks for each in model.parameters())
    in_buckets(monkeypatch, model, [])
    assert all(each._post_accumulate_grad_hooks for each in model.parameters())


def test_what_a_backward_pass_inside_another_makes_waits_for_its_end(monkeypatch):
    begun: list[tuple[int, bool]] = []
    model = Deep(reentrant=True)
    mine = in_buckets(monkeypatch, model, begun)
    for _ in range(2):
        begun.clear()
        one_iteration(mine)
    assert begun == [(0, True), (1, True), (2, False)] and mine._nested == {2}


def test_a_gradient_that_comes_after_its_reduce_has_begun_is_no_silent_mistake(monkeypatch):
    class Twice(Deep):
        """In one micro-batch of the second iteration a layer is used inside a checkpoint, too."""

        again = False

        def forward(self, batch):
            if self.again and batch[0] == TOTAL - 1:
                inner = checkpoint(self.layers[2], batch[1].requires_grad_(), use_reentrant=True)
                return self._rest(inner)
            return super().forward(batch)

        def _rest(self, values):
            for layer in self.layers:
                values = layer(values)
            return values.square()

    model = Twice()
    mine = in_buckets(monkeypatch, model, [])
    one_iteration(mine)
    model.again = True
    with pytest.raises(UnsupportedLayout, match="use_reentrant=False"):
        one_iteration(mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_the_sum_of_proofs_is_exact_in_every_dtype(dtype):
    """Only one rank has each loss; counts of several ranks add up, and a wrong one shows."""
    ranks = [Bucket([nn.Parameter(torch.zeros(2, dtype=dtype))], TOTAL) for _ in range(300)]
    total = ranks[0]
    for number, bucket in enumerate(ranks):
        mine = [[row[index] if index == number else 0 for index in range(TOTAL)] for row in PROOF[2:]]
        counts = [int(index == number or (index, number) == (2, 7)) for index in range(TOTAL)]
        bucket.put(Proof(counts, [1, 0, 0, 0], *mine))
    for bucket in ranks[1:]:
        total.flat += bucket.flat
    counts, wishes, *numbers = total.proven()
    assert counts == [1, 1, 2, 1] and wishes[0] > 0
    assert numbers == [*PROOF[2:]]


def test_an_error_names_the_micro_batch_in_which_it_came():
    def fails(batch, model):
        if len(done) == 1:
            raise FloatingPointError("loss is nan")
        done.append(batch)
        return mean(batch, model)

    done: list = []
    ledger = Ledger(7, TOTAL, [0, 2])
    with pytest.raises(FloatingPointError) as caught:
        gradients(Model(), fails).compute(ledger)
    assert micro_batch_of(caught.value) == (7, 2)
    assert caught.value.__notes__ == ["in micro-batch 2 of iteration 7"]
    wrapped = RuntimeError("step")
    wrapped.__cause__ = caught.value
    assert micro_batch_of(wrapped) == (7, 2) and micro_batch_of(ValueError()) == (None, None)


def test_a_peers_loss_names_no_micro_batch():
    with pytest.raises(PeerLost) as caught:
        gradients(Model(), lost=lambda: True).compute(Ledger(0, TOTAL, [0]))
    assert micro_batch_of(caught.value) == (None, None)
