"""Iteration times: no false alarms, hangs seen while they happen, slowdowns seen soon."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.support.iteration_times import DISTRIBUTIONS
from unicron_detector.iterations.iteration_monitor import Health, IterationMonitor, Limits

DATA = Path(__file__).parents[3] / "data" / "iteration_times.json"
ITERATIONS = cases(200_000)


def alarms(draw, count, monitor=None):
    """Return (failed iterations, number of times that the monitor turned to degraded)."""
    monitor = monitor or IterationMonitor()
    failed = degraded = 0
    before = Health.LEARNING
    for number in range(count):
        health = monitor.observe(draw(number)).health
        failed += health is Health.FAILED
        degraded += health is Health.DEGRADED and before is not Health.DEGRADED
        before = health
    return failed, degraded


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_false_alarms(name):
    draw = DISTRIBUTIONS[name](random.Random(7))
    assert alarms(draw, ITERATIONS // len(DISTRIBUTIONS) + 1) == (0, 0)


def test_no_false_alarms_on_recorded_times():
    seconds = json.loads(DATA.read_text())["seconds"]

    def draw(number):
        # Runs of 50 recorded iterations in random order keep the machine's own bursts.
        start = random.Random(number // 50).randrange(0, len(seconds) // 50) * 50
        return seconds[start + number % 50]

    failed, _ = alarms(draw, 20_000)
    assert failed == 0


def steady(count=100, seconds=1.0, limits=None):
    monitor = IterationMonitor(limits)
    for _ in range(count):
        monitor.observe(seconds)
    return monitor


def noisy(count, spread, seed):
    """Return a monitor that has seen iterations of a second with this spread, and their generator."""
    monitor, rng = IterationMonitor(), random.Random(seed)
    for _ in range(count):
        monitor.observe(rng.gauss(1.0, spread))
    return monitor, rng


def test_an_iteration_over_three_times_the_average_has_failed():
    monitor = steady()
    assert monitor.observe(2.9).health is Health.HEALTHY
    monitor = steady()
    seen = monitor.observe(3.1)
    assert seen.health is Health.FAILED
    assert seen.ratio == pytest.approx(3.1)
    assert "3.1x" in seen.reason
    assert monitor.average == pytest.approx(1.0)


def test_no_limit_while_learning_and_the_same_one_in_warm_up():
    monitor = IterationMonitor()
    for _ in range(monitor.limits.skip + monitor.limits.learn):
        assert monitor.limit() is None
        monitor.observe(1.0)
    assert monitor.limit() == pytest.approx(3.0)
    assert not monitor.warming
    monitor.begin_again()
    assert monitor.warming and monitor.limit() == pytest.approx(3.0), "what was learned is kept"
    monitor.learn_anew()
    assert monitor.warming and monitor.limit() is None


def test_warm_up_and_recoveries_are_not_learned():
    monitor = IterationMonitor()
    for _ in range(3):
        assert monitor.observe(40.0).health is Health.LEARNING
    for _ in range(20):
        monitor.observe(1.0)
        seen = monitor.observe(30.0, recovery=True)
        assert seen.health is not Health.FAILED and seen.ratio == 1.0
    assert monitor.average == pytest.approx(1.0)


def test_after_a_restart_the_first_iterations_are_warm_up_again():
    monitor = steady()
    monitor.begin_again()
    assert monitor.observe(25.0).health is Health.LEARNING
    assert monitor.average == pytest.approx(1.0)


def test_after_a_resize_all_is_learned_anew():
    monitor = steady()
    monitor.learn_anew()
    for _ in range(3):
        monitor.observe(9.0)
    for _ in range(20):
        assert monitor.observe(4.0).health is not Health.FAILED
    assert monitor.average == pytest.approx(4.0)


@pytest.mark.parametrize("factor", [1.15, 1.3, 2.0])
def test_a_slowdown_is_reported_within_a_block_and_stays(factor):
    monitor, rng = noisy(2000, 0.02, seed=5)
    seen = [monitor.observe(factor * rng.gauss(1.0, 0.02)) for _ in range(3000)]
    first = next(index for index, item in enumerate(seen) if item.health is Health.DEGRADED)
    assert first <= 16
    assert all(item.health is Health.DEGRADED for item in seen[first:])
    assert "x the usual" in seen[-1].reason
    back = [monitor.observe(rng.gauss(1.0, 0.02)).health for _ in range(64)]
    assert back[-1] is Health.HEALTHY


def test_a_slowdown_below_a_tenth_is_not_reported():
    monitor, rng = noisy(2000, 0.01, seed=5)
    assert all(monitor.observe(1.06 * rng.gauss(1.0, 0.01)).health is Health.HEALTHY for _ in range(500))


def test_what_ended_by_itself_once_is_no_news_the_next_time():
    monitor = steady()
    assert monitor.observe(4.0).health is Health.FAILED
    for _ in range(5000):
        monitor.observe(1.0)
    assert monitor.observe(4.0).health is not Health.FAILED


def test_own_slow_iterations_never_raise_the_limit_without_bound():
    monitor = steady()
    monitor.observe(1000.0)
    assert monitor.limit() <= 6.0 * monitor.average + 1e-9


def test_very_short_iterations_have_a_floor():
    assert steady(seconds=0.004).limit() == pytest.approx(0.25)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 1e4), st.integers(20, 120), st.floats(3.05, 50.0))
def test_scale_does_not_matter(unit, count, factor):
    monitor = steady(count, unit, Limits(floor=0.0))
    assert monitor.limit() == pytest.approx(3.0 * unit, rel=1e-6)
    assert monitor.observe(factor * unit).health is Health.FAILED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.booleans()), max_size=200))
def test_any_times_get_an_answer(times):
    monitor = IterationMonitor()
    for seconds, recovery in times:
        seen = monitor.observe(seconds, recovery)
        assert seen.ratio >= 0.0 and math.isfinite(seen.average)


def test_a_slowdown_soon_after_the_start_is_seen_too():
    """Few blocks are known then, and the start of the fault must not count as the job's noise."""
    monitor, rng = noisy(120, 0.02, seed=5)
    seen = [monitor.observe(1.5 * rng.gauss(1.0, 0.02)).health for _ in range(16)]
    assert Health.DEGRADED in seen


def test_two_slow_iterations_are_no_slow_job():
    monitor, rng = noisy(200, 0.005, seed=6)
    assert [monitor.observe(2.5).health for _ in range(2)] == [Health.HEALTHY] * 2
    assert {monitor.observe(rng.gauss(1.0, 0.005)).health for _ in range(30)} == {Health.HEALTHY}
