"""A plain world's lease: who may go on without the controller, and that one side ends before the other begins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.consensus.restart_lease import (
    MARGIN_SECONDS,
    MINORITY_SECONDS,
    PART_SECONDS,
    Lease,
    seconds_to_expiry,
)
from unicron_ctl.shared.protocol.ranges import MOST_DOORS


def lease(others: int) -> Lease:
    made = Lease()
    made.start_world(others, 0.0)
    made.on_answers(others, 0.0)
    return made


def test_as_long_as_the_controller_or_all_others_are_there_it_is_renewed():
    one = lease(3)
    for now in range(0, 1000, 10):
        one.on_controller(now)
        assert one.expires_at == now + MINORITY_SECONDS
    for now in range(1000, 100_000, 10):
        one.on_answers(3, now)
        assert one.expires_at > now + MINORITY_SECONDS - 1, "the controller's absence alone ends nothing"


@pytest.mark.parametrize(("answers", "limit"), [(0, MINORITY_SECONDS), (1, MINORITY_SECONDS), (2, PART_SECONDS)])
def test_who_is_cut_off_has_a_limit(answers: int, limit: float):
    """Of a world of four: oneself and two others are more than half."""
    one = lease(3)
    one.on_controller(100.0)
    for now in range(100, 400, 2):
        one.on_answers(answers, float(now))
    assert one.expires_at == 100.0 + limit


def test_a_world_whose_doors_never_answered_has_none():
    one = Lease()
    one.on_answers(1, 0.0)
    assert math.isinf(one.expires_at) and not one.armed, "before a world begins"
    one.start_world(3, 0.0)
    one.on_answers(1, 5.0)
    assert math.isinf(one.expires_at) and not one.armed
    one.on_answers(2, 6.0)
    assert one.armed and one.expires_at == min(6.0 + MINORITY_SECONDS, PART_SECONDS)
    one.start_world(3, 50.0)
    assert not one.armed, "the next world is another one"
    assert math.isinf(lease(0).expires_at), "alone there is nobody to miss"


def test_what_comes_late_shortens_no_lease():
    one = lease(3)
    one.on_controller(100.0)
    one.on_controller(90.0)
    one.on_answers(3, 80.0)
    assert one.expires_at == 100.0 + MINORITY_SECONDS


@pytest.mark.parametrize(("others", "armed"), [(3, False), (2, True)])
def test_more_than_half_are_needed(others: int, armed: bool):
    one = Lease()
    one.start_world(others, 0.0)
    one.on_answers(1, 1.0)
    assert one.armed == armed


def test_how_long_the_controller_waits():
    minority, part = MINORITY_SECONDS + MARGIN_SECONDS, PART_SECONDS + MARGIN_SECONDS
    assert [seconds_to_expiry(silent, 4) for silent in (1, 4, 5)] == [minority, minority, part]
    assert seconds_to_expiry(1, MOST_DOORS - 1) == minority and seconds_to_expiry(1, MOST_DOORS) == part


@given(st.integers(2, 64), st.data())
def test_of_two_halves_the_one_without_the_controller_ends_before_the_other_begins_anew(nodes: int, data):
    """Whatever the cut, agents of the far side are told of it within a heartbeat; the near side waits from their last
    word, which came before."""
    far = data.draw(st.integers(1, nodes - 1))
    found_late = data.draw(st.floats(0.0, MARGIN_SECONDS - 5.0))
    one = lease(nodes - 1)
    cut = 1000.0
    one.on_controller(cut + found_late)
    until = one.expires_at
    for now in range(1000, 1400, 2):
        one.on_answers(far - 1, now + found_late)
        until = max(until, one.expires_at) if now < until else until
    assert until <= cut + seconds_to_expiry(far, nodes - far) - 5.0 + 1e-6
