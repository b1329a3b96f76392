"""A line of a log has its time, its level, and its source."""

from __future__ import annotations

import pytest

from unicron_detector.processes.log_format import log_line


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_a_line_has_time_level_program_and_whose_it_is() -> None:
    line = log_line("warning", "unicron", "no room is left", 1795930921.5, job="131_2", slot=0, node="")
    assert line == "2026-11-29T05:42:01 WARNING unicron job=131_2 slot=0: no room is left"


def test_a_line_of_nobody_in_particular() -> None:
    assert log_line("INFO", "unicrond", "listening", 0.0) == "1970-01-01T00:00:00 INFO unicrond: listening"
