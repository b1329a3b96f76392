"""Whose item is next: by turns at each level, and there is room for those that have little."""

from __future__ import annotations

import pytest

from unicron_ctl.controller.server.fair_queue import FairQueue


@pytest.fixture
def queue() -> FairQueue:
    return FairQueue(4096, 1024, 512)


def test_who_has_little_is_next_however_much_others_have(queue: FairQueue) -> None:
    """Defect: credentials of all machines were in one queue, and a newcomer waited for 4,096 of strangers."""
    for number in range(60):
        for _ in range(100):
            queue.add((f"10.0.0.{number}", f"10.0.0.{number}", "k"), "stranger")
    assert len(queue) > 2500
    assert queue.add(("10.0.1.1", "10.0.1.1", "new"), "newcomer")
    assert [queue.next() for _ in range(61)].count("newcomer") == 1


@pytest.mark.parametrize(
    ("busy", "other"),
    [
        (lambda n: ("loopback", f"127.0.{n >> 8}.{n & 255}", "k"), ("10.0.0.1", "10.0.0.1", "k")),
        (lambda n: ("n1", "n1", f"key {n}"), ("n2", "n2", "k")),
    ],
)
def test_a_machine_has_one_turn_whatever_addresses_and_keys_it_uses(queue: FairQueue, busy, other) -> None:
    added = [queue.add(busy(number), "busy") for number in range(5000)]
    assert 0 < added.count(True) <= 1024
    for number in range(3):
        assert queue.add(other, f"other {number}")
    order = [queue.next() for _ in range(6)]
    assert [item for item in order if item != "busy"] == ["other 0", "other 1", "other 2"], "every second turn"


def test_one_connection_does_not_keep_out_another_of_its_address(queue: FairQueue) -> None:
    added = [queue.add(("n1", "n1", "busy"), "busy") for _ in range(1000)]
    count = added.count(True)
    assert 128 < count < 256
    assert queue.add(("n1", "n1", "new"), "new")
    assert queue.waiting("n1") == count + 1 and queue.waiting("n1", "n1", "new") == 1 and queue.waiting("n2") == 0
    assert "new" in (queue.next(), queue.next())


def test_who_fills_it_leaves_room_for_who_has_little(queue: FairQueue) -> None:
    """The whole was lent out first come, first served, and who came then was refused."""
    for _ in range(600):
        for number in range(1000):
            queue.add((f"a{number}", f"a{number}", "k"), number)
    assert len(queue) < 4096 and all(queue.waiting(f"a{number}") for number in range(1000))
    assert queue.add(("new", "new", "k"), -1)


def test_it_is_empty_again_and_holds_nothing(queue: FairQueue) -> None:
    for number in range(100):
        assert queue.add((f"{number % 3}", f"{number % 5}", f"{number % 7}"), number)
    assert sorted(queue.next() for _ in range(100)) == list(range(100))
    assert not len(queue) and not queue._root.children
    with pytest.raises(IndexError):
        queue.next()


def test_what_there_is_no_room_for_leaves_no_trace() -> None:
    queue: FairQueue[int] = FairQueue(4, 1, 4)
    assert queue.add(("a", "a", "x"), 1)
    assert not queue.add(("a", "b", "y"), 2)
    assert len(queue) == queue.waiting("a") == 1 and queue.next() == 1 and not queue._root.children
