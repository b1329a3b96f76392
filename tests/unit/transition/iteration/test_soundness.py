"""The judgement of unsound iterations."""

from __future__ import annotations

import math

import pytest
import torch

from unicron_transition.iteration.ledger import UNKNOWN
from unicron_transition.iteration.soundness import FAR, LEAST_SEEN, Band, Marks, Trial, deal_elsewhere, norm_of


def together(*marks: Marks, total: int) -> Marks:
    """What all members know, from what each of them knows."""
    return Marks.from_numbers(
        [max(row) for row in zip(*(each.as_numbers(total) for each in marks), strict=True)], total
    )


def test_all_members_hear_what_any_of_them_knows():
    first = Marks({1: 0}, {0: 0, 1: 0}, [math.inf, UNKNOWN])
    second = Marks({}, {2: 1, 3: 1}, [UNKNOWN, 2.5])
    heard = together(first, second, total=4)
    assert heard == Marks({1: 0}, {0: 0, 1: 0, 2: 1, 3: 1}, (math.inf, 2.5))
    assert heard.suspects() == {1: 0} and heard.to_drop() == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("norms", "dropped"),
    [
        ([1.0, math.inf, 1.0], {1: 1, 4: 1}),
        ([1.0, 5000.0, 1.2], {1: 1, 4: 1}),
        ([1.0, 1.3, 1.2], {}),
        ([UNKNOWN, UNKNOWN, UNKNOWN], {}),
    ],
    ids=["not finite", "far larger", "all alike", "nothing known"],
)
def test_a_gradient_that_is_unsound_or_far_larger_is_dropped(norms, dropped):
    owners = {index: index % 3 for index in range(6)}
    assert Marks({}, owners, norms).to_drop() == dropped


@pytest.mark.parametrize(
    ("dropped", "replicas", "dealt"),
    [
        ({1: 1, 4: 1, 7: 1}, 3, {1: 0, 4: 2, 7: 0}),
        ({0: 0, 1: 1}, 2, {0: 1, 1: 0}),
        ({0: 0}, 1, {0: 0}),
    ],
    ids=["to the others", "all are unsound", "alone"],
)
def test_another_replica_computes_what_was_dropped(dropped, replicas, dealt):
    assert deal_elsewhere(dropped, replicas) == dealt


def test_what_is_sound_elsewhere_was_the_first_replicas_fault():
    trial = Trial()
    assert trial.judge(Marks({3: 0}, {0: 0, 3: 0, 1: 1}, [math.inf, 1.0]), 2) == set()
    assert trial.culprits(2.0, 2) == {3: 0}


def test_what_is_unsound_in_two_replicas_is_at_fault_itself():
    trial = Trial()
    assert trial.judge(Marks({3: 0}, {3: 0}, [math.inf, 1.0]), 2) == set()
    assert trial.judge(Marks({3: 1}, {3: 1}, [1.0, math.inf]), 2) == {3}
    assert trial.culprits(1.0, 2) == {}


def test_a_faulty_micro_batch_explains_the_gradient_that_it_was_in():
    trial = Trial()
    trial.judge(Marks({}, {0: 0, 3: 0, 1: 1}, [math.inf, 1.0]), 2)  # only the sum is known to be unsound
    assert trial.judge(Marks({3: 1}, {0: 1, 3: 1, 1: 1}, [0.0, math.inf]), 2) == {3}
    assert trial.culprits(1.0, 2) == {}


def test_the_same_replica_twice_proves_nothing_unless_it_is_alone():
    again = Marks({3: 0}, {3: 0}, [math.inf])
    for replicas, faulty in ((1, {3}), (2, set())):
        trial = Trial()
        trial.judge(again, replicas)
        assert trial.judge(again, replicas) == faulty


@pytest.mark.parametrize(("norm", "culprits"), [(499.0, {}), (3.0, {1: 1})], ids=["as large", "usual again"])
def test_a_gradient_that_stays_large_is_right(norm, culprits):
    trial = Trial(norm=500.0)
    trial.judge(Marks({}, {0: 0, 1: 1}, [3.0, 480.0]), 2)
    assert trial.culprits(norm, 2) == culprits


def test_what_all_replicas_had_has_a_common_cause():
    trial = Trial()
    trial.judge(Marks({0: 0, 1: 1, 2: 2}, {0: 0, 1: 1, 2: 2}, [math.inf] * 3), 3)
    assert trial.culprits(1.0, 3) == {} and trial.culprits(1.0, 4) == {0: 0, 1: 1, 2: 2}


def test_a_band_needs_some_norms_and_follows_them():
    band = Band()
    for _ in range(LEAST_SEEN - 1):
        band.note(1.0)
    assert not band.is_far(10 * FAR)
    band.note(1.0)
    assert band.is_far(1.01 * FAR) and not band.is_far(0.99 * FAR)
    band.note(50.0)
    assert not band.is_far(1.01 * FAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_a_norm_is_finite_only_if_every_number_is(dtype):
    tensors = [torch.full((100,), 60000.0, dtype=dtype), torch.zeros(0, dtype=dtype)]
    assert norm_of(tensors) == pytest.approx(600000, rel=0.01) and norm_of([]) == 0.0
    tensors[0][7] = math.nan
    assert not math.isfinite(norm_of(tensors))


def test_a_norm_beyond_its_format_is_still_a_number():
    assert norm_of([torch.full((4,), 1e30)]) == pytest.approx(2e30)
