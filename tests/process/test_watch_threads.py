"""The thread that frees a stuck rank, and the main one: who touches the sockets when."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.processes import wait_for
from tests.support.watching import Kicks, broken, inside
from unicron_transition.generations.watch import Watch

pytestmark = pytest.mark.process


def test_a_rank_that_stopped_by_itself_is_out_of_its_generation():
    kicks = Kicks()
    watch = Watch(0, kicks)
    inside(watch, 4)
    assert watch.give_up() == 4 and watch.lost()
    watch.on_message(broken(4))
    time.sleep(0.06)
    assert kicks.count == 0, "it has left its collectives: there is nobody to free"
    inside(watch, 5)
    assert not watch.lost()


def test_a_stuck_main_thread_is_freed_until_it_acknowledges():
    kicks = Kicks()
    watch = Watch(0, kicks)
    inside(watch, 1)
    watch.on_message(broken(1))
    wait_for(lambda: kicks.count >= 3, "it is freed again and again")
    watch.give_up()
    after = kicks.count
    time.sleep(0.06)
    assert kicks.count == after


def test_nobody_is_freed_while_the_next_generation_is_entered():
    """The unblocking thread works under the lock: once `give_up` has returned, it touches no socket any more."""
    acknowledged, touched = threading.Event(), []

    def unblock(inside):
        time.sleep(0.002)
        touched.append(acknowledged.is_set())

    watch = Watch(0, unblock)
    for generation in range(1, 30):
        acknowledged.clear()
        inside(watch, generation)
        watch.on_message(broken(generation))
        time.sleep(0.001 * (generation % 5))
        watch.give_up()
        acknowledged.set()
        time.sleep(0.001)
    assert touched and not any(touched)


def test_what_was_broken_inside_a_replica_is_no_shelter_any_more():
    """The Break comes right before the next schedule: what that waits for must not be believed, nor waited for."""
    told: list[bool] = []
    watch = Watch(0, told.append)
    inside(watch, 1)
    watch.on_message(broken(1))  # of another replica's loss
    wait_for(lambda: told, "the connections inside are broken")
    watch.shelter(True)
    assert watch.hit() and watch.disturbed(inside=True)
    before = len(told)
    wait_for(lambda: len(told) >= before + 3, "it is freed again and again")
    assert all(told)
    watch.give_up()
    inside(watch, 2)
    watch.shelter(True)
    assert not watch.hit()
    watch.on_message(broken(2))
    wait_for(lambda: told[-1] is False, "only the others' connections are broken")
    assert not watch.hit() and not watch.disturbed(inside=True)
