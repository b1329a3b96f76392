"""T(t,x): the formulas of the cost model, the fit to measured sizes, and the repair of noise."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_planner.problem import megatron_costs
from unicron_planner.problem.megatron_costs import A100, Gpt, Hardware, Parallel
from unicron_planner.problem.throughput import fit_flops, isotonic, model_flops

GPT_7B = Gpt(layers=32, hidden=4096, heads=32, global_batch=512)
GPT_175B = Gpt(layers=96, hidden=12288, heads=96, global_batch=1536)


def test_parameters_and_flops_of_gpt3():
    """175 B parameters; close to 6 FLOP per parameter and token, plus attention."""
    assert GPT_175B.parameters == pytest.approx(175e9, rel=0.01)
    assert 6 * GPT_175B.parameters < GPT_175B.flops_per_token < 6.4 * GPT_175B.parameters


def test_the_bubble_shrinks_with_micro_batches():
    """Seconds grow by (p - 1) slots over m."""
    few, many = (Gpt(32, 4096, 32, global_batch=batch) for batch in (8, 64))
    how = Parallel(tp=1, pp=8, dp=1)
    alone = megatron_costs.parts(few, A100, Parallel(1, 1, 1))[0] / 8 / 8  # one micro-batch on an eighth of the layers
    assert megatron_costs.parts(few, A100, how)[0] == pytest.approx(alone * (8 + 7))
    assert megatron_costs.parts(many, A100, how)[0] == pytest.approx(alone * (64 + 7))


def test_micro_batches_may_split_unevenly():
    """512 micro-batches over 6 replicas: the slowest computes 86."""
    seconds = megatron_costs.parts(GPT_7B, A100, Parallel(8, 1, 6))[0]
    assert seconds == pytest.approx(megatron_costs.parts(GPT_7B, A100, Parallel(8, 1, 1))[0] * 86 / 512)


def test_memory_limits_what_runs():
    assert not list(megatron_costs.ways(GPT_175B, A100, 1))
    assert list(megatron_costs.ways(GPT_175B, A100, 16))
    small = Hardware(memory=16e9)
    assert {how.tp * how.pp for how in megatron_costs.ways(GPT_7B, small, 1)} == {8}
    for how in megatron_costs.ways(GPT_7B, A100, 3):
        assert how.tp * how.pp * how.dp <= 24 and megatron_costs.memory(GPT_7B, how) <= A100.memory


def test_reproduces_published_throughput_roughly():
    """138 TFLOP/s per GPU for 175B-class training on 1,024 A100 with batch 1,536 (Megatron-LM's read-me), within 20
    %."""
    rates = model_flops(GPT_175B, A100, [1, 128])
    assert list(rates) == [128] and rates[128] / 1024 / 1e12 == pytest.approx(138, rel=0.2)


def test_sizes_that_were_not_measured_scale_from_those_that_were():
    rates = fit_flops({nodes: 1e15 / (1.0 + 8.0 / nodes) for nodes in (2, 4)}, [2, 8])  # t = 1 + 8/x
    assert rates == {2: pytest.approx(2e14), 8: pytest.approx(1e15 / 2.0, rel=0.03)}


def test_noise_that_inverts_is_repaired():
    rates = list(fit_flops({1: 1 / 4.0, 2: 1 / 2.0, 3: 1 / 2.1, 4: 1.0}, [1, 2, 3, 4]).values())
    assert rates == sorted(rates) and rates[1] == rates[2]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 10)), min_size=1, max_size=7))
def test_isotonic_is_the_closest_ordered_sequence(pairs):
    values, weights = zip(*pairs, strict=True)
    ours = isotonic(values, weights)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(ours))

    def error(sequence):
        return sum(w * (a - b) ** 2 for a, b, w in zip(sequence, values, weights, strict=True))

    # A projection on a convex cone: no ordered sequence made of block means is closer.
    best = min(
        error(candidate)
        for cuts in itertools.product([0, 1], repeat=len(values) - 1)
        if (candidate := _means(values, weights, cuts)) is not None
    )
    assert error(ours) <= best + 1e-6


def _means(values, weights, cuts):
    out, start = [], 0
    for end in range(1, len(values) + 1):
        if end == len(values) or cuts[end - 1]:
            pairs = list(zip(values[start:end], weights[start:end], strict=True))
            out += [sum(v * w for v, w in pairs) / sum(w for _, w in pairs)] * (end - start)
            start = end
    return out if all(a <= b + 1e-9 for a, b in itertools.pairwise(out)) else None
