"""Auxiliary losses have the weight of the loss, and biases of experts follow each micro-batch once, even after
failures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unicron_transition.iteration.accumulation import DeferredChanges, hold_scalers
from unicron_transition.megatron import auxiliary
from unicron_transition.megatron.auxiliary import Auxiliary

TOTAL = 8


class Router(torch.nn.Module):
    """The used part of Megatron's router, for two experts."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.register_buffer("local_tokens_per_expert", torch.zeros(2, dtype=dtype), persistent=False)
        self.register_buffer("expert_bias", torch.zeros(2, dtype=dtype))

    def route(self, first: int, second: int) -> None:
        self.local_tokens_per_expert += torch.tensor([first, second])


class Scaler:
    """The scale of Megatron's MoEAuxLossAutoScaler."""

    scale = torch.ones(1)

    @classmethod
    def set_loss_scale(cls, scale: torch.Tensor) -> None:
        cls.scale = scale


@pytest.fixture
def chunks():
    return [SimpleNamespace(module=Router()) for _ in range(2)]


def made(chunks, pending=None, monkeypatch=None, **settings) -> Auxiliary:
    config = SimpleNamespace(grad_scale_func=None, calculate_per_token_loss=False, **settings)
    if monkeypatch is not None:
        monkeypatch.setattr(auxiliary, "import_module", lambda name: SimpleNamespace(MoEAuxLossAutoScaler=Scaler))
        config.num_moe_experts = 2
    return Auxiliary(chunks, config, TOTAL, pending or DeferredChanges())


def counts(chunks) -> list[list[float]]:
    return [chunk.module.local_tokens_per_expert.tolist() for chunk in chunks]


def weighed(made_of: Auxiliary, chunk: int, real: bool) -> torch.Tensor:
    output = torch.ones(1, requires_grad=True) * 2
    made_of.weigh(output, chunk, real)
    return output


# ------------------------------------------------------------ auxiliary losses
@pytest.mark.parametrize(("per_token", "weight"), [(False, 1 / TOTAL), (True, 1.0)])
def test_each_backward_pass_has_the_weight_of_its_own_micro_batch(chunks, monkeypatch, per_token, weight):
    """Other forward passes come between, and Megatron sets the scale of its call in each of them."""
    made_of = made(chunks, monkeypatch=monkeypatch)
    made_of._config.calculate_per_token_loss = per_token
    outputs = []
    for real in (True, False):
        outputs.append(weighed(made_of, 0, real))
        Scaler.set_loss_scale(torch.tensor([1 / 3]))
    outputs[0].backward()
    assert float(Scaler.scale) == weight
    outputs[1].backward()
    assert float(Scaler.scale) == 0.0, "computed once more, to fill up the schedule"


def test_the_loss_scale_of_fp16_is_in_it(chunks, monkeypatch):
    made_of = made(chunks, monkeypatch=monkeypatch)
    made_of._config.grad_scale_func = lambda loss: loss * 1024
    weighed(made_of, 0, True).backward()
    assert float(Scaler.scale) == 1024 / TOTAL


# ------------------------------------------------------------ counts and biases
def test_what_is_computed_once_more_or_fails_counts_nothing(chunks):
    made_of = made(chunks)
    with made_of.forward(0, True):
        chunks[0].module.route(3, 1)
    with made_of.forward(0, False):
        chunks[0].module.route(30, 10)
    with pytest.raises(RuntimeError), made_of.forward(0, True):
        chunks[0].module.route(5, 5)
        raise RuntimeError("Connection closed by peer")
    assert counts(chunks) == [[3, 1], [0, 0]]
    made_of.drop()
    assert counts(chunks) == [[0, 0], [0, 0]]


def test_recomputed_layers_count_in_the_backward_pass(chunks, monkeypatch):
    made_of = made(chunks, monkeypatch=monkeypatch)
    for real, routed in ((True, (3, 1)), (False, (30, 10))):
        weighed(made_of, 1, real).backward()
        chunks[1].module.route(*routed)
    made_of.end_schedule()
    assert counts(chunks) == [[0, 0], [3, 1]]


def finalize(chunks) -> None:
    """Make new biases and zero the counts, like Megatron's finalize_model_grads."""
    for chunk in chunks:
        router = chunk.module
        router.local_tokens_per_expert *= 4  # the sum over all ranks
        router.expert_bias += torch.sign(router.local_tokens_per_expert.mean() - router.local_tokens_per_expert)
        router.local_tokens_per_expert.zero_()


def test_biases_change_at_the_commit_and_not_before(chunks):
    pending = DeferredChanges()
    made_of = made(chunks, pending)
    chunks[0].module.route(3, 1)
    for again in (False, True):
        with made_of.reducing():
            finalize(chunks)
        assert auxiliary.biases(chunks) == [[0, 0], [0, 0]]
        if not again:
            made_of.restore()
            pending.forget()
            assert counts(chunks) == [[3, 1], [0, 0]], "this rank's own"
    pending.apply()
    assert auxiliary.biases(chunks) == [[-1, 1], [0, 0]]
    pending.apply()
    assert auxiliary.biases(chunks) == [[-1, 1], [0, 0]], "once"


def test_a_reduce_that_fails_half_way_changes_no_bias(chunks):
    pending = DeferredChanges()
    made_of = made(chunks, pending)
    chunks[0].module.route(3, 1)
    with pytest.raises(RuntimeError), made_of.reducing():
        finalize(chunks)
        raise RuntimeError("Connection closed by peer")  # in the sum of the tokens, which comes after
    made_of.restore()
    pending.apply()
    assert auxiliary.biases(chunks) == [[0, 0], [0, 0]] and counts(chunks) == [[3, 1], [0, 0]]


def test_counts_and_biases_are_exact_in_half_precision_too():
    chunks = [SimpleNamespace(module=Router(torch.bfloat16))]
    made(chunks)
    for _ in range(3):
        chunks[0].module.route(257, 1)
    assert counts(chunks) == [[771, 3]]
    auxiliary.adopt_biases(chunks, [[0.001, -0.001]])
    assert chunks[0].module.expert_bias.tolist() == torch.tensor([0.001, -0.001]).tolist()
    assert torch.tensor(auxiliary.biases(chunks)).equal(torch.tensor([[0.001, -0.001]]))


# ------------------------------------------------------------ what is logged
@pytest.fixture
def logged(monkeypatch):
    """The sums of an auxiliary loss of two layers, which Megatron collects for its log."""
    values = torch.zeros(2)
    entries = {"z_loss": {"values": values}}
    monkeypatch.setattr(auxiliary.megatron_trackers, "_experts", lambda: entries)
    monkeypatch.setattr(auxiliary.megatron_trackers, "_predictions", dict)
    return values


def test_what_is_logged_of_a_micro_batch_is_dropped_with_its_gradient(chunks, logged):
    pending = DeferredChanges()
    made_of = made(chunks, pending)
    logged += 1  # the script has not logged the iteration before
    for again in (True, False):
        made_of.begin_iteration()
        made_of.drop()
        assert logged.tolist() == [1, 1]
        with made_of.forward(0, True):
            logged[0] += 3
        with made_of.forward(0, False):
            logged[1] += 30
        with pytest.raises(RuntimeError), made_of.forward(0, True):
            logged += 5
            raise RuntimeError("Connection closed by peer")
        assert logged.tolist() == [4, 1], "neither padding nor half a pass"
        with made_of.reducing():
            pass
        if again:  # it is computed once more, from the start
            pending.forget()
    pending.apply()
    made_of.begin_iteration()
    made_of.drop()
    assert logged.tolist() == [4, 1], "the iteration is over"


def test_padding_that_is_recomputed_in_the_backward_pass_is_not_logged(chunks, logged, monkeypatch):
    made_of = made(chunks, monkeypatch=monkeypatch)
    for real, chunk, loss in ((True, 0, 1), (False, 0, 30), (True, 1, 2), (False, 1, 30)):
        weighed(made_of, chunk, real).backward()
        logged[chunk] += loss
    made_of.end_schedule()
    assert logged.tolist() == [1, 2]


# ------------------------------------------------------------ the loss scale
def test_the_loss_scale_changes_at_the_commit_and_not_for_what_is_reduced_once_more():
    seen: list[bool] = []
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(grad_scaler=SimpleNamespace(update=seen.append))])
    pending = DeferredChanges()
    hold_scalers(optimizer, pending)
    scaler = optimizer.chained_optimizers[0].grad_scaler
    scaler.update(True)
    pending.forget()
    scaler.update(False)
    assert seen == []
    pending.apply()
    assert seen == [False]
