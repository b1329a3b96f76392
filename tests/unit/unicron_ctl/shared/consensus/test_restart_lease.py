"""A plain world's lease: who may go on without the controller, and that one side ends before the other begins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.consensus.restart_lease import (
    DOORS_SHARE,
    DRIFT,
    END_SECONDS,
    FENCE_SECONDS,
    OLD_PART_SECONDS,
    OLD_SECONDS,
    PART_SECONDS,
    Lease,
    gone_at,
    old_gone_at,
    on_another_clock,
    tried_by,
)
from unicron_ctl.shared.protocol.ranges import MOST_DOORS

DOORS = FENCE_SECONDS * DOORS_SHARE


def lease(others: int) -> Lease:
    made = Lease()
    made.start_world(others)
    made.on_doors(others, 0.0)
    return made


def test_as_long_as_the_controller_answers_or_all_doors_are_open_it_is_renewed():
    one = lease(3)
    for now in range(0, 1000, 10):
        one.on_controller(now)
        assert one.expires_at == now + FENCE_SECONDS
    for now in range(1000, 100_000, 10):
        one.on_doors(3, now)
        assert one.expires_at == now + DOORS, "the controller's absence alone ends nothing"


@pytest.mark.parametrize("open_doors", [0, 1])
def test_who_is_cut_off_has_a_limit(open_doors: int):
    """Of a world of four: oneself and one other are half of it."""
    one = lease(3)
    one.on_controller(100.0)
    for now in range(100, 400, 2):
        one.on_doors(open_doors, float(now))
    assert one.expires_at == 100.0 + FENCE_SECONDS


def test_the_larger_part_has_a_longer_one():
    one = lease(3)
    one.on_controller(100.0)
    for now in range(100, 400, 2):
        one.on_doors(2, float(now))
    assert one.expires_at == 100.0 + PART_SECONDS


def test_a_world_whose_doors_never_answered_has_none():
    one = Lease()
    one.on_doors(1, 0.0)
    assert math.isinf(one.expires_at) and not one.armed, "before a world begins"
    one.start_world(3)
    one.on_doors(1, 5.0)
    assert math.isinf(one.expires_at) and not one.armed
    one.on_controller(6.0)
    one.on_doors(2, 6.0)
    assert one.armed and one.expires_at == 6.0 + FENCE_SECONDS
    one.start_world(3)
    assert not one.armed, "the next world is another one"
    assert math.isinf(lease(0).expires_at), "alone there is nobody to miss"


def test_an_order_to_begin_renews_nothing():
    """Defect: a plan that was on its way for half a minute began a world of its own, with a new lease."""
    one = lease(3)
    one.on_controller(100.0)
    one.start_world(3)
    one.on_doors(0, 130.0)
    one.armed = True
    assert one.expires_at == 100.0 + FENCE_SECONDS


def test_what_comes_late_shortens_no_lease():
    one = lease(3)
    one.on_controller(100.0)
    one.on_controller(90.0)
    one.on_doors(3, 80.0)
    assert one.expires_at == 100.0 + FENCE_SECONDS


@pytest.mark.parametrize(("others", "armed"), [(3, False), (2, True)])
def test_more_than_half_are_needed(others: int, armed: bool):
    one = Lease()
    one.start_world(others)
    one.on_doors(1, 1.0)
    assert one.armed == armed


def test_how_long_the_controller_waits():
    """It waits until not more than half of the doors that the agent tries can be open, itself included."""
    never, least, most = math.inf, on_another_clock(FENCE_SECONDS), on_another_clock(PART_SECONDS)

    def wait(*shut: float, lease: float = FENCE_SECONDS) -> float:
        return gone_at(0.0, lease, shut)

    assert wait(0.0, 0.0, 0.0, never) == least and wait(0.0, 0.0, never, never) == most
    assert wait(0.0) == wait(0.0, 0.0) == wait(0.0, 0.0, never) == least and wait(0.0, never) == most
    assert wait(never, never) == wait() == never, "who reaches all others goes on, so nothing but a proof ends the wait"
    assert wait(8.0, 8.0) == 8.0 + on_another_clock(DOORS), "the others' doors were open until then"
    assert wait(8.0, never) == 8.0 + most and wait(0.0, 0.0, lease=60.0) == on_another_clock(60.0)
    assert [old_gone_at(0.0, *parts) for parts in ((1, 2), (2, 1))] == [OLD_SECONDS, OLD_PART_SECONDS]


def test_in_a_large_world_each_agent_tries_a_part_of_the_doors():
    assert tried_by(2, [0, 2, 5]) == [5, 0] and tried_by(1, [0, 2]) == [] and tried_by(0, [0]) == []
    world = range(2 * MOST_DOORS + 1)
    assert tried_by(0, world[: MOST_DOORS + 1]) == list(world[1 : MOST_DOORS + 1])
    assert tried_by(7, world) == [(8 + 2 * at) % len(world) for at in range(MOST_DOORS)]


@given(st.data())
def test_whatever_is_cut_the_processes_of_one_side_end_before_the_other_begins(data):
    """The agent's clock is fast or slow; answers come late; the others' doors close when these hear of the Break, or
    never; the agent reaches them as the network lets it."""
    rate = data.draw(st.floats(1.0 - DRIFT / 2, 1.0 + DRIFT / 2))
    heard = data.draw(st.floats(0.0, 5.0))  # the controller hears the agent until then
    times = st.one_of(st.just(math.inf), st.floats(0.0, 25.0))
    shut = data.draw(st.lists(times, min_size=1, max_size=8).filter(lambda times: min(times) < math.inf))
    one = lease(len(shut))
    now, most = 0.0, data.draw(st.sampled_from((len(shut), len(shut) // 2 + 1)))
    while now < 400.0 and (now < 1.0 or now < one.expires_at * rate):
        if now <= heard and data.draw(st.booleans()):
            one.on_controller(now / rate)
        if data.draw(st.booleans()):
            one.on_doors(min(most, sum(now <= at for at in shut)), now / rate)
        now += data.draw(st.floats(0.3, 3.0))
    gone = max(1.0, one.expires_at * rate) + END_SECONDS
    assert gone <= max(gone_at(heard, FENCE_SECONDS, shut), 1.0 + END_SECONDS) + 1e-6
