"""Shares by measured speed: the same in all ranks, the best that there are, and no others without need."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paces import PACES, Job, noise
from unicron_transition.iteration.shares import (
    UNKNOWN,
    WARM_UP,
    Measurement,
    Mode,
    Schedule,
    Shares,
    best,
    chosen_mode,
    equal,
    slowest,
)

PLAIN = Schedule()
STEADY = noise("normal 2 %")


@given(
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=4),
    st.integers(0, 8),
    st.sampled_from([Schedule(), Schedule(2), Schedule(3, 2)]),
)
def test_no_other_shares_are_ready_earlier(paces, more, schedule):
    rounds = len(paces) + more
    found = best(rounds, paces, schedule)
    assert sum(found) == rounds and min(found) >= 1
    others = (shares for shares in itertools.product(range(1, rounds + 1), repeat=len(paces)) if sum(shares) == rounds)
    assert slowest(found, paces, schedule) <= min(slowest(shares, paces, schedule) for shares in others)


@given(st.integers(1, 9), st.integers(0, 60))
def test_equal_paces_give_the_equal_deal(replicas, more):
    assert best(replicas + more, [1.0] * replicas, PLAIN) == equal(replicas + more, replicas)


def test_a_slow_replica_gets_less_in_five_iterations_and_as_much_again_when_it_is_fast():
    """Half as fast, of four, at eight micro-batches each: 10 rounds in place of 16, with 8 for a healthy job."""
    job = Job(4, 32, STEADY, random.Random(1))
    job.run(30)
    assert job.shares == [8, 8, 8, 8] and job.changes == 0
    job.factors[2] = 2.0
    job.run(5)
    assert job.shares == [9, 9, 5, 9] and slowest(job.shares, job.factors, PLAIN) == 10.0
    job.run(200)
    assert job.changes == 1
    job.factors[2] = 1.0
    job.run(5)
    assert job.shares == [8, 8, 8, 8] and job.changes == 2


@pytest.mark.parametrize("name", PACES)
def test_healthy_replicas_keep_equal_shares(name):
    """`benchmarks.cases shares` runs 200,000 iterations of each."""
    job = Job(4, 32, noise(name), random.Random(name))
    job.run(3000)
    assert job.changes == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shift", range(5))
def test_what_came_before_a_change_does_not_undo_it(seed, shift):
    """Wherever in a block it comes."""
    job = Job(4, 32, noise("normal 10 %"), random.Random(seed))
    job.run(60 + shift)
    job.factors[1] = 2.0
    job.run(40)
    assert slowest(job.shares, job.factors, PLAIN) <= 1.05 * 10.0 and job.changes <= 2


def test_replicas_of_two_generations_of_hardware_share_by_it():
    job = Job(4, 32, STEADY, random.Random(2), factors=[1.0, 1.0, 2.0, 2.0])
    job.run(WARM_UP + 5)
    assert job.shares == [11, 11, 5, 5]


def test_the_first_iterations_of_a_generation_are_not_measured():
    job = Job(4, 32, STEADY, random.Random(3), factors=[9.0, 1.0, 1.0, 1.0])
    job.run(WARM_UP)
    job.factors[0] = 1.0
    job.run(60)
    assert job.changes == 0


def test_a_new_generation_begins_with_equal_shares():
    job = Job(4, 32, STEADY, random.Random(4), factors=[3.0, 1.0, 1.0, 1.0])
    job.run(20)
    assert job.shares[0] < 8
    job.generation += 1
    assert job.shares == [8, 8, 8, 8]


def test_variable_lengths_are_no_alarm_and_hide_no_slow_replica():
    """The time goes with the tokens, which vary from 1 to 8 between replicas."""
    for slow, share in ((1.0, 8), (2.0, 5)):
        job = Job(4, 32, STEADY, random.Random(5), tokens=lambda rng: rng.choice([1.0, 2.0, 8.0]))
        job.run(60)
        job.factors[1] = slow
        job.run(40)
        assert job.shares[1] == share


def test_tokens_that_take_no_time_are_not_counted():
    """Micro-batches that are filled up take the same time, whatever counts of them."""
    job = Job(4, 32, STEADY, random.Random(6), tokens=lambda rng: rng.choice([1.0, 2.0, 8.0]), filled_up=True)
    job.run(30)
    job.factors[1] = 2.0
    job.run(5)
    assert job.shares == [9, 5, 9, 9]


def told_by(ranks: list[Shares], seconds: list[float]) -> list[float]:
    told = [
        rank.statement(place, Measurement(time)) for place, (rank, time) in enumerate(zip(ranks, seconds, strict=True))
    ]
    return [max(column) for column in zip(*told, strict=True)]


def test_ranks_that_do_not_agree_deal_equally_from_then_on():
    """One has the setting, and the others do not; or one has heard what the others have not."""
    for odd in ("setting", "past"):
        ranks = [Shares(Mode.EQUAL if odd == "setting" and place == 0 else Mode.SPEED) for place in range(3)]
        for rank in ranks:
            rank.begin_iteration(1, 3)
        if odd == "past":
            ranks[1].take_statements([0.0, 0.0, *[1.0] * 3, *[UNKNOWN] * 3], 12)
        for _ in range(20):
            numbers = told_by(ranks, [1.0, 1.0, 3.0])
            for rank in ranks:
                rank.take_statements(numbers, 12)
        assert {rank.dealt(12) for rank in ranks} == {()}


def test_an_iteration_that_some_replica_has_not_measured_counts_nothing():
    shares = Shares()
    shares.begin_iteration(1, 2)
    for _ in range(40):
        mark = shares.statement(0, None)[:2]
        shares.take_statements([*mark, 1.0, UNKNOWN, UNKNOWN, UNKNOWN], 8)
    assert shares.dealt(8) == ()


def test_a_gain_of_milliseconds_is_no_reason():
    job = Job(4, 32, STEADY, random.Random(7), factors=[2.0, 1.0, 1.0, 1.0], usual=1e-4)
    job.run(60)
    assert job.changes == 0


def test_fewer_rounds_than_replicas_are_dealt_equally():
    job = Job(4, 32, STEADY, random.Random(8), factors=[3.0, 1.0, 1.0, 1.0])
    job.run(20)
    assert job.decider.dealt(3) == () and sum(job.decider.dealt(5)) == 5


@pytest.mark.parametrize("text", ["", "speed", "equal"])
def test_the_setting(text):
    assert chosen_mode({"UNICRON_SHARES": text}).value == (text or "speed")


def test_another_setting_is_refused():
    with pytest.raises(ValueError, match="UNICRON_SHARES='fair': write speed, equal"):
        chosen_mode({"UNICRON_SHARES": "fair"})


def test_a_number_that_is_none_is_not_believed():
    shares = Shares()
    shares.begin_iteration(1, 2)
    for bad in (math.inf, 0.0, math.nan):
        shares.take_statements([*shares.statement(0, None)[:2], bad, 1.0, UNKNOWN, UNKNOWN], 8)
    assert shares.dealt(8) == ()
