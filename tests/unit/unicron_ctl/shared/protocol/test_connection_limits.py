"""Who has to go when there are too many connections, and how much one peer may send."""

from __future__ import annotations

import random

from unicron_ctl.controller.model.asker import NOBODY, Asker
from unicron_ctl.controller.model.quotas import (
    BYTES_OF_ONE,
    OF_A_STRANGER,
    OF_A_USER,
    OF_AN_ADDRESS,
    OF_AN_AGENT,
    Quotas,
    cost,
)
from unicron_ctl.controller.server.fair_queue import Question
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.connection_limits import KNOWN_SECONDS, ConnectionLimits
from unicron_ctl.shared.protocol.wire import MAX_BYTES
from unicron_ctl.shared.system.throttle import NAMES, Throttle


def test_strangers_go_first_and_agents_stay() -> None:
    doors = ConnectionLimits(most=4)
    for descriptor in range(4):
        assert doors.add(descriptor, f"10.0.0.{descriptor}", 0.0) is None
    doors.mark_known(0, "key 0", 1.0)
    doors.mark_known(1, "key 1", 1.0)
    assert doors.add(4, "10.0.0.9", 2.0) == 2, "the oldest stranger"
    doors.remove(2)
    doors.mark_known(3, "key 3", 2.0)
    doors.mark_known(4, "key 4", 2.0)
    assert doors.add(5, "10.0.0.8", 3.0) == 5, "all others are agents"


def test_one_address_has_its_share_and_agents_there_do_not_count() -> None:
    """Users of one node share its address: one who opens many connections puts nobody else's agent out."""
    doors = ConnectionLimits(most=10)
    for descriptor in range(5):
        assert doors.add(descriptor, "10.0.0.1", 0.0) is None
        doors.mark_known(descriptor, f"key {descriptor}", 0.0)
    for descriptor in range(5, 8):
        assert doors.add(descriptor, "10.0.0.1", 0.0) is None
    assert doors.add(8, "10.0.0.2", 0.0) is doors.add(9, "10.0.0.2", 0.0) is None
    assert doors.add(10, "10.0.0.3", 0.0) == 5, "the address that has the most strangers"
    doors.remove(5)
    doors.remove(8)
    doors.remove(9)
    for descriptor in range(11, 13):
        doors.add(descriptor, "10.0.0.1", 0.0)
    assert len(doors.agents) == 5 and doors.add(13, "10.0.0.1", 0.0) == 6


def test_a_key_has_one_known_connection() -> None:
    """Whoever has registered once may not fill the doors with that key."""
    doors = ConnectionLimits(most=4)
    for descriptor in range(4):
        doors.add(descriptor, "10.0.0.1" if descriptor % 2 else "10.0.0.2", 0.0)
        doors.mark_known(descriptor, "one key", 0.0)
    assert list(doors.agents) == [3] and doors.add(4, "10.0.0.3", 0.0) in (0, 1, 2)


def test_who_has_not_spoken_for_long_is_a_stranger_again() -> None:
    """Its job may be over."""
    doors = ConnectionLimits(most=2)
    for descriptor in range(2):
        doors.add(descriptor, f"10.0.0.{descriptor}", 0.0)
        doors.mark_known(descriptor, f"key {descriptor}", 0.0)
    doors.mark_known(0, "key 0", KNOWN_SECONDS)
    assert doors.add(2, "10.0.0.2", KNOWN_SECONDS + 1.0) == 1


def test_never_more_than_there_may_be() -> None:
    rng, doors, there = random.Random(1), ConnectionLimits(most=20), set[int]()
    for number in range(5000):
        match rng.randrange(3):
            case 0 if there:
                gone = rng.choice(sorted(there))
                there.discard(gone)
                doors.remove(gone)
            case 1 if there:
                doors.mark_known(rng.choice(sorted(there)), f"key {rng.randrange(15)}", number)
            case _:
                there.add(number)
                if (goes := doors.add(number, f"10.0.0.{rng.randrange(5)}", number)) is not None:
                    there.discard(goes)
                    assert goes not in doors.agents
                    doors.remove(goes)
        strangers = {one for here in doors.strangers.values() for one in here}
        assert set(doors.addresses) == there == strangers | doors.agents.keys() and len(there) <= 20
        assert not strangers & doors.agents.keys() and all(doors.strangers.values())
        assert {descriptor: key for key, descriptor in doors.by_key.items()} == {
            descriptor: key for descriptor, (key, _) in doors.agents.items()
        }


def test_a_number_that_is_used_again_is_another_connection() -> None:
    doors = ConnectionLimits(most=4)
    doors.add(7, "10.0.0.1", 0.0)
    doors.mark_known(7, "a key", 0.0)
    doors.add(7, "10.0.0.2", 0.0)
    assert doors.addresses == {7: "10.0.0.2"} and not doors.agents and not doors.by_key


def test_a_burst_then_a_rate() -> None:
    throttle = Throttle(rate=10.0, burst=5.0)
    assert [throttle.allows("a", 0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert throttle.allows("b", 0.0), "each has its own"
    assert throttle.allows("a", 0.11) and not throttle.allows("a", 0.11)
    assert sum(throttle.allows("a", 100.0 + step / 1000) for step in range(1000)) == 5 + 9


def test_what_an_answer_costs_is_taken_from_later_questions() -> None:
    throttle = Throttle(rate=10.0, burst=5.0)
    assert throttle.allows("a", 0.0)
    throttle.charge("a", 0.0, 14.0)
    assert not throttle.allows("a", 1.0) and throttle.allows("a", 1.2)


def test_large_messages_count_for_more_and_every_allowed_size_passes_a_full_bucket() -> None:
    assert cost(0) == cost(BYTES_OF_ONE - 1) == 1.0 and cost(10 * BYTES_OF_ONE) == 11.0
    assert cost(MAX_BYTES) < min(burst for _, burst in (OF_AN_AGENT, OF_A_USER, OF_A_STRANGER, OF_AN_ADDRESS))


def drain(quotas: Quotas, key: str, address: str = "10.0.0.1") -> int:
    """Asks until nothing is left; as often as it was allowed."""
    count = 0
    while quotas.allows(key, address, False, 0.0, 1.0):
        count += 1
    return count


def test_users_of_one_address_do_not_use_up_what_others_there_have() -> None:
    """Defect: all who were no registered agents shared what their node had."""
    quotas = Quotas()
    quotas.proven("ann's", 1000)
    quotas.proven("bob's", 1001)
    quotas.proven("bob's other", 1001)
    assert drain(quotas, "bob's") == OF_A_USER[1] and drain(quotas, "bob's other") == 0, "however many keys he has"
    assert drain(quotas, "a stranger's") == OF_A_STRANGER[1] and drain(quotas, "another's") == OF_A_STRANGER[1]
    assert sum(drain(quotas, f"key {number}") for number in range(20)) == OF_AN_ADDRESS[1] - 2 * OF_A_STRANGER[1]
    assert drain(quotas, "a stranger's there", "10.0.0.2") == OF_A_STRANGER[1]
    assert quotas.allows("an agent's", "10.0.0.1", True, 0.0, 1.0) and quotas.may_ask("1000", "10.0.0.1", 0.0)
    assert drain(quotas, "ann's") == OF_A_USER[1]


def test_an_answer_counts_for_who_asked_wherever_he_asks() -> None:
    """Defect: at each address a user had as much as at one, and 12 of them kept the loop from turning."""
    quotas, ask = Quotas(), wire.Ask(what="ping")
    here, there = (Question((b"r",), ask, Asker(1001), address).pays for address in ("10.0.0.1", "10.0.0.2"))
    quotas.charge_answer(here, "10.0.0.1", 0.0, OF_A_USER[1] + 10.0)
    assert not quotas.may_ask(here, "10.0.0.1", 0.0) and not quotas.may_ask(there, "10.0.0.2", 0.0)
    assert quotas.may_ask("1000", "10.0.0.1", 0.0) and drain(quotas, "a stranger's") == OF_A_STRANGER[1]
    nobody = Question((b"r",), ask, NOBODY, "10.0.0.1").pays
    quotas.charge_answer(nobody, "10.0.0.1", 0.0, OF_AN_ADDRESS[1])
    assert drain(quotas, "another's") == 0 and not quotas.may_ask(nobody, "10.0.0.1", 0.0)
    root = Asker(0, "root", admin=True)
    here, there = (Question((b"r",), ask, root, address).pays for address in ("10.0.0.1", "10.0.0.2"))
    quotas.charge_answer(here, "10.0.0.1", 0.0, OF_A_USER[1] + 10.0)
    assert quotas.may_ask(there, "10.0.0.2", 0.0), "its checks run on all nodes at once"


def test_a_network_of_ipv6_has_as_much_as_one_address_of_ipv4() -> None:
    """Defect: one host has 2^64 addresses there, and each had quotas of its own."""

    def admitted(addresses: list[str], keys: int) -> list[int]:
        quotas = Quotas()
        quotas.proven("bob's", 1001)
        strangers = sum(drain(quotas, f"key {number}", addresses[number % len(addresses)]) for number in range(keys))
        return [strangers, sum(drain(quotas, "bob's", address) for address in addresses)]

    here = [f"2001:db8::{number:x}:1" for number in range(40)]
    assert admitted(here, 40) == admitted(["10.0.0.1"], 40) == [OF_AN_ADDRESS[1], OF_A_USER[1]]
    assert admitted(["2001:db8::1", "2001:db8:0:1::1"], 40) == [2 * OF_AN_ADDRESS[1], 2 * OF_A_USER[1]]
    quotas, ask = Quotas(), wire.Ask(what="ping")
    quotas.charge_answer("", here[0], 0.0, OF_AN_ADDRESS[1])
    assert not quotas.may_ask("", here[1], 0.0)
    for asker in (NOBODY, Asker(0, "root", admin=True)):
        first, second = (Question((b"r",), ask, asker, address) for address in here[:2])
        assert (first.whose, first.pays) == (second.whose, second.pays)


def test_proofs_cost_bounded_memory() -> None:
    quotas = Quotas()
    for number in range(3 * NAMES):
        quotas.proven(str(number), number)
    assert len(quotas._proven) == NAMES


def test_invented_names_cost_bounded_memory() -> None:
    throttle = Throttle(rate=1.0, burst=1.0, names=100)
    for name in range(10_000):
        throttle.allows(str(name), 0.0)
    assert len(throttle.buckets) == 100
