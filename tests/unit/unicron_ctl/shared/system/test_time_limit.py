"""Calls that hang are given up, and no more than so many of them hang at once."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.support.processes import wait_for
from unicron_ctl.shared.system import time_limit
from unicron_ctl.shared.system.time_limit import TimeLimit


def test_what_ends_in_time_gives_its_result_or_raises() -> None:
    limit = TimeLimit(30.0, 2, "test")
    assert limit.run(lambda: 3) == 3
    with pytest.raises(KeyError):
        limit.run(lambda: {}["nothing"])


def test_what_hangs_is_given_up_and_the_next_ones_at_once_until_it_has_ended() -> None:
    limit, go_on = TimeLimit(0.05, 2, "test-hanging"), threading.Event()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            limit.run(go_on.wait)
    began = time.monotonic()
    for _ in range(1000):
        with pytest.raises(TimeoutError, match="earlier calls hang"):
            limit.run(go_on.wait)
    assert time.monotonic() - began < 20.0, "not each of them waits"
    assert sum(thread.name == "test-hanging" for thread in threading.enumerate()) == 2
    go_on.set()
    wait_for(lambda: not any(thread.name == "test-hanging" for thread in threading.enumerate()), "they have ended")
    assert limit.run(lambda: "again") == "again"


def test_a_thread_is_used_again_and_one_that_hangs_is_replaced() -> None:
    """Defect: each call had a thread of its own, and strangers can ask for thousands a second."""
    limit, go_on = TimeLimit(30.0, 2, "test-reused"), threading.Event()
    assert len({limit.run(threading.get_ident) for _ in range(100)}) == 1
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(limit, "_seconds", 0.05)
        limit.run(go_on.wait)
    first = limit.run(threading.get_ident)
    assert {limit.run(threading.get_ident) for _ in range(100)} == {first}
    assert sum(thread.name == "test-reused" for thread in threading.enumerate()) == 2
    go_on.set()
    wait_for(lambda: sum(thread.name == "test-reused" for thread in threading.enumerate()) == 1, "the other one ends")


def test_a_thread_that_nobody_needs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "IDLE_SECONDS", 0.05)
    limit = TimeLimit(30.0, 2, "test-idle")
    assert limit.run(lambda: 1) == 1
    wait_for(lambda: not any(thread.name == "test-idle" for thread in threading.enumerate()), "it has ended")
    assert limit.run(lambda: 2) == 2


def test_a_fork_has_threads_of_its_own() -> None:
    """The parent's idle thread is not in the child, which would wait for it in vain."""
    limit = TimeLimit(30.0, 2, "test-forked")
    assert limit.run(lambda: 1) == 1
    child = os.fork()
    if child == 0:
        os._exit(0 if limit.run(lambda: 2) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
