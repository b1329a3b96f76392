"""The interval between checkpoints that follows from their cost and the risk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_transition.snapshot import save_interval
from unicron_transition.snapshot.save_interval import Risk, SaveClock, interval, optimum


def test_the_optimum_is_youngs_for_a_cheap_save_and_dalys_for_a_dear_one():
    assert optimum(1.0, 1e6) == pytest.approx((2.0 * 1e6) ** 0.5, rel=1e-3)
    assert optimum(300.0, 86400.0) == pytest.approx(7001.1, rel=1e-4)
    assert optimum(100.0, 40.0) == 40.0, "saves that take longer than the training lives"


@given(cost=st.floats(0.1, 100.0), between=st.floats(1e3, 1e7))
def test_no_other_interval_has_less_overhead(cost, between):
    """By Daly's own model of the time that a training takes."""
    from math import exp

    def lost(seconds: float) -> float:
        return between * (exp((seconds + cost) / between) - 1.0) / seconds

    best = optimum(cost, between)
    if cost < between / 10:
        assert lost(best) <= min(lost(0.8 * best), lost(1.25 * best))


def test_losses_that_are_seen_count_more_than_the_prior():
    fresh, calm, stormy = Risk(16, False), Risk(16, False, 30 * 86400.0, 0), Risk(16, False, 7 * 86400.0, 26)
    assert fresh.rate == pytest.approx(16 / 1000.0 / 3600.0)
    assert calm.rate < fresh.rate / 10 and stormy.rate > 7 * fresh.rate
    assert Risk(16, True).uncovered == pytest.approx(save_interval.COMMON * fresh.rate, rel=1e-2)


def test_bounds():
    assert interval(0.0, 0.1, Risk(100_000, False)) == save_interval.LEAST
    assert interval(1e3, 1e3, Risk(1, True)) == save_interval.MOST
    assert interval(0.0, 600.0, Risk(100_000, False)) == 600.0 / save_interval.BUSY, "a file is written before the next"


def test_a_rank_that_measures_nothing_waits_for_those_that_do():
    clock = SaveClock()
    assert clock.seconds(Risk(4, False)) == save_interval.FIRST
    clock.note_saved()
    assert clock.seconds(Risk(4, False)) == save_interval.MOST
    clock.note_blocked(0.5)
    clock.note_written(20.0)
    assert clock.seconds(Risk(4, False)) == interval(0.5, 20.0, Risk(4, False))
