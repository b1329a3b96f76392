"""Localisation: which rank is slow, and in which phase."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from unicron_detector.iterations.culprit import OWN_PHASES, slowest

USUAL = {"data": 0.02, "forward": 0.30, "backward": 0.60, "reduce": 0.05, "step": 0.03}


def ranks(count=8, noise=0.02, seed=1, slow=None, phase="forward", factor=1.0):
    """Phase times of a synchronous step: the fast ranks wait in the reduce."""
    rng = random.Random(seed)
    own = {
        slot: {
            name: USUAL[name] * rng.gauss(1.0, noise) * (factor if (slot, name) == (slow, phase) else 1.0)
            for name in OWN_PHASES
        }
        for slot in range(count)
    }
    last = max(sum(times.values()) for times in own.values())
    for times in own.values():
        times["reduce"] = USUAL["reduce"] + last - sum(times.values())
    return own


@pytest.mark.parametrize("phase", ["forward", "backward", "step", "data"])
@pytest.mark.parametrize("slot", [0, 5])
def test_the_slow_rank_and_its_phase_are_named(phase, slot):
    factor = 30.0 if phase in ("data", "step") else 2.0
    found = slowest(ranks(slow=slot, phase=phase, factor=factor))
    assert (found.slot, found.phase) == (slot, phase)
    assert found.slowdown == pytest.approx(factor, rel=0.15)
    assert f"slot {slot}" in found.reason


def test_healthy_ranks_have_no_culprit():
    for seed in range(200):
        assert slowest(ranks(seed=seed)) is None


def test_time_lost_outside_the_measured_phases_is_seen_by_who_waits_least():
    phases = ranks()
    for slot, times in phases.items():
        times["reduce"] = 0.05 if slot == 3 else 1.05
    found = slowest(phases)
    assert (found.slot, found.phase) == (3, "other")
    assert found.slowdown > 1.5


def test_all_waiting_in_the_reduce_is_the_network():
    usual = ranks()
    slow = {slot: {**times, "reduce": times["reduce"] + 0.5} for slot, times in usual.items()}
    found = slowest(slow, usual=usual)
    assert found.slot is None and found.phase == "reduce"
    assert "network" in found.reason


def test_a_rank_without_peers_is_compared_with_its_own_past():
    usual = {0: dict(USUAL), 1: dict(USUAL)}
    slow = {0: dict(USUAL), 1: dict(USUAL, backward=1.8)}
    found = slowest(slow, usual=usual)
    assert (found.slot, found.phase) == (1, "backward")
    assert found.slowdown == pytest.approx(3.0)


@settings(max_examples=cases(80), deadline=None)
@given(
    st.integers(3, 64),
    st.integers(0, 63),
    st.sampled_from(["forward", "backward"]),
    st.floats(1.5, 20.0),
    st.integers(0, 999),
)
def test_any_single_straggler_is_found(count, slot, phase, factor, seed):
    slot %= count
    found = slowest(ranks(count=count, slow=slot, phase=phase, factor=factor, seed=seed))
    assert (found.slot, found.phase) == (slot, phase)


@settings(max_examples=cases(80), deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 9), st.dictionaries(st.sampled_from([*OWN_PHASES, "reduce"]), st.floats(0.0, 100.0)), max_size=8
    )
)
def test_any_times_give_an_answer_or_none(phases):
    found = slowest(phases)
    assert found is None or (found.slowdown >= 1.0 and found.reason)
