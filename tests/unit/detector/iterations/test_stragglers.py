"""Ranks that are always slower than their peers: named without any history, and never by mistake."""

from __future__ import annotations

import math
import random

import pytest

from tests.support.depth import cases
from tests.support.iteration_times import DISTRIBUTIONS
from unicron_detector.iterations.stragglers import Stragglers

USUAL = {"data": 0.02, "forward": 0.3, "backward": 0.6, "reduce": 0.05, "step": 0.03, "outside": 0.001}


def rows(ranks, iterations, draw=None, slow=None, seed=1):
    """Yield iterations in which each rank draws its own noise per phase. slow: slot -> {phase: factor}."""
    rngs = [random.Random(1000 * seed + slot) for slot in range(ranks)]
    draws = [{name: (draw or _steady)(rng) for name in USUAL} for rng in rngs]
    for number in range(iterations):
        yield {
            slot: {
                name: seconds * draws[slot][name](number) * (slow or {}).get(slot, {}).get(name, 1.0)
                for name, seconds in USUAL.items()
            }
            for slot in range(ranks)
        }


def _steady(rng):
    return lambda _: rng.gauss(1.0, 0.02)


def feed(watch, table):
    """Return how often a rank was newly named, and the last one."""
    named, before = 0, watch.current
    for row in table:
        found = watch.observe(row)
        named += found is not None and (before is None or before.slot != found.slot)
        before = found
    return named, before


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "step", "outside"])
def test_slow_from_the_first_iteration_on(ranks, phase):
    factor = 1.0 + 0.2 / USUAL[phase]  # a fifth of the iteration's own work
    named, culprit = feed(Stragglers(), rows(ranks, 48, slow={1: {phase: factor}}))
    assert named == 1 and (culprit.slot, culprit.phase) == (1, phase)
    assert culprit.slowdown == pytest.approx(1.2, abs=0.03)
    assert "slot 1 takes" in culprit.reason and "in the last " in culprit.reason


TWICE = {name: 2.0 for name in ("data", "forward", "backward")}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_one_that_becomes_half_as_fast_is_named_within_five_iterations_until_it_is_over(ranks):
    watch = Stragglers()
    assert feed(watch, rows(ranks, 300, lambda rng: lambda _: rng.gauss(1.0, 0.05))) == (0, None)
    named, culprit = feed(watch, rows(ranks, 5, lambda rng: lambda _: rng.gauss(1.0, 0.05), slow={1: TWICE}, seed=2))
    assert named == 1 and culprit.slot == 1
    assert feed(watch, rows(ranks, 40, slow={1: TWICE}))[0] == 0, "it is named once"
    assert feed(watch, rows(ranks, 16))[1] is None


def test_a_fault_does_not_raise_its_own_limit():
    """It becomes slow in small steps, each of which is within the noise of the one before."""
    watch = Stragglers()
    feed(watch, rows(4, 300))
    for step in range(12):
        feed(watch, rows(4, 40, slow={2: {"backward": 1.0 + 0.05 * step}}, seed=step))
    assert watch.current is not None and watch.current.slot == 2


def test_what_is_known_of_the_noise_outlives_a_new_generation():
    """Runs as high as these are usual here, and the newcomers are no more even."""
    watch = Stragglers()
    draw = DISTRIBUTIONS["bimodal 1.8x"]
    feed(watch, rows(4, 3000, draw))
    for seed in range(40):
        watch.clear()
        assert feed(watch, rows(4, 80, draw, seed=seed)) == (0, None)


def compiling(table, newcomers=()):
    """A newcomer takes five times as long at first, and twice as long for some more."""
    for number, row in enumerate(table):
        for slot in newcomers:
            for name in TWICE:
                row[slot][name] *= 5.0 if number < 3 else 2.0 if number < 7 else 1.0
        yield row


def noisy(rng):
    return lambda _: rng.gauss(1.0, 0.05)


@pytest.mark.parametrize("slow", [1, 2])
def test_beside_a_newcomer_a_survivor_is_named_within_five_iterations_and_the_newcomer_is_not(slow):
    watch = Stragglers()
    feed(watch, rows(4, 300, noisy))
    watch.clear({0, 1, 2})
    watch.clear({0, 1, 2})  # the generation between them made no iteration
    named, culprit = feed(watch, compiling(rows(4, 5, noisy, slow={slow: TWICE}, seed=2), [3]))
    assert named == 1 and culprit.slot == slow


def test_a_newcomer_that_still_compiles_in_the_next_generation_is_no_survivor_of_it():
    watch = Stragglers()
    feed(watch, rows(4, 300, noisy))
    watch.clear({0, 1, 2})
    feed(watch, compiling(rows(4, 3, noisy, seed=2), [3]))
    watch.clear({0, 1, 2, 3})
    assert feed(watch, rows(4, 6, noisy, slow={3: TWICE}, seed=3)) == (0, None)


def test_a_newcomer_that_stays_slow_is_named_after_its_own_grace():
    watch = Stragglers()
    feed(watch, rows(4, 300, noisy))
    watch.clear({0, 1, 2})
    table = list(compiling(rows(4, 25, noisy, slow={3: TWICE}, seed=2), [3]))
    assert feed(watch, table[:24]) == (0, None)
    assert feed(watch, table[24:])[1].slot == 3


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_false_alarms_in_generations_with_a_newcomer(name):
    """Nor does it teach that such differences are usual."""
    watch = Stragglers()
    feed(watch, rows(4, 600, DISTRIBUTIONS[name]))
    for seed in range(cases(12)):
        new = seed % 4
        watch.clear({0, 1, 2, 3} - {new})
        assert feed(watch, compiling(rows(4, 180, DISTRIBUTIONS[name], seed=seed), [new])) == (0, None)
    if name == "normal 2 %":
        watch.clear({0, 1, 2})
        assert feed(watch, compiling(rows(4, 5, slow={1: TWICE}), [3]))[1].slot == 1


def test_less_than_a_tenth_does_not_count():
    assert feed(Stragglers(), rows(8, 500, slow={2: {"backward": 1.12}})) == (0, None)


def test_a_long_checkpoint_of_one_rank_is_no_slowness():
    watch = Stragglers()
    for number, row in enumerate(rows(4, 2000)):
        if number % 40 == 39:
            row[0]["outside"] = 60.0
        assert watch.observe(row) is None


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("ranks", "iterations"), [(2, cases(3000)), (3, cases(3000)), (8, cases(1000, 3))])
def test_no_false_alarms(name, ranks, iterations):
    """Each rank draws from the distribution by itself, the hardest case: common noise does not show here."""
    named, _ = feed(Stragglers(), rows(ranks, iterations, DISTRIBUTIONS[name], seed=7))
    assert named == 0


def test_other_ranks_or_stages_begin_anew_and_are_not_compared():
    watch, stages = Stragglers(), {0: 0, 1: 0, 2: 1, 3: 1}
    for row in rows(4, 100, slow={2: {"forward": 2.0}, 3: {"forward": 2.0}}):
        assert watch.observe(row, stages) is None
    watch = Stragglers()
    feed(watch, rows(4, 48, slow={2: {"forward": 2.0}}))
    assert watch.current.slot == 2
    assert feed(watch, rows(2, 16))[1] is None, "it is gone"


def chosen(table, choices, every=64):
    """Yield the ranks of each iteration that are compared in it."""
    for number, row in enumerate(table):
        yield {slot: row[slot] for slot in choices[number // every % len(choices)]}


def slow_noise(rng):
    """Return noise of 10 % that lasts for some thirty iterations."""
    value = 0.0

    def draw(_):
        nonlocal value
        value = 0.97 * value + rng.gauss(0.0, 0.1 * math.sqrt(1.0 - 0.97**2))
        return max(0.3, 1.0 + value)

    return draw


SAMPLE = range(0, 24, 2)
CHOICES = [[*SAMPLE, *odd] for odd in ((1, 3, 5, 7), (9, 11, 13), (15, 17, 19, 21, 23))]


def test_a_sample_of_many_ranks_that_changes_teaches_as_much_as_all():
    watch = Stragglers()
    noise = rows(24, 2000, slow_noise, seed=5)
    assert feed(watch, chosen(noise, CHOICES)) == (0, None)
    assert watch._highest.max() > 0.1 and watch._known is not None


@pytest.mark.parametrize(("slow", "after"), [(4, 5), (9, 70)])
def test_a_slow_rank_is_named_soon_after_it_is_compared(slow, after):
    """Rank 9 is compared from iteration 64 of each 192 on."""
    watch = Stragglers()
    assert feed(watch, chosen(rows(24, 576), CHOICES)) == (0, None)
    named, culprit = feed(watch, chosen(rows(24, after, slow={slow: TWICE}, seed=2), CHOICES))
    assert named == 1 and culprit.slot == slow and culprit.slowdown == pytest.approx(1.9, abs=0.1)


def test_one_rank_or_nonsense_gets_an_answer():
    assert feed(Stragglers(), rows(1, 100)) == (0, None)
    assert feed(Stragglers(), ({0: {}, 1: {}} for _ in range(100))) == (0, None)
    huge = {0: {"data": 1e300}, 1: {"data": 0.0}, 2: {"data": 0.0}}
    culprit = feed(Stragglers(), (huge for _ in range(100)))[1]
    assert culprit is None or math.isfinite(culprit.slowdown) or culprit.slot == 0
