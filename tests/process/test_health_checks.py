"""A health check that does not answer."""

from __future__ import annotations

import threading

import pytest

from unicron_detector.health.checks import Finding, Settings
from unicron_detector.health.runner import run

pytestmark = pytest.mark.process


def test_a_check_that_hangs_is_unknown_and_costs_its_time_only():
    free = threading.Event()
    checks = {"stuck": lambda _: free.wait(600) and Finding("good", ""), "fine": lambda _: Finding("good", "")}
    report = run(Settings(timeout=1.0), checks=checks)
    free.set()
    assert [result.verdict for result in report.results] == ["unknown", "good"]
    assert report.verdict == "unknown" and "no answer within" in report.reason
