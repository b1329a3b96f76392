"""Errors of the agent's own cost what they struck, and no more."""

from __future__ import annotations

import os
import re

import pytest

from unicron_ctl.agent.connections.connections import Polling
from unicron_ctl.agent.connections.containment import MOST_TOLD, Containment


def test_what_fails_is_said_once_and_the_rest_goes_on(snapshot):
    said: list[str] = []
    containment = Containment(said.append)
    for _ in range(3):
        assert containment.attempt("read it", lambda: os.open("/nowhere", os.O_RDONLY)) is None
    assert containment.attempt("count", lambda: 3) == 3
    (line,) = said
    assert re.sub(r"(?<=\.py:)\d+", "LINE", line) == snapshot


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("no thread"), MemoryError()])
def test_whatever_kind_it_is(error: Exception):
    def fail() -> None:
        raise error

    said: list[str] = []
    assert Containment(said.append).attempt("begin", fail) is None
    assert len(said) == 1 and said[0].endswith("the training goes on")


def test_ever_new_errors_do_not_fill_the_log():
    said: list[str] = []
    containment = Containment(said.append)
    for number in range(MOST_TOLD + 10):
        containment.attempt(f"try {number}", lambda: 1 // 0)
    assert len(said) == MOST_TOLD


def test_one_source_that_fails_keeps_the_others_from_nothing():
    said: list[str] = []
    polling, heard = Polling(Containment(said.append)), []
    ends = [os.pipe() for _ in range(2)]
    try:
        polling.watch(ends[0][0], lambda: 1 // 0)
        polling.watch(ends[1][0], lambda: heard.append("second"))
        for _, writing in ends:
            os.write(writing, b".")
        polling.serve(5.0)
    finally:
        for reading, writing in ends:
            os.close(reading)
            os.close(writing)
    assert heard == ["second"] and "ZeroDivisionError" in said[0]
