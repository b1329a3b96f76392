"""Who has to go when there are too many connections, and how much one peer may send."""

from __future__ import annotations

import random

from unicron_ctl.controller.doorkeeper import Doors
from unicron_ctl.controller.throttle import BYTES_OF_ONE, Throttle, cost


def test_those_who_have_not_spoken_go_first() -> None:
    doors = Doors(most=4)
    for descriptor in range(4):
        assert doors.came(descriptor, f"10.0.0.{descriptor}") is None
    doors.known(0)
    doors.known(1)
    assert doors.came(4, "10.0.0.9") == 2, "the oldest stranger"
    doors.left(2)
    doors.known(3)
    doors.known(4)
    assert doors.came(5, "10.0.0.8") == 5, "all others speak the protocol"


def test_one_address_has_its_share() -> None:
    doors = Doors(most=10)
    for descriptor in range(5):
        assert doors.came(descriptor, "10.0.0.1") is None
        doors.known(descriptor)
    assert doors.came(5, "10.0.0.1") == 5 and doors.came(6, "10.0.0.2") is None


def test_never_more_than_there_may_be() -> None:
    rng, doors, there = random.Random(1), Doors(most=20), set[int]()
    for number in range(5000):
        match rng.randrange(3):
            case 0 if there:
                gone = rng.choice(sorted(there))
                there.discard(gone)
                doors.left(gone)
            case 1 if there:
                doors.known(rng.choice(sorted(there)))
            case _:
                there.add(number)
                if (goes := doors.came(number, f"10.0.0.{rng.randrange(5)}")) is not None:
                    there.discard(goes)
                    doors.left(goes)
        assert set(doors.addresses) == there and len(there) <= 20
        assert set(doors.strangers) <= there and sum(doors.count.values()) == len(there)


def test_a_number_that_is_used_again_is_another_connection() -> None:
    doors = Doors(most=4)
    doors.came(7, "10.0.0.1")
    doors.known(7)
    doors.came(7, "10.0.0.2")
    assert doors.addresses == {7: "10.0.0.2"} and list(doors.strangers) == [7]


def test_a_burst_then_a_rate() -> None:
    throttle = Throttle(rate=10.0, burst=5.0)
    assert [throttle.allows("a", 0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert throttle.allows("b", 0.0), "each has its own"
    assert throttle.allows("a", 0.11) and not throttle.allows("a", 0.11)
    assert sum(throttle.allows("a", 100.0 + step / 1000) for step in range(1000)) == 5 + 9


def test_large_messages_count_for_more_and_every_allowed_size_passes_a_full_bucket() -> None:
    from unicron_ctl.controller.server import OF_AN_ADDRESS, OF_AN_AGENT
    from unicron_ctl.protocol.wire import MAX_BYTES

    assert cost(0) == cost(BYTES_OF_ONE - 1) == 1.0 and cost(10 * BYTES_OF_ONE) == 11.0
    assert cost(MAX_BYTES) < min(OF_AN_ADDRESS[1], OF_AN_AGENT[1])


def test_invented_names_cost_bounded_memory() -> None:
    throttle = Throttle(rate=1.0, burst=1.0, names=100)
    for name in range(10_000):
        throttle.allows(str(name), 0.0)
    assert len(throttle.buckets) == 100
