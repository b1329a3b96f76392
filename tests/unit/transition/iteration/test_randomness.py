"""The numbers of each generator, for each micro-batch on each rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from unicron_transition.iteration import randomness

TRACKER = "megatron.core.tensor_parallel.random"
NAMES = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")


class Tracker:
    """The used part of Megatron's tracker."""

    def __init__(self) -> None:
        self.states = {name: torch.get_rng_state() for name in NAMES}

    def get_states(self) -> dict:
        return dict(self.states)

    def set_states(self, states: dict) -> None:
        self.states = states


@pytest.fixture
def tracker(monkeypatch):
    found = Tracker()
    monkeypatch.setitem(sys.modules, TRACKER, SimpleNamespace(_CUDA_RNG_STATE_TRACKER=found))
    return found


@pytest.fixture(autouse=True)
def own_numbers():
    with torch.random.fork_rng():
        yield


def drawn(tracker: Tracker, *which: int, **coordinate: int) -> dict[str, tuple[float, ...]]:
    """Return the numbers of each generator after a seed."""
    randomness.seed(*which, **coordinate)
    numbers = {"default": tuple(torch.rand(4).tolist())}
    for name, state in tracker.states.items():
        generator = torch.Generator()
        generator.set_state(state)
        numbers[name] = tuple(torch.rand(4, generator=generator).tolist())
    return numbers


def test_without_megatron_torch_alone_is_seeded(monkeypatch):
    monkeypatch.delitem(sys.modules, TRACKER, raising=False)
    randomness.seed(1234, 7, 3)
    first = torch.rand(4)
    torch.rand(100)
    randomness.seed(1234, 7, 3)
    assert torch.equal(torch.rand(4), first)


def test_the_same_micro_batch_gets_the_same_numbers_whatever_came_before(tracker):
    first = drawn(tracker, 1234, 7, 3, tensor=1, pipeline=1)
    drawn(tracker, 1234, 7, 4)
    assert drawn(tracker, 1234, 7, 3, tensor=1, pipeline=1) == first


@pytest.mark.parametrize(
    ("which", "coordinate"),
    [((1235, 7, 3), {}), ((1234, 8, 3), {}), ((1234, 7, 4), {})]
    + [((1234, 7, 3), {name: 1}) for name in ("pipeline", "chunk", "context")],
)
def test_all_generators_differ_by_what_is_computed_and_by_the_stage(tracker, which, coordinate):
    one, other = drawn(tracker, 1234, 7, 3), drawn(tracker, *which, **coordinate)
    assert all(one[name] != other[name] for name in one)


def test_tensor_ranks_share_what_they_do_alike_and_nothing_else(tracker):
    one, other = drawn(tracker, 1234, 7, 3), drawn(tracker, 1234, 7, 3, tensor=1)
    assert {name for name in one if one[name] == other[name]} == {"default", "data-parallel-rng"}
    assert one["model-parallel-rng"] != one["expert-parallel-rng"]


def test_states_that_an_activation_checkpoint_holds_stay_as_they_were(tracker):
    held = tracker.get_states()
    before = {name: state.clone() for name, state in held.items()}
    drawn(tracker, 1234, 7, 3)
    assert all(torch.equal(held[name], before[name]) for name in NAMES)
    assert set(tracker.states) == set(NAMES)
