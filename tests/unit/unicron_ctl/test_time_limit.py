"""Calls that hang are given up, and no more than so many of them hang at once."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.processes import wait_for
from unicron_ctl.time_limit import TimeLimit


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
